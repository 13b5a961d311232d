"""Image and table loaders that yield torch tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ringdance.data.loader import Batch
from ringdance.training.loaders.binding import Loaders


class _Loaders(Loaders):
    def tensor(self, array: Any, device: Any) -> torch.Tensor:
        held = array.base  # May be a pinned tensor, whose memory torch keeps until the copy is complete.
        tensor = held if isinstance(held, torch.Tensor) else torch.from_numpy(array)
        return tensor.to("cpu" if device is None else device, non_blocking=True)

    def images(self, batch: Batch, device: Any) -> Batch:
        converted = super().images(batch, device)
        return replace(converted, images=converted.images.permute(0, 3, 1, 2))

    def memory(self, shape: tuple[int, ...], device: Any) -> np.ndarray[Any, Any]:
        if torch.device("cpu" if device is None else device).type == "cuda":
            return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        return super().memory(shape, device)


_own = _Loaders()
image_loader, table_loader = _own.image_loader, _own.table_loader
