"""The state of a training in PyTorch."""

from ringdance.torch.elastic import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)

__all__ = [
    "ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "StateHandler", "TorchState",
    "get_handler_registry", "set_handler_registry",
]
