"""What all frameworks share: collectives on NumPy views, process sets, handles, objects, gradient exchange.

Knows no framework. A binding (``ringdance.torch``, ...) turns its tensors into NumPy views,
calls this layer, and turns results back.
"""
