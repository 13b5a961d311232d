"""State of a PyTorch training as arrays of names, as checkpoints of the recipes have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ringdance.host.files import check_regular

Array = np.ndarray[Any, Any]


def load_weights(model: torch.nn.Module, file: str, is_head: Callable[[str], bool]) -> list[str]:
    """Load a state dict; return the names of a head's parameters that are of other classes, left as they are.

    Args:
        model: to load it into.
        file: of torch.save(), with the state dict itself or as "model" or "state_dict".
        is_head: whether a name is of a head.

    Raises:
        OSError: it cannot be read.
        ValueError: it is another model's, or of something else.
    """
    try:
        check_regular(file)
        saved, own = torch.load(file, map_location="cpu", weights_only=True), model.state_dict()
        saved = next((saved[name] for name in ("model", "state_dict") if name in saved), saved)
        fits = {name: one for name, one in saved.items() if name in own and one.shape == own[name].shape}
    except OSError:
        raise
    except Exception:  # of other files torch raises many
        raise ValueError("it is no file of torch.save(model.state_dict())") from None
    fresh = [name for name in own if name not in fits]
    extra = {one for one in saved.keys() - own if not one.lower().startswith("aux")}  # heads without training
    odd = {one for one in (*fresh, *extra) if not is_head(one)}
    if other := [one for one in odd if not one.endswith("num_batches_tracked")]:
        raise ValueError(f"{len(other)} of its entries are another model's, such as {min(other)}")
    model.load_state_dict(fits, strict=False)
    return [one for one in fresh if is_head(one)]


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
