"""Loaders that yield JAX arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from ringdance.data.loader import Batch
from ringdance.training.loaders.binding import Loaders


class _Loaders(Loaders):
    def tensor(self, array: Any, device: Any) -> Any:
        return jax.device_put(array, device)

    def images(self, batch: Batch, device: Any) -> Batch:
        images, labels = jax.device_put((batch.images, batch.labels.astype("int32")), device)
        return replace(batch, images=images, labels=labels)  # The indices stay on the host.


_own = _Loaders()
image_loader, table_loader = _own.image_loader, _own.table_loader
