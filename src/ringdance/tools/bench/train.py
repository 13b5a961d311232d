"""``ringdance bench train``: measure how training scales with the number of ranks, on synthetic samples."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ringdance.core.reports.judging import TAKEN, spread
from ringdance.errors import pip_install
from ringdance.host.files import check_regular
from ringdance.launch.api import call, command_of_call
from ringdance.launch.output.stream import Style
from ringdance.launch.parser import counts, positive
from ringdance.launch.prepare import prepare
from ringdance.launch.remote.shell import add_host_options, hosts_of, remote_shell_of
from ringdance.launch.spec import CommandError, JobSpec
from ringdance.launch.subcommands import Subcommand
from ringdance.tools.report import svg


class ModelFacts(NamedTuple):
    """Properties of a model that are known before it is built.

    Attributes:
        unit: Plural noun for the model's samples, such as "images".
        batch: Default number of samples per rank and step.
        size: Default image size in pixels, or sequence length in words.
        least: Smallest valid ``size``.
    """

    unit: str
    batch: int
    size: int
    least: int = 1


MODELS = {
    "mlp": ModelFacts("images", 64, 28), "convnet": ModelFacts("images", 32, 32, 4),
    "resnet50": ModelFacts("images", 32, 224, 32), "vgg16": ModelFacts("images", 32, 224, 32),
    "inception_v3": ModelFacts("images", 32, 299, 75), "deepfm": ModelFacts("rows", 1024, 1),
    "bert-base": ModelFacts("texts", 8, 128),
}  # fmt: skip
_IMAGES = ("mlp", "convnet", "resnet50", "vgg16", "inception_v3")
FRAMEWORKS = {
    "torch": tuple(name for name in MODELS if name != "inception_v3"),
    **dict.fromkeys(("keras", "tensorflow", "jax"), _IMAGES),
}
_NEEDS = {"tensorflow": ["tensorflow", "keras"], "jax": ["jax", "optax", "keras"]}
_HELP = """\
For each number of ranks, and for one rank alone, the model trains on samples from memory. Blocks of steps
alternate between Ringdance's exchange, no exchange, and the exchange selected by --against. The number of
threads per rank does not change: it is the number of cores on a host divided by the largest number of ranks
on it (or OMP_NUM_THREADS, if set).

  speed-up, efficiency   relative to the speed of one rank alone
  exposed                share of the step that the exchange adds
  of bound               relative to the speed if exchange and computation overlapped perfectly

--output FILE.json writes the results and a plot, FILE.svg. `ringdance plan --from FILE.json` uses them.

examples:
  ringdance bench train --model convnet --np 1,2 --output convnet.json
  ringdance bench train --model resnet50 --np 1,2,4,8 -H node1:4,node2:4 --output resnet50.json
  ringdance bench train --model mlp --np 2 --against ddp
  ringdance bench train --model resnet50 --framework jax --np 2 --dtype bfloat16 --image 64 --steps 12

exit code: 0 if all numbers of ranks were measured, 2 for a wrong argument or a failed run"""


def _in_ranks(given: Mapping[str, Any]) -> Any:
    # Import by name, and only in the ranks, because the process that starts them must not import a framework.
    return importlib.import_module("ringdance.tools.bench.measure").measure(given)


def sizes(text: str) -> list[int]:
    """Parse a list of rank counts, such as "1,2,4". The result is sorted and always includes 1."""
    return sorted({1, *counts(text)})


def check(given: argparse.Namespace) -> None:
    """Raise CommandError if an argument is invalid, or if a required library is not installed."""
    has = FRAMEWORKS[given.framework]
    if given.model not in has:
        others = [name for name, models in FRAMEWORKS.items() if given.model in models]
        where = f". Use --framework {others[0]} for this model" if others else ""
        raise CommandError(
            f"--model {given.model} is not available for {given.framework}, which has {', '.join(has)}{where}"
        )
    needed = _NEEDS.get(given.framework, [given.framework])
    if missing := [name for name in needed if find_spec(name) is None]:
        what = ", ".join(missing)
        raise CommandError(f"--framework {given.framework} needs {what}. Run: {pip_install(*missing)}")
    if given.against and given.framework != "torch":
        raise CommandError(f"--against {given.against} needs --framework torch, not {given.framework}")
    least = MODELS[given.model].least
    if given.image is not None and given.image < least:
        raise CommandError(f"--image {given.image} is too small: {given.model} needs at least {least} pixels")
    if given.output:
        check_regular(given.output)
        if given.output.suffix != ".json" or not given.output.parent.is_dir() or given.output.is_dir():
            what = "is not valid. Pass a file name that ends with .json, in an existing directory"
            raise CommandError(f"--output {given.output} {what}")


def figures(
    found: Sequence[Mapping[str, Any]], batch: int, threads: int, one: float | None = None
) -> dict[str, Any]:
    """Return the JSON file's entry for the measurements with one rank count.

    Args:
        found: Results of ``ringdance.tools.bench.measure.measure``, by rank. Each block is timed by its
            slowest rank.
        batch: Samples per rank and step.
        threads: Threads per rank.
        one: Samples per second measured on a single rank, or None if this entry describes a single rank.
    """
    first, ranks = found[0], len(found)
    blocks = {
        name: [max(times) for times in zip(*(rank["blocks"][name] for rank in found), strict=True)]
        for name in first["blocks"]
    }
    seconds = {name: median(times) for name, times in blocks.items()}
    own, alone = seconds["ringdance"], seconds["alone"]
    several = blocks["ringdance"]
    speed = ranks * batch / own
    return {
        "ranks": ranks, "hosts": len({rank["host"] for rank in found}), "cores": first["cores"],
        "threads": threads, "ranks_per_host": max(rank["local_size"] for rank in found),
        "gpus": sum(rank["gpu"] for rank in found), "images_per_second": speed,
        "noise": 1.96 * 1.25 * spread(several) / len(several) ** 0.5 / own,  # half-width of the 95% interval
        "others": max(_others(found, host) for host in {rank["host"] for rank in found}),
        "step_seconds": seconds, "exposed_share": max(0.0, 1 - alone / own), "single_steps": first["single"],
        "efficiency": speed / ranks / (one or speed),
        "bound": ranks * batch / max(alone, *(rank["exchange"] for rank in found)),
        "gradients": [
            dict(zip(("name", "bytes", "seconds"), row, strict=True)) for row in first["gradients"]
        ],
        **({"assumed": True} if first["assumed"] else {}),
    }  # fmt: skip


def _others(found: Sequence[Mapping[str, Any]], host: str) -> float:
    """Return the fraction of a host's cores used by programs other than the measured ranks."""
    here = [rank for rank in found if rank["host"] == host]
    return max(0.0, here[0]["busy"] - sum(rank["used"] for rank in here) / here[0]["cores"])


def table(content: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return one row per rank count, with values by column name. Other libraries' columns come last."""
    return [
        {name: size[name] for name in ("ranks", "hosts", "images_per_second", "noise")}
        | {"speed_up": size["efficiency"] * size["ranks"], "efficiency": size["efficiency"]}
        | {"exposed_share": size["exposed_share"], "of_bound": size["images_per_second"] / size["bound"]}
        | {peer: size["ranks"] * content["batch"] / size["step_seconds"][peer] for peer in _peers(content)}
        for size in content["sizes"]
    ]


def _peers(content: Mapping[str, Any]) -> list[str]:
    return [name for name in content["sizes"][0]["step_seconds"] if name not in ("ringdance", "alone")]


def text(rows: Sequence[Mapping[str, float]], unit: str) -> str:
    """Format the table as text. Columns of other libraries also show Ringdance's speed relative to theirs."""
    heads = {
        "ranks": ("ranks", ","), "hosts": ("hosts", ","), "images_per_second": (f"{unit}/s", ",.1f"),
        "noise": ("+-", ".1%"), "speed_up": ("speed-up", ".2f"), "efficiency": ("efficiency", ".1%"),
        "exposed_share": ("exposed", ".1%"), "of_bound": ("of bound", ".1%"),
    }  # fmt: skip
    lines = [[heads[name][0] if name in heads else name for name in rows[0]]]
    for row in rows:
        ours = row["images_per_second"]
        lines.append([
            format(value, heads[name][1]) if name in heads else f"{value:,.1f} (x {ours / value:.2f})"
            for name, value in row.items()
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def draw(target: Path, content: Mapping[str, Any]) -> None:
    """Plot speed and efficiency against the number of ranks."""
    rows, unit = table(content), MODELS[content["model"]].unit
    one = rows[0]["images_per_second"]
    lines = {"ringdance": "images_per_second"} | {peer: peer for peer in _peers(content)}
    speeds = {name: [(row["ranks"], row[key]) for row in rows] for name, key in lines.items()}
    shares = {name: [(n, 100 * speed / n / one) for n, speed in line] for name, line in speeds.items()}
    speeds["linear"] = [(row["ranks"], row["ranks"] * one) for row in rows]
    bounds = [(size["ranks"], size["bound"]) for size in content["sizes"]]
    shares["bound"] = [(n, 100 * speed / n / one) for n, speed in bounds]
    svg.write(
        target, {"Speed": speeds, "Efficiency": shares}, ["ranks"] * 2,
        [f"{unit}/s of all ranks", "speed per rank in % of a single rank's"],
        noise={"ringdance": [row["noise"] for row in rows]}, logarithmic=rows[-1]["ranks"] > 8,
    )  # fmt: skip


def _train(given: argparse.Namespace) -> int:
    check(given)
    model = MODELS[given.model]
    options = {
        "model": given.model, "framework": given.framework, "dtype": given.dtype,
        "against": [given.against] if given.against else [], "batch": given.batch or model.batch,
        "unit": model.unit, "image": given.image or model.size, "steps": given.steps, "warmup": given.warmup,
    }  # fmt: skip
    shell, style = remote_shell_of(given), Style("")
    spec = JobSpec(command_of_call(), hosts=hosts_of(given), shell=shell, style=style)
    threads = _threads(replace(spec, ranks=given.np[-1]))
    environ = {"OMP_NUM_THREADS": str(threads), "RINGDANCE_SUMMARY_TIME": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for name in ("PJRT_NPROC", "NPROC", "TF_NUM_INTRAOP_THREADS"):
        environ[name] = os.environ.get(name, str(threads))
    about = (f"{options[name]} {name}" for name in ("steps", "warmup"))
    print(f"{given.model} in {given.framework}: {options['batch']} {model.unit} per rank and step, "
          f"{given.dtype}, {', '.join(about)}; threads per rank: {threads}")  # fmt: skip
    content = {"model": given.model, "framework": given.framework, "gradient_dtype": "float32"}
    content |= {"batch": options["batch"], "sizes": []}
    for ranks in given.np:
        print(f"\n{ranks} rank{'s' * (ranks > 1)}", flush=True)
        measurements = call(replace(spec, ranks=ranks, exports=environ), _in_ranks, (options,))
        one = content["sizes"][0]["images_per_second"] if content["sizes"] else None
        content["sizes"].append(figures(measurements, options["batch"], threads, one))
    print(f"\n{text(table(content), model.unit)}")
    if (taken := max(size["others"] for size in content["sizes"])) >= TAKEN:
        print(f"Other programs used up to {taken:.0%} of a host's cores and slowed down the measurement.\n"
              "Measure again while nothing else is running.")  # fmt: skip
    if given.output:
        _write(given.output, content)
    return 0


def _threads(largest: JobSpec) -> int:
    """Return the number of threads per rank: OMP_NUM_THREADS if set, otherwise based on a host's cores."""
    prepared = prepare(largest)
    prepared.close()
    if prepared.plan.threads:
        return prepared.plan.threads
    text = os.environ["OMP_NUM_THREADS"]
    first = text.partition(",")[0]
    if not first.isdecimal() or int(first) < 1:
        raise CommandError(
            f"OMP_NUM_THREADS={text!r} is invalid: expected a positive integer. Run: unset OMP_NUM_THREADS"
        )
    return int(first)


def _write(output: Path, content: Mapping[str, Any]) -> None:
    """Write the measurements to a JSON file, and a plot to an SVG file with the same base name."""
    output.write_text(json.dumps(content, indent=1) + "\n")
    draw(output.with_suffix(".svg"), content)
    print(f"\nwritten: {output}, {output.with_suffix('.svg')}")


def _add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="M", choices=MODELS, help=f"one of: {', '.join(MODELS)}")
    names = ", ".join(FRAMEWORKS)
    add("--framework", default="torch", metavar="F", choices=FRAMEWORKS, help=f"{names} (default: torch)")
    text = "rank counts to measure, such as 1,2,4; 1 is always included (default: 1,2)"
    add("--np", "-np", type=sizes, default=[1, 2], metavar="N,N", help=text)
    add_host_options(parser, "hosts and their slots, which are filled in this order")
    text = "also measure PyTorch's DistributedDataParallel in the same run"
    add("--against", choices=("ddp",), help=text)
    add("--batch", type=positive, metavar="N", help="samples per rank and step (default: the model's)")
    add("--steps", type=positive, default=30, metavar="N", help="steps to measure (default: 30)")
    text = "warm-up steps before the measurement (default: 5)"
    add("--warmup", type=positive, default=5, metavar="N", help=text)
    add("--image", type=positive, metavar="N", help="image size in pixels, or words per text")
    text = "data type of the computation; weights and gradients are float32 (default: float32)"
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help=text)
    add("--output", type=Path, metavar="FILE.json", help="write the results, and a plot to FILE.svg")


TRAIN = Subcommand(_train, "measure how training scales with the number of ranks", _add, _HELP)
