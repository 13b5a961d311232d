"""Train DeepFM on logs of clicks with PyTorch, on the CPUs of any number of hosts.

Rows are those of Criteo: a label, 13 numbers, 26 categories. Try it on generated ones; then with real ones:

    ringdance data generate criteo clicks --rows 2000000 --validation 0.05
    ringdance run -np 2 python train_torch.py clicks --export model
    python score.py model clicks --split validation --output scores.tsv

    ringdance data prepare criteo /data/criteo /data/clicks --table-size 10000000 --shards 64
    ringdance run -H node1:16,node2:16 python train_torch.py /data/clicks --checkpoints run1 --patience 3

Start one rank for each core: `ringdance run` gives each its own. benchmarks/strategies
of a clone compares that with other ways on your hosts.

The model (Guo et al., DeepFM, IJCAI 2017): each field of a row is an id, a row of one table of embeddings,
and a factor. The first column of the table is the linear part; the others give the pairwise products, and the
input of the layers. A step reads and updates only the rows of the table that its batch has.

With --checkpoints a run that was stopped, even killed, goes on with the same command, also on another number
of ranks: no row is used twice in an epoch. Only rank 0 reads and writes that directory. The model
with the best AUC is kept there too. A table that does not fit into the memory of one rank: --sharded.

No rank waits for rank 0: all take part in an evaluation; checkpoints are copied, then written in the
background. What one rank has to do alone, the export, is marked by hvd.pause_stall_check().
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
    """The model without its table."""

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
            rows: of the table, shape (any, 1 + dim).
            places: of each field's row among them, shape (n, fields).
            values: factors of those rows, shape (n, fields).
        """
        where = places.flatten()  # both parts by themselves: slices of the large tensor would be copies
        linear = rows[:, 0].index_select(0, where).view_as(values) * values
        factors = rows[:, 1:].index_select(0, where).view(*values.shape, -1) * values.unsqueeze(2)
        pairs = factors.sum(1).square() - factors.square().sum(1)
        deep = self.deep(factors.flatten(1)).squeeze(1)
        return self.bias + linear.sum(1) + 0.5 * pairs.sum(1) + deep


class Model(loop.Model):  # type: ignore[misc]
    """Layers and table, and how they are updated."""

    framework = "torch"

    def __init__(self, given: argparse.Namespace, table: hvd.EmbeddingTable, fields: int) -> None:
        super().__init__()
        torch.manual_seed(given.seed)  # the same weights on all ranks
        self.table, self.rate = table, given.rate
        self.fields, self.layers = fields, Layers(fields, given.dim, given.hidden)
        self.inner = torch.optim.Adam(self.layers.parameters(), given.rate, fused=True)
        self.optimizer = hvd.DistributedOptimizer(self.inner, self.layers.named_parameters())

    def step(self, batch: TableBatch, rate: float) -> float:
        """Update by one batch; return the mean loss of this rank's rows.

        Gradients are averaged over the ranks. The weight of the batch makes that the mean over the rows of
        the global batch, also if it is short, or if this rank has none of it. The table gets their sum.
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
        """Take such values."""
        restore(state, self.inner, layers=self.layers)

    def export_layers(self, directory: Path) -> None:
        """Write the layers for score.py, as a program without this file."""
        places = torch.zeros(2, self.fields, dtype=torch.int64)
        example = torch.zeros(3, self.table.columns), places, torch.zeros(2, self.fields)
        shapes = {0: torch.export.Dim("rows")}, {0: (n := torch.export.Dim("n"))}, {0: n}
        program = torch.export.export(self.layers.eval(), example, dynamic_shapes=shapes)
        torch.export.save(program, directory / "program.pt2")


if __name__ == "__main__":
    loop.main(__doc__ or "", Model)
