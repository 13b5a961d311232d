"""Where an optimizer of Keras 3 reduces its gradients.

- in ``apply()``, before any other processing; ``fit()``, ``apply_gradients()`` and ``stateless_apply()`` all
  call it;
- with ``gradient_accumulation_steps``: where the accumulated gradients are clipped, once for each update;
- of a ``LossScaleOptimizer``: before it looks for infinities, so that all ranks skip the same steps.

``compile()`` under ``mixed_float16`` wraps a DistributedOptimizer in a LossScaleOptimizer, which looks for
infinities in this rank's own gradients. It is made to ask all ranks: a rank that skipped a step alone
would leave the others waiting for its gradients.
"""

from __future__ import annotations

import functools
from typing import Any

from ringdance.errors import ArgumentError
from ringdance.keras import _private
from ringdance.keras.library import keras
from ringdance.keras.reduction import Distributed, is_distributed, true_on_all


class Keras3Distributed(Distributed):
    """For the optimizers of Keras 3."""

    _applied_to: tuple[Any, ...] = ()

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Update the variables with gradients that are reduced over the ranks first."""
        gradients = list(grads)
        known: Any = self
        given = None if trainable_variables is None else list(trainable_variables)
        variables = _private.trainable_variables(self) if given is None else given
        self._remember(_private.trainable_variables(self, variables))
        # Other lengths are a mistake that Keras explains; with accumulation it is done afterwards.
        if len(gradients) == len(variables) and not known.gradient_accumulation_steps:
            gradients = self._reduce(gradients, variables)
        return super().apply(gradients, given)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        object.__setattr__(self, "_applied_to", tuple(trainable_variables))
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        known: Any = self
        if known.gradient_accumulation_steps:
            grads = self._reduce_accumulated(list(grads), known.gradient_accumulation_steps)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _backend_reset_gradient_accumulators(self) -> None:
        known: Any = super()
        known._backend_reset_gradient_accumulators()
        if keras.backend.backend() == "torch":
            for one in _private.accumulators(self):
                one.assign(keras.ops.zeros_like(one))

    def _reduce_accumulated(self, gradients: list[Any], steps: int) -> list[Any]:
        variables = self._applied_to
        if keras.backend.backend() != "jax":
            return self._reduce(gradients, variables)
        # On JAX this runs in every step, and its result is dropped in those that only accumulate.
        known: Any = self
        update = (known._iterations + 1) % steps == 0
        return keras.ops.cond(
            update, lambda: self._reduce(gradients, variables), lambda: list(gradients)
        )


class _ScalesLoss(Keras3Distributed):
    """For a LossScaleOptimizer, which on JAX does not go through ``apply``."""

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Return updated variables; gradients are reduced over the ranks first."""
        variables = _private.trainable_variables(self)
        with keras.StatelessScope(state_mapping=zip(variables, trainable_variables, strict=True)):
            grads = self._reduce(list(grads), variables)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]


def front(base: type) -> type:
    """Return the class to put in front of an optimizer's."""
    return _ScalesLoss if issubclass(base, keras.optimizers.LossScaleOptimizer) else Keras3Distributed


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that reduces: the argument, also if it is a LossScaleOptimizer."""
    return optimizer


def class_options(base: type) -> dict[str, Any]:
    """Return the attributes by which Keras takes a subclass for ``base`` when it saves it."""
    # On torch the instance's class is not the public one, but derived from it.
    public = [one for one in base.__mro__ if getattr(keras.optimizers, one.__name__, None) is one]
    return {"__module__": "keras.optimizers" if public else base.__module__}


def pass_options(optimizer: Any, passes: int, average: bool) -> dict[str, Any]:
    """Let Keras accumulate over ``passes``; return the options for a sum instead of its mean."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if passes > 1 or inner.gradient_accumulation_steps:
        _private.check_accumulation(inner)
    if passes == 1:
        return {}
    if inner.gradient_accumulation_steps not in (None, passes):
        raise ArgumentError(
            f"backward_passes_per_step={passes}, but the optimizer has gradient_accumulation_steps="
            f"{inner.gradient_accumulation_steps}: give one of the two."
        )
    if inner.built and not inner.gradient_accumulation_steps:
        raise ArgumentError(
            "backward_passes_per_step > 1 needs an optimizer that has not been used: make it with "
            f"gradient_accumulation_steps={passes} instead."
        )
    inner.gradient_accumulation_steps = passes
    return {} if average else {"_factor": float(passes)}


@functools.cache
def adapt() -> None:
    """Patch Keras for distributed optimizers: check for infinities on all ranks, and no XLA on TensorFlow."""
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
