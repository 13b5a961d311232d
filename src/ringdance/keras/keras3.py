"""Reduce the gradients of Keras 3 optimizers at these points:

- In ``apply()``, before any other processing. ``fit()``, ``apply_gradients()`` and ``stateless_apply()`` all
  call it.
- With ``gradient_accumulation_steps``, where Keras clips the accumulated gradients, once per update.
- In a ``LossScaleOptimizer``, before it checks for infinities, so that all ranks skip the same steps.

With ``mixed_float16``, ``compile()`` wraps a DistributedOptimizer in a LossScaleOptimizer, which checks only
this rank's gradients for infinities. This module patches it to check the gradients of all ranks, because if
only one rank skipped a step, the other ranks would wait for its gradients.
"""

from __future__ import annotations

import functools
from typing import Any

from ringdance.errors import ArgumentError
from ringdance.keras import _private
from ringdance.keras.library import keras
from ringdance.keras.reduction import Distributed, is_distributed, true_on_all


class Keras3Distributed(Distributed):
    """Reduces gradients in Keras 3 optimizers."""

    _applied_to: tuple[Any, ...] = ()

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce the gradients over the ranks, and update the variables with the results."""
        gradients = list(grads)
        optimizer: Any = self
        targets = None if trainable_variables is None else list(trainable_variables)
        variables = _private.trainable_variables(self) if targets is None else targets
        self._remember(_private.trainable_variables(self, variables))
        # If the lengths differ, Keras raises an error. With accumulation, the reduction happens later.
        if len(gradients) == len(variables) and not optimizer.gradient_accumulation_steps:
            gradients = self._reduce(gradients, variables)
        return super().apply(gradients, targets)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        object.__setattr__(self, "_applied_to", tuple(trainable_variables))
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        optimizer: Any = self
        if optimizer.gradient_accumulation_steps:
            grads = self._reduce_accumulated(list(grads), optimizer.gradient_accumulation_steps)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _backend_reset_gradient_accumulators(self) -> None:
        base: Any = super()
        base._backend_reset_gradient_accumulators()
        if keras.backend.backend() == "torch":
            for variable in _private.accumulators(self):
                variable.assign(keras.ops.zeros_like(variable))

    def _reduce_accumulated(self, gradients: list[Any], steps: int) -> list[Any]:
        variables = self._applied_to
        if keras.backend.backend() != "jax":
            return self._reduce(gradients, variables)
        # On JAX, this runs in every step. Steps that only accumulate discard the result.
        optimizer: Any = self
        update = (optimizer._iterations + 1) % steps == 0
        return keras.ops.cond(update, lambda: self._reduce(gradients, variables), lambda: list(gradients))


class _ScalesLoss(Keras3Distributed):
    """Reduces gradients in a LossScaleOptimizer, which does not call ``apply`` on JAX."""

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Reduce the gradients over the ranks, then return the updated variables."""
        variables = _private.trainable_variables(self)
        with keras.StatelessScope(state_mapping=zip(variables, trainable_variables, strict=True)):
            grads = self._reduce(list(grads), variables)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]


def front(base: type) -> type:
    """Return the mixin class that the distributed subclass of ``base`` inherits from."""
    return _ScalesLoss if issubclass(base, keras.optimizers.LossScaleOptimizer) else Keras3Distributed


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that reduces gradients. This is ``optimizer``, even for a LossScaleOptimizer."""
    return optimizer


def class_options(base: type) -> dict[str, Any]:
    """Return the attributes that make Keras save a subclass as ``base``."""
    # On torch, an optimizer's class is a subclass of the public class.
    public = [kind for kind in base.__mro__ if getattr(keras.optimizers, kind.__name__, None) is kind]
    return {"__module__": "keras.optimizers" if public else base.__module__}


def pass_options(optimizer: Any, passes: int, average: bool) -> dict[str, Any]:
    """Make Keras accumulate gradients over ``passes`` passes, and return the class attributes for this.

    Keras averages gradients over the passes. Unless ``average`` is True, ``_factor`` makes this mean a sum.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if passes > 1 or inner.gradient_accumulation_steps:
        _private.check_accumulation(inner)
    if passes == 1:
        return {}
    if inner.gradient_accumulation_steps not in (None, passes):
        raise ArgumentError(
            f"backward_passes_per_step={passes}, but the optimizer has gradient_accumulation_steps="
            f"{inner.gradient_accumulation_steps}. Set only one of the two."
        )
    if inner.built and not inner.gradient_accumulation_steps:
        raise ArgumentError(
            "backward_passes_per_step > 1 cannot be set after the optimizer has been built. Create the "
            f"optimizer with gradient_accumulation_steps={passes} instead."
        )
    inner.gradient_accumulation_steps = passes
    return {} if average else {"_factor": float(passes)}


@functools.cache
def adapt() -> None:
    """Patch Keras to check the gradients of all ranks for infinities, and to disable XLA on TensorFlow."""
    scaler = keras.optimizers.LossScaleOptimizer
    check_finite = scaler.check_finite

    @functools.wraps(check_finite)
    def check_on_all_ranks(self: Any, grads: Any) -> Any:
        finite = check_finite(self, grads)
        inner = self.inner_optimizer
        if isinstance(self, Distributed) or not isinstance(inner, Distributed):
            return finite
        return true_on_all(finite, f"{inner._reduction.name}.finite", inner._reduction.process_set)

    scaler.check_finite = check_on_all_ranks
    _private.without_xla(is_distributed)
