"""Undocumented MXNet names that the binding uses, each with its purpose. All exist in MXNet 1.9.1."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import mxnet as mx

NDArray = Any


class Trainer(mx.gluon.Trainer):  # type: ignore[misc]
    """A Gluon trainer that calls ``reduce_gradients`` instead of exchanging gradients through a kvstore.

    ``step`` and ``allreduce_grads`` call ``_allreduce_grads`` before ``_update``. MXNet has no public hook
    that runs after gradients are computed and before they are used. If MXNet did not call this method, each
    rank would train a separate model, so ``__init__`` checks that MXNet defines it. ``_params`` contains the
    parameters in the trainer's order.
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
    """Call a function with a Gluon parameter's arrays once the parameter is initialized.

    The function is also called for deep copies of the parameter. ``_init_impl`` is the method that
    initializes a parameter, even if its shape is not known before the first forward pass.
    """

    def then(self: Any, *args: Any, **kwargs: Any) -> None:
        type(self)._init_impl(self, *args, **kwargs)
        vars(self).pop("_init_impl", None)  # Only once: a single rank may reinitialize the parameter.
        function(self.list_data())

    parameter._init_impl = types.MethodType(then, parameter)
