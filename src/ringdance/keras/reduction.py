"""Reduce gradients by the binding of Keras's backend, in optimizers of Keras 2 or 3."""

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
from ringdance.training.gradients.options import UseOrder, pattern_of, reduce_shared, scales_of
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id, takes_part

OPTIONS_FILE = "ringdance.json"  # among the assets in a .keras file
ADVICE = (
    "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)] in fit(), or "
    "hvd.broadcast_variables([*model.variables, *model.optimizer.variables], root_rank=0)"
)
BACKENDS = ("tensorflow", "torch", "jax")


def binding() -> Any:
    """Return the binding of Keras's backend: the module with its collectives.

    Raises:
        ArgumentError: there is none for this backend.
    """
    name = keras.backend.backend()
    if name not in BACKENDS:
        raise ArgumentError(f"Keras runs on {name!r}; Ringdance has bindings for {', '.join(BACKENDS)}.")
    return importlib.import_module(f"ringdance.{name}")


if keras.backend.backend() in BACKENDS:
    binding()  # whose ``init()`` limits a rank to its share of the cores: it has to be imported before


def true_on_all(condition: Any, name: str, process_set: ProcessSet = global_process_set) -> Any:
    """Return a boolean scalar: whether ``condition`` is true on all ranks; eagerly or in a program."""
    if not takes_part(process_set):
        return condition
    value = ops.cast(condition, "float32")
    least = binding().allreduce(value, name=name, op=int(ReduceOp.MIN), process_set=process_set)
    return ops.cast(least, "bool")


_order = UseOrder()


class GradientReduction:
    """Reduces the gradients of an optimizer, in one exchange for each step.

    Args:
        name: the same on all ranks. Optimizers of one name are numbered in the order of their first use:
            one that only some ranks have, for example to read a file, does not count.
        operation: Average or Sum.
        predivide: with Average, divides before and multiplies after the sum.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, or an object with compress and decompress.
        sparse_as_dense: reduce sparse gradients (``tf.IndexedSlices``) as dense ones.
        process_set: the ranks that take part; on others gradients stay local.
        options: more for ``ringdance.tensorflow.gradients.GradientReducer``.
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
        """The name of the exchanges."""
        key = self._base_name, set_id(self.process_set)
        return f"{self._base_name}.{_order.number(key, self)}"

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients; ``None`` stays. Results may use the memory of the inputs."""
        if self._in_tensorflow is not None:
            self._in_tensorflow.name, self._in_tensorflow.advice = self.name, ADVICE
            return self._in_tensorflow.reduce(gradients, variables)
        if not takes_part(self.process_set):
            if keras.backend.backend() == "torch":
                session.mark_step()
            return list(gradients)
        pattern = pattern_of(["none" if one is None else "dense" for one in gradients])
        pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
        names = [str(one.path) for _, one in pairs]
        present = [(gradient, name) for (gradient, _), name in zip(pairs, names, strict=True)]
        reduced = iter(self._reduced(present, pattern) if present else ())
        if values := [one.value for _, one in pairs]:
            binding().operations.compare_weights(values, names, self.name, ADVICE, self.process_set)
        return [None if one is None else next(reduced) for one in gradients]

    def _reduced(self, named: Sequence[tuple[Any, str]], pattern: str) -> list[Any]:
        reduce = binding().operations.reduce_gradients
        packed = [self.compression.compress(one) for one, _ in named]
        small = [one for one, _ in packed]
        scales = self.prescale, self.postscale
        given = (small, self.name, int(self.operation), *scales, self.process_set, pattern)
        small = reduce(*given, parameters=[name for _, name in named])
        return [self.compression.decompress(one, pair[1]) for one, pair in zip(small, packed, strict=True)]


class _Listed(list[Any]):
    """A list that can be called as well, as ``optimizer.variables`` could in TensorFlow 2's Keras."""

    def __call__(self) -> list[Any]:
        return self


class Distributed:
    """The base that comes before the optimizer's own class; options are attributes of the subclass.

    Derived classes call ``_reduce`` where their Keras processes the gradients of a step.
    """

    _reduction: GradientReduction
    _scale_local: bool
    _factor: float = 1.0  # of reduced gradients: a sum of several passes where Keras takes their mean
    _options: dict[str, Any]  # as DistributedOptimizer was given them
    _local_layers: frozenset[Any] = frozenset()  # Keras would save a list of layers with the optimizer
    _local_variables: tuple[Any, ...] = ()
    _given: tuple[Any, ...] = ()  # variables of the step, also those without a gradient, which Keras drops

    @property
    def variables(self) -> list[Any]:
        """The optimizer's variables; ``optimizer.variables()`` is the same."""
        return _Listed(variables_of(super()))

    def register_local_var(self, var: Any) -> None:
        """Leave this variable's gradient on this rank; see ``scale_local_gradients``."""
        object.__setattr__(self, "_local_variables", (*self._local_variables, var))

    def save_assets(self, directory: str) -> None:
        """Write to a ``.keras`` file what Keras does not save; it can be loaded without, as a plain one."""
        known: Any = super()
        if hasattr(known, "save_assets"):  # of an optimizer of the user's
            known.save_assets(directory)
        options = dict(self._options)
        if self._reduction.process_set is not global_process_set or self._local_ids():
            options["partial"] = True  # it takes objects of the script to make it again
        text = json.dumps(options, default=lambda number: number.item())  # NumPy's
        Path(directory, OPTIONS_FILE).write_text(text)

    def _local_ids(self) -> set[int]:
        layers = [variable for layer in self._local_layers for variable in layer.trainable_variables]
        return set().union(*map(forms, [*self._local_variables, *layers]))

    def _remember(self, variables: Sequence[Any]) -> None:
        object.__setattr__(self, "_given", tuple(variables))

    def _reduce(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Return reduced gradients of some of the variables of the step."""
        place = {id(one): index for index, one in enumerate(self._given)}
        if len(variables) == len(place) or any(id(one) not in place for one in variables):
            return self._reduce_all(gradients, variables)
        places = [place[id(one)] for one in variables]
        every: list[Any] = [None] * len(place)
        for index, one in zip(places, gradients, strict=True):
            every[index] = one
        reduced = self._reduce_all(every, self._given)
        return [reduced[index] for index in places]

    def _reduce_all(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        ids = self._local_ids()
        # An average over the ranks is n times smaller than the sum; so is the gradient of one rank alone.
        share = 1 / (self._reduction.process_set.size() or 1) if self._scale_local else 1.0
        return reduce_shared(
            self._reduction, gradients, variables, lambda one: not ids.isdisjoint(forms(one)),
            self._factor * share, self._factor,
        )


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer is a DistributedOptimizer, or wraps one."""
    if isinstance(optimizer, Distributed):
        return True
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner is not None and is_distributed(inner)
