"""The layer shared by all frameworks: collectives on NumPy views, process sets, handles, gradient exchange.

It does not depend on any framework. A binding (``ringdance.torch``, ...) converts its tensors to NumPy
views, calls this layer, and converts the results back.
"""
