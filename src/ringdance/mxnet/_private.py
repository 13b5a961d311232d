"""Undocumented MXNet names that the binding uses, with the reason for each. Present in 1.9.1."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import mxnet as mx

NDArray = Any


class Trainer(mx.gluon.Trainer):  # type: ignore[misc]
    """A Gluon trainer without kvstore. Calls ``reduce_gradients`` where other trainers push and pull.

    ``_allreduce_grads``: ``step`` and ``allreduce_grads`` call it before ``_update``. MXNet has no public
    hook between the computation of gradients and their use. Without this name, ``step`` would train each rank
    on its own, so ``__init__`` checks for it. ``_params``: the parameters in the trainer's order.
    """

    def __init__(self, params: Any, optimizer: Any, optimizer_params: Any) -> None:
        if not hasattr(mx.gluon.Trainer, "_allreduce_grads"):
            raise ImportError(f"MXNet {mx.__version__} has no Trainer._allreduce_grads. Use mxnet==1.9.1.")
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)

    def reduce_gradients(self) -> None:
        """Reduce the gradients of all parameters."""
        raise NotImplementedError

    def _allreduce_grads(self) -> None:
        self.reduce_gradients()

    def trained(self) -> list[Any]:
        """Return the parameters that have gradients."""
        return [parameter for parameter in self._params if parameter.grad_req != "null"]


def after_init(parameter: Any, function: Callable[[list[NDArray]], None]) -> None:
    """Call a function with a Gluon parameter's arrays when the parameter gets its first values.

    Deep copies of the parameter call the function too.
    ``_init_impl``: sets the values, even if the shape is known only in the first forward pass.
    """

    def then(self: Any, *args: Any, **kwargs: Any) -> None:
        type(self)._init_impl(self, *args, **kwargs)
        vars(self).pop("_init_impl", None)  # A rank may set values again on its own.
        function(self.list_data())

    parameter._init_impl = types.MethodType(then, parameter)
