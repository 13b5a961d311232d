"""Train DeepFM on click logs with PyTorch, on the CPUs of any number of hosts.

The input has Criteo's columns: a label, 13 numbers and 26 categories. Try generated rows first, then real
data:

    ringdance data generate criteo clicks --rows 2000000 --validation 0.05
    ringdance run -np 2 python train_torch.py clicks --export model
    python score.py model clicks --split validation --output scores.tsv

    ringdance data prepare criteo /data/criteo /data/clicks --table-size 10000000 --shards 64
    ringdance run -H node1:16,node2:16 python train_torch.py /data/clicks --checkpoints run1 --patience 3

Start one rank per core. `ringdance run` gives each rank its own core. To compare this setup with others on
your hosts, run benchmarks/strategies in a clone of the repository.

The model is DeepFM (Guo et al., IJCAI 2017). Each field in a row is an id, which selects a row of the
embedding table, and a value, which scales it. The table's first column is the linear part. The other columns
are used for the pairwise products and as the input of the layers. A step reads and updates only the table
rows that occur in its batch.

With --checkpoints, the same command resumes a run that was stopped or killed, even with a different number of
ranks. No row is used twice in an epoch. Only rank 0 reads and writes the checkpoint directory, which also
contains the model with the best AUC. If the table does not fit in one rank's memory, use --sharded.

Ranks do not wait for rank 0, except during the export. All ranks take part in evaluations, and checkpoints
are written in the background. Only rank 0 exports the model, within hvd.pause_stall_check() to suppress stall
warnings on the other ranks.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import loop  # type: ignore[import-not-found]  # in this directory
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import ringdance.torch as hvd
from ringdance.data import TableBatch
from ringdance.recipes.torch_state import arrays_of, restore

Array = np.ndarray[Any, Any]


class Layers(nn.Module):
    """DeepFM without the embedding table, whose rows are an input."""

    def __init__(self, fields: int, dim: int, hidden: list[int]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        widths = [fields * dim, *hidden]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU(inplace=True)]
        self.deep = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, rows: Tensor, places: Tensor, values: Tensor) -> Tensor:
        """Return logits, shape (n,).

        Args:
            rows: The distinct table rows that occur in the batch, shape (m, 1 + dim).
            places: Index of each field's table row in ``rows``, shape (n, fields).
            values: Factor for each field's table row, shape (n, fields).
        """
        where = places.flatten()  # select twice, because slicing one result would copy it
        linear = rows[:, 0].index_select(0, where).view_as(values) * values
        factors = rows[:, 1:].index_select(0, where).view(*values.shape, -1) * values.unsqueeze(2)
        pairs = factors.sum(1).square() - factors.square().sum(1)
        deep = self.deep(factors.flatten(1)).squeeze(1)
        return self.bias + linear.sum(1) + 0.5 * pairs.sum(1) + deep


class TorchTableModel(loop.TableModel):  # type: ignore[misc]
    """This rank's layers, embedding table and optimizers."""

    framework = "torch"

    def __init__(self, given: argparse.Namespace, table: hvd.EmbeddingTable, fields: int) -> None:
        super().__init__()
        torch.manual_seed(given.seed)  # all ranks start with the same weights
        self.table, self.rate = table, given.rate
        self.fields, self.layers = fields, Layers(fields, given.dim, given.hidden)
        self.inner = torch.optim.Adam(self.layers.parameters(), given.rate, fused=True)
        self.optimizer = hvd.DistributedOptimizer(self.inner, self.layers.named_parameters())

    def step(self, batch: TableBatch, rate: float) -> float:
        """Update the model with one batch. Returns the mean loss of this rank's rows.

        Each rank's loss is scaled by ``batch.weight``, so averaging the gradients over the ranks gives the
        mean over all rows in the global batch, even if the batch is short or this rank has no rows.
        The gradients of the embedding table are summed over these rows instead.
        """
        self.inner.param_groups[0]["lr"] = self.rate * rate
        looked_up, places = self.table.lookup(batch.ids)
        rows: Any = torch.from_numpy(looked_up).requires_grad_()
        logits = self.layers(rows, torch.from_numpy(places), torch.as_tensor(batch.values))
        loss = functional.binary_cross_entropy_with_logits(logits, torch.as_tensor(batch.labels))
        weighted: Any = loss * batch.weight
        weighted.backward()
        self.table.update(rows.grad * batch.count)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    @torch.inference_mode()
    def predict(self, ids: Array, values: Array) -> Array:
        """Return probabilities, shape (n,)."""
        arrays = *self.table.lookup(ids, training=False), values
        return self.layers(*map(torch.as_tensor, arrays)).sigmoid().numpy()

    def state(self) -> dict[str, Array]:
        """Return copies of the layers' weights and of Adam's state."""
        return arrays_of(self.inner, layers=self.layers)

    def restore(self, state: dict[str, Array]) -> None:
        """Restore a state returned by ``state``."""
        restore(state, self.inner, layers=self.layers)

    def export_layers(self, directory: Path) -> None:
        """Write the layers as an exported program, which score.py can run without this file."""
        places = torch.zeros(2, self.fields, dtype=torch.int64)
        example = torch.zeros(3, self.table.columns), places, torch.zeros(2, self.fields)
        shapes = {0: torch.export.Dim("rows")}, {0: (n := torch.export.Dim("n"))}, {0: n}
        program = torch.export.export(self.layers.eval(), example, dynamic_shapes=shapes)
        torch.export.save(program, directory / "program.pt2")


if __name__ == "__main__":
    loop.main(__doc__ or "", TorchTableModel)
