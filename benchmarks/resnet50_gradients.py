"""The 161 gradients of ResNet-50 (25.6 M float32, 102 MB), submitted in one burst and averaged.

What: the module gets all gradients at once through ``allreduce_async_`` with names and op=Average, in the
order of backward, then waits for all with ``synchronize``. Peers on the same memory in the same job: raw
mpi4py that packs into 64 MB buffers, calls ``Allreduce`` for each and copies out; the same with 4 MB buffers;
chunks of 0.5 MB reduced in place; gloo as DDP uses it (25 MB buckets, all in flight); and the copy bound.
All of them except the bound compute averages, and all results are checked first.

Why: this is what one training step of a typical model exchanges. Its 161 tensors of 256 B to 9.4 MB show
both the cost per tensor and the use of memory.

The copy bound: all ranks copy all tensors through a shared-memory window and back in chunks at the same time,
without a sum and without waiting for each other. "of bound" is the bound divided by the time.

How to read: contestants alternate. Times are the slowest rank's. "x 64 MB" is the time as a multiple of the
time with packing into 64 MB buffers. Smaller is better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import Report, alternate, ensure_ranks, milliseconds, modules, parser, ratio, run_rank, timed
from shapes import RESNET50_ELEMENTS, elements, resnet50

PACK_64, PACK_4, CHUNKS, GLOO, BOUND = (
    "mpi4py, 64 MB buffers", "mpi4py, 4 MB buffers", "mpi4py, 0.5 MB chunks in place",
    "gloo, 25 MB buckets", "copy bound",
)  # fmt: skip


def contestants(job: Any, chunk: int, *, backward: bool) -> tuple[list[Any], dict[str, Callable[[], None]]]:
    """Return the gradients (flat tensors, already written to) and one burst for each contestant."""
    import torch
    from peers import KB, MB, copy_through_window, gloo_buckets, module_burst, mpi_chunks, mpi_packed

    shapes = resnet50(backward=backward)
    shaped = [torch.zeros(shape).fill_(1) for _, shape in shapes]
    flat = [tensor.view(-1) for tensor in shaped]
    arrays = [tensor.numpy() for tensor in flat]
    names = [f"gradient.{name}" for name, _ in shapes]
    bursts = {name: module_burst(module, shaped, names) for name, module in job.modules.items()}
    bursts[PACK_64] = mpi_packed(job, arrays, 64 * MB)
    bursts[PACK_4] = mpi_packed(job, arrays, 4 * MB)
    bursts[CHUNKS] = mpi_chunks(job, arrays, 512 * KB)
    bursts[GLOO] = gloo_buckets(job, flat, 25 * MB)
    bursts[BOUND] = copy_through_window(job, arrays, chunk)
    return flat, bursts


def check(job: Any, flat: list[Any], bursts: dict[str, Callable[[], None]]) -> None:
    """Let every contestant average values that differ between ranks and tensors, and check all results.

    Raises:
        RuntimeError: A tensor is wrong. The message names the contestant and the tensor.
    """
    for name, burst in bursts.items():
        factor = job.rank + 1.0 if name == BOUND else (job.size + 1) / 2
        for index, tensor in enumerate(flat):
            tensor.fill_((job.rank + 1.0) * (index + 1))
        burst()
        for index, tensor in enumerate(flat):
            wrong = float((tensor - factor * (index + 1)).abs().max())
            if wrong > 1e-5 * factor * (index + 1):
                raise RuntimeError(f"{name}: tensor {index} of {len(flat)} is wrong by {wrong}")


def show(report: Report, samples: dict[str, list[float]], nbytes: int) -> None:
    """Print the table and the ratios."""
    group = "161 gradients of ResNet-50"
    summaries = report.add(group, "s", samples)
    rows = []
    for name, summary in summaries.items():
        row = [name, *map(milliseconds, (summary.median, summary.p10, summary.p90, summary.least))]
        row += [str(summary.count), f"{nbytes / summary.median / 1e9:.2f}"]
        for peer in (PACK_64, PACK_4, CHUNKS):
            value = summary.median / summaries[peer].median
            row.append(ratio(report.figure(group, f"{name} / {peer}", value)))
        share = report.figure(group, f"{BOUND} / {name}", summaries[BOUND].median / summary.median)
        rows.append([*row, f"{share:.2f}"])
    report.table(
        ("burst", "median ms", "p10", "p90", "min", "bursts", "GB/s", "x 64 MB", "x 4 MB", "x chunks",
         "of bound"), rows,
    )  # fmt: skip


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "resnet50_gradients.py", seconds=10)
    options.add_argument("--forward", action="store_true", help="submit in forward order, not in backward's")
    options.add_argument(
        "--chunk-kb", type=int, default=256, help="chunks of the copy bound in KB, 256 to 512 (default: 256)"
    )
    arguments = options.parse_args()
    ensure_ranks(arguments)

    def measure(job: Any) -> None:
        if elements(resnet50()) != RESNET50_ELEMENTS:
            raise RuntimeError("the table of shapes is damaged")
        job.gloo()
        report = Report("gradients of ResNet-50 in one burst", job)
        report.opening()
        flat, bursts = contestants(job, arguments.chunk_kb << 10, backward=not arguments.forward)
        check(job, flat, bursts)
        samples = alternate(job, {name: timed(burst) for name, burst in bursts.items()}, arguments.seconds)
        show(report, samples, 4 * RESNET50_ELEMENTS)
        report.write(arguments.json)

    run_rank(measure, modules(arguments))


if __name__ == "__main__":
    main()
