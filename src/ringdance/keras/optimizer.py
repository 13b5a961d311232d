"""DistributedOptimizer: a Keras optimizer whose gradients are reduced over the ranks.

One implementation covers Keras 3 on the TensorFlow, torch and JAX backends, and Keras 2. The optimizer stays
the same object, with its variables and settings. Its class is replaced by a subclass that reduces gradients
before any other processing: see ``keras3`` and ``keras2``. Clipping, weight decay, EMA and loss scaling then
use the same gradients as in a single process that trains on the combined batch.
"""

from __future__ import annotations

import importlib
import json
import warnings
import zipfile
from typing import Any

from ringdance.core.request import ReduceOp
from ringdance.errors import ArgumentError
from ringdance.keras import _private
from ringdance.keras.library import KERAS2, Compression, keras, optimizer_types
from ringdance.keras.reduction import OPTIONS_FILE, GradientReduction, binding, is_distributed
from ringdance.settings import level_of_caller
from ringdance.training import session
from ringdance.training.checks import pick_operation
from ringdance.training.exports import Average
from ringdance.training.gradients.options import check_passes, listed_layers
from ringdance.training.process_sets import ProcessSet, global_process_set

hooks: Any = importlib.import_module(f"ringdance.keras.keras{2 if KERAS2 else 3}")


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: int = Average, backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False, num_groups: int = 0, groups: Any = None,
    process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce its gradients over the ranks, and return it.

    The optimizer stays the same object. Its class becomes a subclass with the same name, which Keras saves
    and loads like the plain class. All ranks must call this function. Ranks with several optimizers must
    use them in the same order.

    Args:
        optimizer: Any optimizer of the Keras version in use, including a ``LossScaleOptimizer`` and the
            legacy optimizers of Keras 2.
        name: Prefix of the exchange names, the same on all ranks.
        device_dense: Device on which dense gradients enter the exchange (TensorFlow only).
        device_sparse: Device on which sparse gradients enter the exchange (TensorFlow only).
        compression: ``Compression.fp16`` or ``.bf16`` halves the amount of data sent for float32 gradients.
        sparse_as_dense: If True, reduce ``tf.IndexedSlices`` as dense gradients.
        gradient_predivide_factor: Gradients are divided by this factor before the sum, and the sum is
            multiplied by it (Average only).
        op: Average or Sum.
        backward_passes_per_step: Number of passes whose gradients are summed locally, then exchanged and
            applied. In Keras 3, this sets ``gradient_accumulation_steps`` and converts its mean to a sum.
        average_aggregated_gradients: If True, gradients are averaged over the passes instead of summed.
        num_groups: Deprecated. Use ``groups``.
        groups: Number of groups, or lists of variables whose gradients are exchanged together (TensorFlow
            only). On other backends, all gradients are passed to the engine together.
        process_set: The participating ranks. On other ranks, gradients stay local.
        scale_local_gradients: If True, gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError: An argument is invalid.
    """
    operation = _checked_operation(optimizer, op, backward_passes_per_step)
    name = name or f"Distributed{type(hooks.unwrapped(optimizer)).__name__}"
    attributes = {
        "_reduction": GradientReduction(
            name, operation, gradient_predivide_factor, compression, sparse_as_dense, process_set,
            device_dense=device_dense, device_sparse=device_sparse, groups=groups or num_groups,
        ),
        "_options": {
            "name": name, "op": int(operation), "gradient_predivide_factor": gradient_predivide_factor,
            "sparse_as_dense": sparse_as_dense, "scale_local_gradients": scale_local_gradients,
            "backward_passes_per_step": backward_passes_per_step,
            "average_aggregated_gradients": average_aggregated_gradients,
        },
        **hooks.pass_options(optimizer, backward_passes_per_step, average_aggregated_gradients),
    }
    return _distributed(optimizer, attributes)


def _checked_operation(optimizer: Any, op: int, passes: int) -> ReduceOp:
    """Return ``op`` as a ReduceOp. Raises ArgumentError if an argument or the backend is not supported."""
    check_passes(passes)
    binding()
    session.engine()
    operation = pick_operation(None, op)
    if operation not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ArgumentError(f"op must be Average or Sum, not {operation.name.title()}.")
    if not isinstance(optimizer, optimizer_types):
        raise ArgumentError(_wrong_optimizer(type(optimizer)))
    if is_distributed(optimizer):
        raise ArgumentError("This optimizer is already a DistributedOptimizer. Wrap an optimizer only once.")
    return operation


def _wrong_optimizer(kind: type) -> str:
    """Return the error message for an object that is not an optimizer of the Keras version in use."""
    wanted = f"Keras {2 if KERAS2 else 3}, {keras.__name__}.optimizers.*"
    text = f"Expected an optimizer of {wanted}, but got {kind.__module__}.{kind.__name__}."
    if kind.__module__.partition(".")[0] == ("keras" if KERAS2 else "tf_keras"):
        text += (
            " Unset TF_USE_LEGACY_KERAS to train with Keras 3." if KERAS2
            else " Set TF_USE_LEGACY_KERAS=1 for the job to train with Keras 2."
        )
    return text


def PartialDistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: int = Average, backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False, groups: Any = None,
    process_set: ProcessSet = global_process_set, local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a DistributedOptimizer that keeps the gradients of ``local_layers`` (one or a list) local."""
    layers = listed_layers(local_layers, keras.layers.Layer)
    optimizer = DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients, 0, groups,
        process_set, scale_local_gradients,
    )
    type(hooks.unwrapped(optimizer))._local_layers = frozenset(layers)
    return optimizer


def _distributed(optimizer: Any, attributes: dict[str, Any]) -> Any:
    """Replace an optimizer's class with a distributed subclass, and return the optimizer.

    Keras saves the subclass as if it were the original class.
    """
    hooks.adapt()
    reducing = hooks.unwrapped(optimizer)
    base = type(reducing)
    subclass = type(base.__name__, (hooks.front(base), base), {**attributes, **hooks.class_options(base)})
    registered = keras.saving.get_registered_name(base)
    if subclass.__module__ != "keras.optimizers" and registered != base.__name__:
        _private.register_as(subclass, registered)
    object.__setattr__(reducing, "__class__", subclass)
    if reducing is not optimizer:
        object.__setattr__(optimizer, "register_local_var", reducing.register_local_var)
    return optimizer


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none, legacy_opts: bool = False,
) -> Any:
    """Load a model. Its optimizer becomes a DistributedOptimizer with the saved state.

    A ``.keras`` file contains the optimizer's options, except ``compression``, ``groups`` and devices. For
    other formats, the default options are used, with a warning.

    Args:
        filepath: Path of a model written by ``model.save()`` on any number of ranks, with or without
            Ringdance.
        custom_optimizers: Optimizer classes that are not part of Keras.
        custom_objects: Other custom classes and functions, by name.
        compression: Compression, as in DistributedOptimizer.
        legacy_opts: Accepted but has no effect, because Keras 2 itself saves the class of legacy optimizers.

    Raises:
        ArgumentError: The optimizer had local variables or a process set.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or is_distributed(optimizer):
        return model
    options = _saved_options(filepath)
    if options.pop("partial", False):
        raise ArgumentError(
            f"{filepath} was saved with a DistributedOptimizer that had local variables or a process set. "
            "hvd.load_model() cannot restore them. Load the model with keras.models.load_model(), then wrap "
            "model.optimizer again with the same arguments."
        )
    DistributedOptimizer(optimizer, compression=compression, **options)
    return model


def _saved_options(filepath: Any) -> dict[str, Any]:
    """Return the options of a saved model's DistributedOptimizer, or {} if the file has none."""
    if not zipfile.is_zipfile(filepath):
        if session.engine().rank == 0:
            warnings.warn(
                f"{filepath} does not contain options for DistributedOptimizer, because only .keras files "
                "do. The default options are used (op=Average, all ranks, no local layers).",
                stacklevel=level_of_caller(),
            )
        return {}
    with zipfile.ZipFile(filepath) as archive:
        optimizer = "assets/optimizer/"  # Excludes optimizers in the model's attributes.
        files = [n for n in archive.namelist() if n.startswith(optimizer) and n.endswith(f"/{OPTIONS_FILE}")]
        options: dict[str, Any] = json.loads(archive.read(files[0])) if files else {}
    return options
