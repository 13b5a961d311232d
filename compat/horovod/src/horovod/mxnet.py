"""MXNet: not here; importing it says what to use."""

from horovod._absent import absent

raise absent(
    __name__,
    "the MXNet project has ended, and Ringdance has no binding for it. Move the model to PyTorch "
    "(import horovod.torch as hvd).",
)
