"""DistributedOptimizer: a Keras optimizer whose gradients are reduced over the ranks. Contract 2.3.

One implementation for the backends tensorflow, torch and jax. The optimizer stays the object it is, with its
variables and settings; its class becomes a subclass of its own class that reduces gradients

- in ``apply()``, before anything else happens to them; ``fit()``, ``apply_gradients()`` and
  ``stateless_apply()`` all come there;
- with ``gradient_accumulation_steps``: where the accumulated gradients are clipped, once for each update;
- of a ``LossScaleOptimizer``: before it looks for infinities, so that all ranks skip the same steps.

Clipping, weight decay, EMA and loss scaling then see what one process would see on the joined batch.

``compile()`` under ``mixed_float16`` wraps a DistributedOptimizer in a LossScaleOptimizer, which looks for
infinities in this rank's own gradients. It is made to ask all ranks: a rank that skipped a step alone
would leave the others waiting for its gradients.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import keras

from ringdance import session
from ringdance.core.request import Operation
from ringdance.errors import ArgumentError
from ringdance.keras.compression import Compression
from ringdance.keras.reduction import Reduction, binding, everywhere
from ringdance.training.process_sets import ProcessSet, global_process_set
from ringdance.training.verbs import pick_operation

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "is_distributed", "load_model"]

Average = int(Operation.AVERAGE)


class _Listed(list[Any]):
    """A list that can be called as well, as ``optimizer.variables`` could in TensorFlow 2's Keras."""

    def __call__(self) -> list[Any]:
        return self


class _Distributed:
    """What is put in front of the optimizer's own class; its options are attributes of the subclass."""

    _reduction: Reduction
    _scale_local: bool
    _factor: float  # of reduced gradients: a sum of several passes where Keras takes their mean
    _local_layers: tuple[Any, ...]
    _local_variables: tuple[Any, ...] = ()
    _applied_to: tuple[Any, ...] = ()

    @property
    def variables(self) -> list[Any]:
        """The optimizer's variables; ``optimizer.variables()`` is the same."""
        known: Any = super()
        return _Listed(known.variables)

    def register_local_var(self, var: Any) -> None:
        """Leave this variable's gradient on this rank; see ``scale_local_gradients``."""
        object.__setattr__(self, "_local_variables", (*self._local_variables, var))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Update the variables with gradients that are reduced over the ranks first."""
        gradients = list(grads)
        known: Any = self
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        variables = self._known_variables() if trainable_variables is None else trainable_variables
        # Otherwise there is a mistake, which Keras explains; or it is done after accumulation.
        if len(gradients) == len(variables) and not known.gradient_accumulation_steps:
            gradients = self._reduce(gradients, variables)
        return super().apply(gradients, trainable_variables)  # type: ignore[misc]

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
        if keras.backend.backend() == "torch":  # there Keras multiplies by zero, and an infinity would stay
            known = self
            for one in known._accumulated_gradients:
                if one is not None:
                    one.assign(keras.ops.zeros_like(one))

    def _reduce_accumulated(self, gradients: list[Any], steps: int) -> list[Any]:
        variables = self._applied_to
        if keras.backend.backend() != "jax":
            return self._reduce(gradients, variables)
        # JAX comes here in every step, and throws away what it computes in those that only accumulate.
        known: Any = self
        update = (known._iterations + 1) % steps == 0
        done: list[Any] = keras.ops.cond(
            update, lambda: self._reduce(gradients, variables), lambda: list(gradients)
        )
        return done

    def _reduce(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        local = self._local_places(variables)
        places = [place for place in range(len(gradients)) if place not in local]
        shared = self._reduction([gradients[one] for one in places], [variables[one] for one in places])
        results = list(gradients)
        for place, one in zip(places, shared, strict=True):
            results[place] = _times(one, self._factor)
        # An average over the ranks is n times smaller than the sum; so is what one rank gives alone.
        share = 1 / (self._reduction.process_set.size() or 1) if self._scale_local else 1.0
        for place in local:
            results[place] = _times(gradients[place], self._factor * share)
        return results

    def _known_variables(self) -> list[Any]:
        known: Any = self
        if not known._trainable_variables:  # older versions of Keras leave them to the one that is wrapped
            known = getattr(known, "inner_optimizer", known)
        return list(known._trainable_variables)

    def _local_places(self, variables: Sequence[Any]) -> set[int]:
        layers = [variable for layer in self._local_layers for variable in layer.trainable_variables]
        local = {id(same) for one in (*self._local_variables, *layers) for same in _forms(one)}
        if not local:
            return set()
        return {
            place for place, variable in enumerate(variables)
            if any(id(same) in local for same in _forms(variable))
        }


class _ScalesLoss(_Distributed):
    """For a LossScaleOptimizer, which on JAX does not go through ``apply``."""

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Return updated variables; gradients are reduced over the ranks first."""
        grads = self._reduce(list(grads), self._known_variables())
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]


def _forms(variable: Any) -> tuple[Any, ...]:
    """Return Keras's variable and, on TensorFlow, the tf.Variable in it: both are used in custom loops."""
    if keras.backend.backend() == "tensorflow" and isinstance(variable, keras.Variable):
        return variable, variable.value
    return (variable,)


def _times(gradient: Any, factor: float) -> Any:
    if gradient is None or factor == 1.0:
        return gradient
    if hasattr(gradient, "indices") and hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer is a DistributedOptimizer, or wraps one."""
    if isinstance(optimizer, _Distributed):
        return True
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner is not None and is_distributed(inner)


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: int = Average, backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False, num_groups: int = 0, groups: Any = None,
    process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce its gradients over the ranks, and return it.

    It stays the same object; its class becomes a subclass with the same name, which Keras saves and loads as
    the plain one. All ranks call this, and use several optimizers in the same order.

    Args:
        optimizer: any Keras optimizer, also a ``LossScaleOptimizer``.
        name: of the exchanges; the same on all ranks.
        device_dense: accepted; of effect on TensorFlow.
        device_sparse: accepted; of effect on TensorFlow.
        compression: ``Compression.fp16`` or ``.bf16`` halve the bytes of float32 gradients.
        sparse_as_dense: reduce ``tf.IndexedSlices`` as dense gradients.
        gradient_predivide_factor: with Average, divides before and multiplies after the sum.
        op: Average or Sum.
        backward_passes_per_step: gradients of so many steps are summed locally, and exchanged and applied
            in the last of them; sets ``gradient_accumulation_steps``, whose mean is made a sum.
        average_aggregated_gradients: leaves it the mean.
        num_groups: old form of ``groups``.
        groups: on TensorFlow, a number of groups or lists of variables that are exchanged together. Other
            backends exchange all gradients together, and the engine cuts them.
        process_set: the ranks that take part; on others the optimizer is local.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError: an argument is wrong.
    """
    operation = pick_operation(None, op)
    if operation not in (Operation.AVERAGE, Operation.SUM):
        raise ArgumentError(f"op must be Average or Sum, not {operation.name.title()}.")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        raise ArgumentError(
            f"Expected an optimizer of Keras 3, keras.optimizers.*, got {kind.__module__}.{kind.__name__}."
        )
    if is_distributed(optimizer):
        raise ArgumentError("This optimizer is a DistributedOptimizer already.")
    binding()  # says what to do if there is none for this backend
    session.engine()
    name = name or f"Distributed{type(optimizer).__name__}"
    options = {"device_dense": device_dense, "device_sparse": device_sparse, "groups": groups or num_groups}
    attributes = {
        "_reduction": Reduction(
            name, operation, gradient_predivide_factor, compression, sparse_as_dense, process_set, **options
        ),
        "_factor": _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients),
        "_scale_local": scale_local_gradients,
        "_local_layers": (),
    }
    _adapt_keras()
    object.__setattr__(optimizer, "__class__", _subclass(type(optimizer), attributes))
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: int = Average, backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False, groups: Any = None,
    process_set: ProcessSet = global_process_set, local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As DistributedOptimizer; gradients of ``local_layers`` (a layer, or several) stay on each rank."""
    if local_layers is None:
        local_layers = []
    layers = list(local_layers) if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    wrong = [type(one).__name__ for one in layers if not isinstance(one, keras.layers.Layer)]
    if wrong:
        raise ArgumentError(f"local_layers must be Keras layers, got {', '.join(wrong)}.")
    optimizer = DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients, 0, groups,
        process_set, scale_local_gradients,
    )
    type(optimizer)._local_layers = tuple(layers)
    return optimizer


def _accumulate(optimizer: Any, passes: int, average: bool) -> float:
    """Let Keras accumulate over so many passes; return what turns its mean into what is wanted."""
    if passes < 1:
        raise ArgumentError(f"backward_passes_per_step must be at least 1, got {passes}.")
    if passes == 1:
        return 1.0
    inner = getattr(optimizer, "inner_optimizer", optimizer)
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
    return 1.0 if average else float(passes)


def _subclass(base: type, attributes: dict[str, Any]) -> type:
    """Return a distributed subclass that Keras takes for ``base`` when it saves it."""
    front = _ScalesLoss if issubclass(base, keras.optimizers.LossScaleOptimizer) else _Distributed
    # On torch the instance's class is not the public one, but derived from it.
    public = [one for one in base.__mro__ if getattr(keras.optimizers, one.__name__, None) is one]
    module = "keras.optimizers" if public else base.__module__
    made = type(base.__name__, (front, base), {**attributes, "__module__": module})
    registered = keras.saving.get_registered_name(base)
    if not public and registered != base.__name__:
        names = sys.modules["keras.src.saving.object_registration"]
        names.GLOBAL_CUSTOM_NAMES[made] = registered
    return made


@functools.cache
def _adapt_keras() -> None:
    """Teach Keras two things about our optimizers; for all others it does what it did."""
    scaler = keras.optimizers.LossScaleOptimizer
    check_finite = scaler.check_finite

    @functools.wraps(check_finite)
    def check_on_all_ranks(self: Any, grads: Any) -> Any:
        finite = check_finite(self, grads)
        inner = self.inner_optimizer
        if isinstance(self, _Distributed) or not isinstance(inner, _Distributed):
            return finite
        return everywhere(finite, f"{inner._reduction.name}.finite", inner._reduction.process_set)

    scaler.check_finite = check_on_all_ranks
    trainer = sys.modules["keras.src.trainers.trainer"].Trainer
    resolve = trainer._resolve_auto_jit_compile

    @functools.wraps(resolve)
    def without_xla(self: Any) -> bool:
        # XLA cannot compile an exchange between ranks into a TensorFlow step; jit_compile="auto" is then no.
        if keras.backend.backend() == "tensorflow" and is_distributed(getattr(self, "optimizer", None)):
            return False
        return bool(resolve(self))

    trainer._resolve_auto_jit_compile = without_xla


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none, legacy_opts: bool = False,
) -> Any:
    """Load a model, with its optimizer as a DistributedOptimizer that goes on where it was saved.

    Args:
        filepath: what ``model.save()`` wrote, on whatever number of ranks, with or without Ringdance.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other classes and functions it does not know, by name.
        compression: as for DistributedOptimizer.
        legacy_opts: accepted, and of no effect: Keras 3 has no legacy optimizers.
    """
    objects = {one.__name__: one for one in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        DistributedOptimizer(optimizer, compression=compression)
    return model
