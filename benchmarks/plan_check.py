"""Compare a plan from a measurement with measurements of more ranks, or of more hosts.

    ringdance bench train --model convnet --np 1,2,4 --output bench.json
    python benchmarks/plan_check.py bench.json                        # beside its 2 and 4 ranks
    python benchmarks/plan_check.py bench.json hosts.json --gbits 1 --shared-cores 3

A plan starts from the size of the first file that fills a host; the second file (default: the first) has the
sizes that are predicted. Where hosts are simulated on one machine, --shared-cores says how many share its
cores. The last column is predicted / measured seconds of a step: 1 where the prediction is right. "slower
alone" is how much longer a rank computes without any exchange than in the size of the plan: a machine that
was busy, or ranks that share cores.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringdance.submit.instances import Instance
from ringdance.tools.plan.planner import Options, from_bench, predict

COLUMNS = {"ranks": 6, "hosts": 6, "predicted ms": 14, "measured ms": 13, "slower alone": 14, "ratio": 7}


def rows(first: Path, second: Path, gbits: float, shared: int) -> list[dict[str, Any]]:
    """Return predicted and measured seconds of a step, for each size of the second file but the plan's."""
    load = from_bench(first)
    found = []
    for size in json.loads(second.read_text())["sizes"]:
        if size["ranks"] == 1:
            continue
        on = Instance("here", size["cores"], gbits, gpus=size["ranks_per_host"] if size["gpus"] else 0)
        on = replace(on, cores=on.cores / shared)  # simulated hosts share those of one machine
        options = Options(size["ranks_per_host"])
        predicted = predict(load, on, size["ranks"], options)
        measured = size["step_seconds"]["ringdance"]
        found.append({
            "ranks": size["ranks"], "hosts": size["hosts"], "predicted": predicted.step_seconds,
            "measured": measured, "slower_alone": size["step_seconds"]["alone"] / load.compute,
            "ratio": predicted.step_seconds / measured,
        })  # fmt: skip
    return found


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("first", type=Path, help="of `ringdance bench train --output`: the plan's step")
    add("second", type=Path, nargs="?", help="the same: what is predicted (default: the first)")
    add("--gbits", type=float, default=100.0, help="of the network between hosts, Gbit/s")
    add("--shared-cores", type=int, default=1, help="hosts that share the cores of one machine")
    add("--json", type=Path, help="write the rows")
    arguments = parser.parse_args()
    found = rows(
        arguments.first, arguments.second or arguments.first, arguments.gbits, arguments.shared_cores
    )
    print("".join(f"{head:>{width}}" for head, width in COLUMNS.items()))
    for row in found:
        print(
            f"{row['ranks']:>6}{row['hosts']:>6}{row['predicted'] * 1e3:>14.1f}{row['measured'] * 1e3:>13.1f}"
            f"{row['slower_alone']:>14.2f}{row['ratio']:>7.2f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
