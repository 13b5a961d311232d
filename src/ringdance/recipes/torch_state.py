"""State of a PyTorch training as arrays of names, as checkpoints of the recipes have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def arrays_of(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None, **modules: torch.nn.Module
) -> dict[str, Array]:
    """Return copies of all that a checkpoint needs; modules under their names."""
    found: dict[str, Any] = {}
    for part, module in modules.items():
        found |= {f"{part}/{name}": one for name, one in module.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{number}/{name}": one for name, one in state.items() if one is not None}
    found |= {f"scaler/{name}": one for name, one in (scaler.state_dict() if scaler else {}).items()}
    return {name: torch.as_tensor(one).detach().cpu().clone().numpy() for name, one in found.items()}


def restore(
    state: dict[str, Array], optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None,
    **modules: torch.nn.Module,
) -> None:
    """Take such values."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in (*modules, "optimizer", "scaler")}
    for name, value in state.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = torch.from_numpy(np.asarray(value))
    for name, module in modules.items():
        module.load_state_dict(parts[name])
    inner = optimizer.state_dict()
    for name, value in parts["optimizer"].items():
        number, _, what = name.partition("/")
        inner["state"].setdefault(int(number), {})[what] = value
    optimizer.load_state_dict(inner)
    if scaler:
        scaler.load_state_dict({name: one.item() for name, one in parts["scaler"].items()})
