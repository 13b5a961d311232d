"""PyTorch code shared by the recipes: mixed precision, loading weights, and arrays for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return an autocast context for a device, which has no effect if the precision is "float32"."""
    dtype = torch.float16 if precision == "float16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "float32")


def load_weights(model: torch.nn.Module, file: str, is_head: Callable[[str], bool]) -> list[str]:
    """Load a state dict. If its head has a different shape, the model keeps its current head.

    Args:
        model: Model to load the state dict into.
        file: File written by torch.save(). It contains a state dict, or a dict with a state dict under
            "model" or "state_dict".
        is_head: Returns True if a parameter name belongs to the head.

    Returns:
        The names of the head's parameters that were not loaded.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file does not contain a state dict, or contains one of another model.
    """
    try:
        if Path(file).is_fifo():
            raise ValueError  # reading a FIFO could block forever
        saved, own = torch.load(file, map_location="cpu", weights_only=True), model.state_dict()
        saved = next((saved[name] for name in ("model", "state_dict") if name in saved), saved)
        fits = {name: one for name, one in saved.items() if name in own and one.shape == own[name].shape}
    except OSError:
        raise
    except Exception:  # torch.load raises many kinds of exceptions for other files
        raise ValueError("it is not a file from torch.save(model.state_dict(), ...)") from None
    fresh = [name for name in own if name not in fits]
    extra = {one for one in saved.keys() - own if not one.lower().startswith("aux")}  # skip auxiliary heads
    odd = {name for name in (*fresh, *extra) if not is_head(name)}
    if other := [name for name in odd if not name.endswith("num_batches_tracked")]:
        raise ValueError(f"{len(other)} entries belong to another model, such as {min(other)}")
    model.load_state_dict(fits, strict=False)
    return [name for name in fresh if is_head(name)]


def arrays_of(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None, **modules: torch.nn.Module
) -> dict[str, Array]:
    """Return copies of the arrays for a checkpoint, with keys such as "model/conv1.weight"."""
    values: dict[str, Any] = {}
    for part, module in modules.items():
        values |= {f"{part}/{name}": value for name, value in module.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        values |= {f"optimizer/{number}/{name}": value for name, value in state.items() if value is not None}
    values |= {f"scaler/{name}": value for name, value in (scaler.state_dict() if scaler else {}).items()}
    return {name: torch.as_tensor(value).detach().cpu().clone().numpy() for name, value in values.items()}


def restore(
    state: dict[str, Array], optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None,
    **modules: torch.nn.Module,
) -> None:
    """Restore a state returned by ``arrays_of``."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in (*modules, "optimizer", "scaler")}
    for name, value in state.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = torch.from_numpy(np.asarray(value))
    for name, module in modules.items():
        module.load_state_dict(parts[name])
    inner = optimizer.state_dict()
    for name, value in parts["optimizer"].items():
        number, _, field = name.partition("/")
        inner["state"].setdefault(int(number), {})[field] = value
    optimizer.load_state_dict(inner)
    if scaler:
        scaler.load_state_dict({name: value.item() for name, value in parts["scaler"].items()})
