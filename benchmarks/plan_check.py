"""Compare a plan based on a measurement with measurements of more ranks or hosts.

    ringdance bench train --model convnet --np 1,2,4 --output bench.json
    python benchmarks/plan_check.py bench.json                        # predicts its 2 and 4 ranks
    python benchmarks/plan_check.py bench.json hosts.json --gbits 1 --shared-cores 3

A plan starts from the size in the first file that fills a host. The second file (default: the first) has the
sizes to predict. If hosts are simulated on one machine, --shared-cores is the number of hosts that share its
cores. The last column is predicted / measured seconds per step: 1 if the prediction is right. "slower alone"
is a rank's computation time without any exchange, relative to the plan's size. It is above 1 if the machine
was busy or ranks share cores.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringdance.submit.instances import Instance
from ringdance.tools.plan.planner import PlanOptions, from_bench, predict

COLUMNS = {"ranks": 6, "hosts": 6, "predicted ms": 14, "measured ms": 13, "slower alone": 14, "ratio": 7}


def rows(first: Path, second: Path, gbits: float, shared: int) -> list[dict[str, Any]]:
    """Return the predicted and measured seconds per step for each size in the second file above one rank."""
    load = from_bench(first)
    compared = []
    for size in json.loads(second.read_text())["sizes"]:
        if size["ranks"] == 1:
            continue
        on = Instance("here", size["cores"], gbits, gpus=size["ranks_per_host"] if size["gpus"] else 0)
        on = replace(on, cores=on.cores / shared)  # simulated hosts share one machine's cores
        options = PlanOptions(size["ranks_per_host"])
        predicted = predict(load, on, size["ranks"], options)
        measured = size["step_seconds"]["ringdance"]
        compared.append({
            "ranks": size["ranks"], "hosts": size["hosts"], "predicted": predicted.step_seconds,
            "measured": measured, "slower_alone": size["step_seconds"]["alone"] / load.compute,
            "ratio": predicted.step_seconds / measured,
        })  # fmt: skip
    return compared


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("first", type=Path, help="output of `ringdance bench train` for the plan")
    add("second", type=Path, nargs="?", help="output with sizes to predict (default: the first)")
    add("--gbits", type=float, default=100.0, help="speed of the network between hosts in Gbit/s")
    add("--shared-cores", type=int, default=1, help="hosts that share the cores of one machine")
    add("--json", type=Path, help="write the rows")
    arguments = parser.parse_args()
    table = rows(
        arguments.first, arguments.second or arguments.first, arguments.gbits, arguments.shared_cores
    )
    print("".join(f"{head:>{width}}" for head, width in COLUMNS.items()))
    for row in table:
        print(
            f"{row['ranks']:>6}{row['hosts']:>6}{row['predicted'] * 1e3:>14.1f}{row['measured'] * 1e3:>13.1f}"
            f"{row['slower_alone']:>14.2f}{row['ratio']:>7.2f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
