"""The layer shared by all bindings: collectives on NumPy views, process sets, handles, gradient exchange.

This layer does not depend on any framework. A binding (``ringdance.torch``, ...) converts its tensors to
NumPy views, calls this layer, and converts the results back.
"""
