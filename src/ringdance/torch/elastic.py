"""Elastic training, which continues after errors: ``hvd.elastic.run``, ``TorchState``, ``ElasticSampler``.

See ``ringdance.training.elastic``.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.utils.data

from ringdance.torch import _private
from ringdance.torch.state import broadcast_optimizer_state, broadcast_parameters
from ringdance.training.elastic import ElasticIndices, ObjectState, State, run
from ringdance.training.gradients.exchange import forget_all
from ringdance.training.objects import broadcast_object

__all__ = [
    "ElasticSampler", "ModelStateHandler", "ObjectState", "OptimizerStateHandler", "SamplerStateHandler",
    "State", "StateHandler", "TorchState", "get_handler_registry", "run", "set_handler_registry",
]


class ElasticSampler(ElasticIndices, torch.utils.data.Sampler[int]):
    """Gives each rank its share of a dataset or, after a restart, of the epoch's remaining samples.

    Add it to the state, so that it is committed together with the weights::

        sampler = hvd.elastic.ElasticSampler(data)
        loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(net, optimizer, sampler=sampler, epoch=0)
        ...
        for number, batch in enumerate(loader):
            ...
            state.sampler.record_batch(number, 32)
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)   # at the end of the epoch

    See ``ringdance.training.elastic.ElasticIndices`` for the attributes and for how samples are distributed.

    Args:
        dataset: Data set that supports ``len()``.
        shuffle: If True, each epoch has a different order.
        seed: Seed for shuffling, the same on all ranks.

    Raises:
        NotInitializedError: ``init()`` has not been called.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        super().__init__(len(dataset), shuffle, seed)


class StateHandler:
    """Saves, restores and synchronizes an object that has ``state_dict`` and ``load_state_dict``.

    ``sync`` sends rank 0's state as one object, so use this class for objects with a small state, such as
    learning rate schedulers.

    Attributes:
        value: The object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """Keep a copy of the object's state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the last saved state."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load rank 0's state on all ranks. The saved state does not change."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.object"))

    def set_value(self, value: Any) -> None:
        """Replace the object, and save the state of the new object."""
        self.value = value
        self.save()

    def reset(self) -> None:
        """Adapt to the restarted job, in which the ranks may have changed."""


class ModelStateHandler(StateHandler):
    """Handler for modules."""

    def sync(self) -> None:
        """Broadcast parameters and buffers, in place."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Handler for optimizers, distributed or not."""

    def sync(self) -> None:
        """Broadcast the optimizer's state and options."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Handler for ``ElasticSampler``."""

    def reset(self) -> None:
        """Distribute the remaining samples among the current ranks, even without a ``sync``."""
        self.value.reset()


# Before version 2.3, PyTorch has only torch.cuda.amp.GradScaler.
_GradScaler: type = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)

# The first matching entry is used. Schedulers and scalers are tied to this rank's optimizer, so rank 0's
# object must not replace them on other ranks, as it would if they were plain attributes.
_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateHandler),
    (_GradScaler, StateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the list of (type, handler class) pairs. For each object, TorchState uses the first match."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the registry. Applies to states that are created after this call."""
    global _registry
    _registry = registry


def _handler_for(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """Model, optimizer, samplers and plain attributes, committed and restored together.

    Modules, optimizers, ``ElasticSampler``, learning rate schedulers and GradScalers are saved through their
    ``state_dict`` and restored in place. Other attributes are handled as in ``ObjectState``. If you assign
    another object to such an attribute (``state.model = other``), that object is tracked and saved from
    then on.

    ``sync`` copies rank 0's current weights and attributes to all ranks. The saved state remains the last
    commit, which on each rank contains the rank's own weights. Therefore, ``restore`` must be followed by
    ``sync``, as in ``run``.

    Args:
        model: Module, or None.
        optimizer: Optimizer, or None.
        kwargs: Further attributes.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        attributes = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: _handler_for(value) for name, value in attributes.items()}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        for name in self._handlers:
            object.__setattr__(self, name, attributes.pop(name))
        super().__init__(**attributes)

    def save(self) -> None:
        """Save a copy of all objects and attributes."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore the last saved state. Modules, optimizers and samplers stay the same objects.

        Gradients are discarded, including gradients accumulated over several backward passes. Commit after
        ``optimizer.step()``, because a commit between the backward passes of a step does not save gradients.
        """
        forget_all()
        for handler in self._handlers.values():
            handler.restore()
            if hasattr(handler.value, "zero_grad"):
                handler.value.zero_grad()
            _private.forget_unscaled(handler.value)
        super().restore()

    def sync(self) -> None:
        """Copy rank 0's state to all ranks. All ranks must call this."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Make samplers distribute the remaining samples among the current ranks."""
        for handler in self._handlers.values():
            handler.reset()

    def _copied(self, value: Any) -> Any:
        # Copy plain tensors, which hold data. A tensor that requires a gradient belongs to another object.
        if type(value) is torch.Tensor and not value.requires_grad:
            return value.clone()
        return super()._copied(value)

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        elif name in self.__dict__.get("_saved_state", ()):
            handler = _handler_for(value)
            if handler is not None:  # For example, the attribute was None and is now a model.
                handlers[name] = handler
                del self._saved_state[name]
        super().__setattr__(name, value)
