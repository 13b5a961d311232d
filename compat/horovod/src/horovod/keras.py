"""Keras: not here; importing it says what to use."""

from horovod._absent import absent

raise absent(
    __name__,
    "Ringdance has no binding for Keras yet. Train with PyTorch (import horovod.torch as hvd), or "
    "exchange NumPy arrays with ringdance.numpy.",
)
