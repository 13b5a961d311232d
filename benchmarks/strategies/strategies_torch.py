"""DeepFM in PyTorch: one process, DistributedDataParallel on gloo, and Ringdance.

All use the model of train_torch.py with PyTorch optimizers: Adagrad for the table rows in a batch, Adam for
the rest. A batch's ids are first made unique, so that each row is looked up, and its gradients summed, once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import train_torch  # the recipe's module
from strategies import (
    Array,
    Place,
    RecipeSteps,
    Sizes,
    Strategy,
    tell,
    train,
)
from torch import Tensor, nn
from torch.nn import functional

from ringdance.recipes.deepfm import rates


class RowAdagrad(torch.optim.Optimizer):
    """Adagrad that reads and writes rows. torch.optim.Adagrad adds sparse tensors, which takes longer."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, accumulator: float) -> None:
        super().__init__(parameters, {"lr": lr, "accumulator": accumulator})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the rows that have gradients."""
        for group in self.param_groups:
            for table in group["params"]:
                if "sum" not in self.state[table]:
                    self.state[table]["sum"] = torch.full_like(table, group["accumulator"])
                sums, gradient = self.state[table]["sum"], table.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                new = sums.index_select(0, rows).addcmul_(values, values)
                sums.index_copy_(0, rows, new)
                update = values / new.sqrt_()
                table.index_copy_(0, rows, table.index_select(0, rows).sub_(update, alpha=group["lr"]))


class Model(nn.Module):
    """The recipe's layers with a PyTorch table and the strategies' initial values. Returns logits, (n,)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        first = sizes.first_values()
        table = torch.from_numpy(first["table"])
        self.table = nn.Embedding(sizes.table_size, sizes.dim + 1, _weight=table, sparse=True)
        self.layers = train_torch.Layers(sizes.fields, sizes.dim, list(sizes.hidden))
        fill(self.layers, first)

    def forward(self, ids: Tensor, values: Tensor) -> Tensor:
        """Return logits for ids and factors, both (n, fields)."""
        unique, where = torch.unique(ids, return_inverse=True)
        return self.layers(self.table(unique), where, values)

    def optimizers(self, sizes: Sizes) -> list[torch.optim.Optimizer]:
        """Return Adam for the layers, whose gradients come first, and Adagrad for the table's rows."""
        return [
            torch.optim.Adam(self.layers.parameters(), sizes.rate, fused=True),
            RowAdagrad(self.table.parameters(), sizes.table_rate, sizes.accumulator),
        ]


def fill(layers: Any, first: dict[str, Array]) -> None:
    """Set the recipe's layers to their initial values."""
    linear = [part for part in layers.deep if isinstance(part, nn.Linear)]
    for number, layer in enumerate(linear):
        layer.weight.data.copy_(torch.from_numpy(first[f"w{number}"].T))
        layer.bias.data.copy_(torch.from_numpy(first[f"b{number}"]))


class Steps(Strategy):
    """The steps of one process. ``module`` is the model, or a wrapper that exchanges its gradients."""

    def __init__(
        self, place: Place, model: Model, module: Callable[..., Tensor], readers: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__(place, readers)
        self.model, self.module, self.optimizers = model, module, model.optimizers(place.given.sizes)
        warm = torch.optim.lr_scheduler.LambdaLR
        self.rates = [warm(each, lambda step: rates.warm(step + 1)) for each in self.optimizers]

    def train(self, batch: Any) -> None:
        """Update the model with this rank's part of a batch."""
        labels, ids, values = (torch.as_tensor(array) for array in (batch.labels, batch.ids, batch.values))
        loss = functional.binary_cross_entropy_with_logits(self.module(ids, values), labels) * batch.weight
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for rate in self.rates:
            rate.step()

    def predict(self, ids: Array, values: Array) -> Array:
        """Return probabilities, (n,)."""
        with torch.inference_mode():
            scores: Array = self.model(torch.as_tensor(ids), torch.as_tensor(values)).sigmoid().numpy()
        return scores


def single(place: Place) -> None:
    """Train in a single process, with the number of threads that was fastest in a few steps."""
    def fresh() -> Steps:
        model = Model(place.given.sizes)
        return Steps(place, model, model)

    speeds = {}
    for threads in sorted({place.cores, max(1, place.cores // 2)}):
        torch.set_num_threads(threads)
        trial = fresh()
        trial.step()
        began = time.perf_counter()
        for _ in range(5):
            trial.step()
        speeds[threads] = time.perf_counter() - began
    best = min(speeds, key=speeds.__getitem__)
    torch.set_num_threads(best)
    tell(threads=str(best))
    train(fresh(), place)


def ddp(place: Place) -> None:
    """Train with DistributedDataParallel on gloo. The table's gradient stays sparse."""
    from torch import distributed

    os.environ.update(MASTER_ADDR=place.hosts[0], MASTER_PORT=str(place.ports[0]))
    torch.set_num_threads(place.cores)
    distributed.init_process_group("gloo", rank=place.rank, world_size=place.size)
    model = Model(place.given.sizes)
    module = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    class Rank(Steps):
        def agree(self, number: int) -> int:
            message = torch.tensor([number])
            distributed.broadcast(message, 0)
            return int(message.item())

        def close(self) -> None:
            distributed.barrier()
            distributed.destroy_process_group()

    train(Rank(place, model, module, (place.rank, place.size)), place)


def ringdance(place: Place) -> None:
    """Train with the step of train_torch.py: ranks average gradients by all-reduce, the table's as rows."""
    torch.set_num_threads(place.cores)
    steps = RecipeSteps(place, train_torch.TorchTableModel)
    fill(steps.model.layers, steps.first)
    train(steps, place)


torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns if neither choice is explicit
STRATEGIES = {"single": single, "ddp": ddp, "ringdance": ringdance}
