"""Reduce the gradients of Keras 2 or Keras 3 optimizers through the binding for the Keras backend."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringdance.core.request import ReduceOp
from ringdance.errors import ArgumentError
from ringdance.keras.library import Compression, forms, keras, ops, variables_of
from ringdance.training import session
from ringdance.training.gradients.lists import UseOrder, pattern_of, reduce_shared
from ringdance.training.gradients.options import scales_of
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id, takes_part

OPTIONS_FILE = "ringdance.json"  # Name of our asset in a .keras file.
ADVICE = (
    "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)] in fit(), or "
    "hvd.broadcast_variables([*model.variables, *model.optimizer.variables], root_rank=0)"
)
BACKENDS = ("tensorflow", "torch", "jax")


def binding() -> Any:
    """Return Ringdance's binding for the Keras backend, such as the module ``ringdance.torch``.

    Raises:
        ArgumentError: Ringdance has no binding for this backend.
    """
    name = keras.backend.backend()
    if name not in BACKENDS:
        raise ArgumentError(
            f"Keras uses the backend {name!r}, which Ringdance does not support. Set KERAS_BACKEND to one of "
            f"{', '.join(BACKENDS)}."
        )
    return importlib.import_module(f"ringdance.{name}")


if keras.backend.backend() in BACKENDS:
    binding()  # Import it before ``init()``, which then limits the backend to this rank's share of the cores.


def true_on_all(condition: Any, name: str, process_set: ProcessSet = global_process_set) -> Any:
    """Return a boolean scalar that is True if ``condition`` is True on all ranks. Works in compiled code."""
    if not takes_part(process_set):
        return condition
    value = ops.cast(condition, "float32")
    least = binding().allreduce(value, name=name, op=int(ReduceOp.MIN), process_set=process_set)
    return ops.cast(least, "bool")


_order = UseOrder()


class GradientReduction:
    """Reduces the gradients of an optimizer, in one exchange per step.

    Args:
        name: Prefix of the exchange names, the same on all ranks. Optimizers with the same prefix are
            numbered in the order of their first use. An optimizer that only some ranks create, for example
            by loading a saved model, has no number until it is used.
        operation: Average or Sum.
        predivide: Gradients are divided by this factor before the sum, and the sum is multiplied by it
            (Average only).
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, or an object with the methods
            ``compress`` and ``decompress``.
        sparse_as_dense: If True, reduce sparse gradients (``tf.IndexedSlices``) as dense gradients.
        process_set: The participating ranks. On other ranks, gradients stay local.
        options: Additional options for ``ringdance.tensorflow.gradients.GradientReducer``.
    """

    def __init__(
        self, name: str, operation: ReduceOp = ReduceOp.AVERAGE, predivide: float = 1.0,
        compression: Any = Compression.none, sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set, **options: Any,
    ) -> None:
        self._base_name = name
        self.operation = operation
        self.prescale, self.postscale = scales_of(operation, predivide)
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._in_tensorflow: Any = None
        if keras.backend.backend() == "tensorflow":
            from ringdance.tensorflow.gradients import GradientReducer

            self._in_tensorflow = GradientReducer(
                name, compression=compression, sparse_as_dense=sparse_as_dense, op=operation,
                predivide=predivide, process_set=process_set, **options,
            )

    @property
    def name(self) -> str:
        """The prefix of the exchange names, including the optimizer's number."""
        key = self._base_name, set_id(self.process_set)
        return f"{self._base_name}.{_order.number(key, self)}"

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients. ``None`` stays ``None``. Results may reuse the inputs' memory."""
        if self._in_tensorflow is not None:
            self._in_tensorflow.name, self._in_tensorflow.advice = self.name, ADVICE
            return self._in_tensorflow.reduce(gradients, variables)
        if not takes_part(self.process_set):
            if keras.backend.backend() == "torch":
                session.mark_step()
            return list(gradients)
        pattern = pattern_of(["none" if gradient is None else "dense" for gradient in gradients])
        pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
        names = [str(variable.path) for _, variable in pairs]
        present = [(gradient, name) for (gradient, _), name in zip(pairs, names, strict=True)]
        reduced = iter(self._reduced(present, pattern) if present else ())
        if values := [variable.value for _, variable in pairs]:
            binding().operations.compare_weights(values, names, self.name, ADVICE, self.process_set)
        return [None if gradient is None else next(reduced) for gradient in gradients]

    def _reduced(self, named: Sequence[tuple[Any, str]], pattern: str) -> list[Any]:
        reduce = binding().operations.reduce_gradients
        packed = [self.compression.compress(gradient) for gradient, _ in named]
        small = [tensor for tensor, _ in packed]
        scales = self.prescale, self.postscale
        args = (small, self.name, int(self.operation), *scales, self.process_set, pattern)
        small = reduce(*args, parameters=[name for _, name in named])
        return [self.compression.decompress(part, pair[1]) for part, pair in zip(small, packed, strict=True)]


class _Listed(list[Any]):
    """A list that can also be called, like ``optimizer.variables`` in Keras 2."""

    def __call__(self) -> list[Any]:
        return self


class Distributed:
    """Mixin that precedes the optimizer's own class in the bases of a subclass. Options are class attributes.

    Derived classes call ``_reduce`` at the point where their version of Keras processes a step's gradients.
    """

    _reduction: GradientReduction
    # Factor for reduced gradients, which converts Keras's mean over several passes to a sum.
    _factor: float = 1.0
    _options: dict[str, Any]  # Arguments of DistributedOptimizer.
    _local_layers: frozenset[Any] = frozenset()  # Not a list, because Keras would save it.
    _local_variables: tuple[Any, ...] = ()
    # The step's variables, including those without a gradient, which Keras drops.
    _given: tuple[Any, ...] = ()

    @property
    def variables(self) -> list[Any]:
        """The optimizer's variables. ``optimizer.variables()`` also returns them."""
        return _Listed(variables_of(super()))

    def register_local_var(self, var: Any) -> None:
        """Exclude this variable's gradient from the reduction. See ``scale_local_gradients``."""
        object.__setattr__(self, "_local_variables", (*self._local_variables, var))

    def save_assets(self, directory: str) -> None:
        """Add the options to the ``.keras`` file, which can still be loaded without Ringdance."""
        base: Any = super()
        if hasattr(base, "save_assets"):  # A user-defined optimizer may have this method.
            base.save_assets(directory)
        options = dict(self._options)
        if self._reduction.process_set is not global_process_set or self._local_ids():
            options["partial"] = True  # Tells load_model() to raise an error.
        text = json.dumps(options, default=lambda number: number.item())  # Converts NumPy scalars.
        Path(directory, OPTIONS_FILE).write_text(text)

    def _local_ids(self) -> set[int]:
        layers = [variable for layer in self._local_layers for variable in layer.trainable_variables]
        return set().union(*map(forms, [*self._local_variables, *layers]))

    def _remember(self, variables: Sequence[Any]) -> None:
        object.__setattr__(self, "_given", tuple(variables))

    def _reduce(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients for all or some of the step's variables."""
        place = {id(variable): index for index, variable in enumerate(self._given)}
        if len(variables) == len(place) or any(id(variable) not in place for variable in variables):
            return self._reduce_all(gradients, variables)
        places = [place[id(variable)] for variable in variables]
        all_gradients: list[Any] = [None] * len(place)
        for index, gradient in zip(places, gradients, strict=True):
            all_gradients[index] = gradient
        reduced = self._reduce_all(all_gradients, self._given)
        return [reduced[index] for index in places]

    def _reduce_all(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        ids = self._local_ids()
        # An average over n ranks is the sum divided by n, so divide local gradients by n, too.
        scales = self._options["scale_local_gradients"]
        share = 1 / (self._reduction.process_set.size() or 1) if scales else 1.0
        return reduce_shared(
            self._reduction, gradients, variables, lambda variable: not ids.isdisjoint(forms(variable)),
            self._factor * share, self._factor,
        )


def is_distributed(optimizer: Any) -> bool:
    """Return True if an optimizer is distributed or wraps a distributed optimizer."""
    if isinstance(optimizer, Distributed):
        return True
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner is not None and is_distributed(inner)
