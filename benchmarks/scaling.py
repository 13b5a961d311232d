"""Predict a training step's efficiency on many hosts from the engine's own plans, with bounds by the links.

    python benchmarks/scaling.py                            # ResNet-50 on 8 to 27,200 ranks: takes a minute
    python benchmarks/scaling.py --hosts 2,4,8 --gbits 25 --wire float32,bfloat16
    python benchmarks/scaling.py --model vgg16 --step 0.3 --set latency=5e-6 --set message_seconds=1e-6
    python benchmarks/scaling.py --gbits 10,100 --plot efficiency.svg --json

The engine's plans (rounds, batches, chunks, messages) run on a simulated clock instead of a network, with the
settings in the environment. Efficiency is --step divided by the time of a step with its exchange. Machines
are ideal; `ringdance plan` includes the losses of real ones. "ring" and "tree" are bounds: an all-reduce over
a ring or two trees of hosts that fully use the links from the first gradient.

--set NAME=VALUE, in bytes/s and seconds:
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from itertools import product
from math import ceil, log2
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ringdance.core.exchange.arithmetic import dtype_named
from ringdance.errors import LaunchError, SettingError
from ringdance.launch.parser import Parser, as_program, counts, number, positive
from ringdance.settings import Settings, load
from ringdance.tools.plan.models import models
from ringdance.tools.plan.simulator import Machine, simulate
from ringdance.tools.report import svg

_WIRES = ("float32", "bfloat16", "float16")
_NAMES = [field.name for field in fields(Machine) if field.name != "bandwidth"]
_DIVISORS = ("memory_bandwidth", "stack_bandwidth")
_LINES = {"ringdance": "engine", "bound ring": "ring", "bound tree": "tree"}
Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run the program with the arguments ``argv`` and return the exit code."""
    defaults = asdict(Machine(0.0))
    parser = Parser(
        prog="scaling.py",
        description=f"{__doc__}" + "\n".join(f"  {name:18} {defaults[name]:g}" for name in _NAMES),
    )
    add = parser.add_argument
    add("--model", choices=models(), default="resnet50", help="source of the gradients (default resnet50)")
    add("--step", type=number, default=0.1, metavar="S", help="seconds of a rank's own step (default 0.1)")
    hosts, gbits = [1, 2, 8, 32, 128, 512, 3400], [10.0, 25.0, 100.0, 400.0]
    text = "(default 1,2,8,32,128,512,3400)"
    add("--hosts", type=counts, default=hosts, metavar="N,N", help=f"numbers of hosts {text}")
    add("--ranks-per-host", type=positive, default=8, metavar="N", help="ranks on each host (default 8)")
    text = "speeds of a host's link in Gbit/s (default 10,25,100,400)"
    add("--gbits", type=_list(number), default=gbits, metavar="G,G", help=text)
    text = "types for the exchange of gradients: float32 (default), bfloat16, float16"
    add("--wire", type=_list(_wire), default=["float32"], metavar="TYPE,TYPE", help=text)
    text = "a property of the hosts; repeatable, see below"
    add("--set", type=_property, action="append", default=[], metavar="NAME=VALUE", help=text)
    add("--plot", type=Path, metavar="FILE.svg", help="draw the efficiency")
    add("--json", action="store_true", help="print all results as JSON")

    def action() -> int:
        arguments = parser.parse_args(list(argv))
        try:
            settings = load()
        except SettingError as error:
            raise LaunchError(str(error)) from None
        rows = efficiencies(arguments, replace(Machine(0.0), **dict(arguments.set)), settings)
        if arguments.json:
            print(json.dumps(rows, indent=1))
        else:
            _show(Console(), rows)
        if arguments.plot:
            panels = _panels(rows)
            labels = (["hosts"] * len(panels), ["efficiency, %"] * len(panels))
            svg.write(arguments.plot, panels, *labels, logarithmic=True)
        return 0

    return as_program("scaling.py", action)


def _list(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: list(dict.fromkeys(parse(word) for word in text.split(",")))


def _wire(text: str) -> str:
    if text not in _WIRES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_WIRES)}")
    return text


def _property(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    least = 1 if name == "ranks_per_core" else 0
    with suppress(ValueError):
        if name in _NAMES and float(value) >= least and (float(value) or name not in _DIVISORS):
            return name, float(value)
    known = ", ".join(_NAMES)
    raise argparse.ArgumentTypeError(
        f"{text!r}: NAME=VALUE is expected, with NAME one of {known}. VALUE must be above 0 for "
        f"{', '.join(_DIVISORS)}, at least 1 for ranks_per_core, and at least 0 otherwise"
    )


def ring_bound(machine: Machine, hosts: int, nbytes: int) -> float:
    """Return the seconds of a ring all-reduce of ``nbytes`` between hosts that fully uses the links."""
    return 2 * (hosts - 1) * (nbytes / hosts / machine.bandwidth + machine.latency)


def tree_bound(machine: Machine, hosts: int, nbytes: int) -> float:
    """Return the seconds with two binary trees, each for half of the data (Sanders, Speck, Träff 2009)."""
    return 0.0 if hosts == 1 else 2 * (nbytes / machine.bandwidth + ceil(log2(hosts)) * machine.latency)


def efficiencies(arguments: argparse.Namespace, machine: Machine, settings: Settings) -> list[Row]:
    """Return a row for each type, bandwidth and number of hosts. Bytes and messages are per host."""
    step, per_host, rows = arguments.step, arguments.ranks_per_host, []
    ready = models()[arguments.model].gradients(step)
    for wire, gbits, hosts in product(arguments.wire, arguments.gbits, arguments.hosts):
        nbytes = sum(size for size, _ in ready) // 4 * dtype_named(wire).itemsize
        links = replace(machine, bandwidth=gbits * 1e9 / 8)
        plan = simulate(links, hosts, per_host, ready, step, wire_dtype=wire, settings=settings)
        ring, tree = (bound(links, hosts, nbytes) for bound in (ring_bound, tree_bound))
        rows.append({
            "model": arguments.model, "wire": wire, "gbits": gbits, "hosts": hosts, "ranks": hosts * per_host,
            "step_seconds": plan.seconds, "exposed_seconds": plan.exposed_seconds, "engine": plan.efficiency,
            "ring": step / max(step, ready[0][1] + ring), "tree": step / max(step, ready[0][1] + tree),
            "exchanged_bytes": nbytes, "sent_bytes": plan.sent_bytes, "messages": plan.messages,
        })  # fmt: skip
    return rows


def _show(console: Console, rows: Sequence[Row]) -> None:
    for wire in dict.fromkeys(row["wire"] for row in rows):
        chosen = [row for row in rows if row["wire"] == wire]
        first = chosen[0]
        title = f"{first['model']}, {first['exchanged_bytes'] / 1e6:.0f} MB in {wire}: efficiency by ranks"
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        table.add_column("Gbit/s", justify="right")
        table.add_column("")
        for ranks in dict.fromkeys(row["ranks"] for row in chosen):
            table.add_column(f"{ranks:,}", justify="right")
        for gbits in dict.fromkeys(row["gbits"] for row in chosen):
            for line, key in enumerate(_LINES.values()):
                cells = [f"{100 * row[key]:.3g}%" for row in chosen if row["gbits"] == gbits]
                table.add_row("" if line else f"{gbits:g}", key, *cells, end_section=line == 2)
        console.print(table)


def _panels(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the efficiency in % over the number of hosts for each type and bandwidth."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        panel = panels.setdefault(f"{row['gbits']:g} Gbit/s, {row['wire']}", {})
        for name, key in _LINES.items():
            panel.setdefault(name, []).append((row["hosts"], 100 * row[key]))
    return panels


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
