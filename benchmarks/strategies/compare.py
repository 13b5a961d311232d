"""Train DeepFM in several ways on the same CPU hosts, and compare them: speed, CPU use, memory, AUC.

    ringdance data generate criteo clicks --rows 2000000 --validation 0.05
    python benchmarks/strategies/compare.py clicks
    python benchmarks/strategies/compare.py clicks --strategies ringdance,single,ddp --framework torch -np 4
    python benchmarks/strategies/compare.py clicks -H node1:2,node2:2 --seconds 120 --output by-hosts
    python benchmarks/strategies/compare.py day_0.tsv --table-size 1000000 --rows 500000

DATA is a directory written by `ringdance data`, or a file with Criteo's columns. Such a file is prepared
first, with a fifth of its rows for validation. The strategies:

    ringdance              processes that average gradients by all-reduce, the table's gradients as rows
    single                 one process, with the numbers of threads that were fastest in a short trial
    tower                  TensorFlow: devices assigned by hand in one process, gradients averaged by hand
    mirrored               TensorFlow: MirroredStrategy over the devices of one process
    multi_worker_mirrored  TensorFlow: MultiWorkerMirroredStrategy with -np processes
    parameter_server       TensorFlow: asynchronous ParameterServerStrategy: servers, -np workers, coordinator
    ddp                    PyTorch: DistributedDataParallel on gloo

All strategies have the same model, initial values, order of rows, global batch and optimizers: Adagrad for
the table rows in a batch, Adam for the rest. Each trains for --rows rows, at most --seconds. The AUC on the
validation part is measured after the same numbers of rows for all, outside that time. A strategy that fails
gets a row with its error.

--output receives a JSON file and a log for each strategy, table.md, advice.txt and curves.svg. Existing
results are kept: if you interrupt the command, run it again to continue. --again measures everything again.

exit code: 0 if all strategies have results, 1 if some failed, 2 if an argument is wrong
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import strategies
from comparison import Result, advice, curves, table

from ringdance.errors import ArgumentError
from ringdance.host.schedulers.hostfile import hosts_text
from ringdance.launch.remote.shell import add_host_options, hosts_of, ssh_words
from ringdance.recipes.deepfm import rates
from ringdance.recipes.models import text_file
from ringdance.recipes.options import count, number, widths

FRAMEWORKS = {
    "tensorflow": ("ringdance", "single", "tower", "mirrored", "multi_worker_mirrored", "parameter_server"),
    "torch": ("ringdance", "single", "ddp"),
}
ALL = list(dict.fromkeys(name for names in FRAMEWORKS.values() for name in names))
_ONE_PROCESS = ("single", "tower", "mirrored")
_CORES = len(os.sched_getaffinity(0))


# Options --------------------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("data", metavar="DATA")
    add("--strategies", default=",".join(ALL), metavar="A,B", help="default: all")
    add("--framework", default=",".join(FRAMEWORKS), metavar="A,B", help="default: tensorflow,torch")
    add("-np", "--num-proc", type=count, metavar="N", help="processes, or devices of one; default: the cores")
    add_host_options(parser, "hosts; a single process runs on the first")
    add("--rows", type=count, metavar="N", help="rows to train on; default: all, once")
    add("--seconds", type=number(float, 0.01), default=40, metavar="S", help="time limit; default: 40")
    add("--batch-size", type=count, default=4096, metavar="N", help="global batch size; default: 4096")
    add("--validation-rows", type=count, default=30_000, metavar="N", help="default: 30,000")
    add("--dim", type=count, default=16, help="factors per table row; default: 16")
    add("--hidden", type=widths, default="400,400,400", metavar="A,B", help="widths; default: 400,400,400")
    add("--parameter-servers", type=count, metavar="N", help="default: half of -np, at least 2")
    add("--table-size", type=count, default=1_000_000, metavar="N", help="for a raw file; default: 1,000,000")
    add("--output", type=Path, default=Path("comparison"), metavar="DIR", help="default: comparison")
    add("--again", action="store_true", help="repeat strategies that already have results")
    add("--child", help=argparse.SUPPRESS)
    for name in ("--sizes", "--threads"):  # sizes of the model; threads within and between operations
        add(name, type=lambda text: json.loads(text), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.child:
        return parsed
    parsed.hosts = hosts_of(parsed) or []
    parsed.num_proc = parsed.num_proc or sum(slots for _, slots in parsed.hosts) or max(2, _CORES)
    parsed.parameter_servers = parsed.parameter_servers or max(2, parsed.num_proc // 2)
    if parsed.batch_size % parsed.num_proc:
        parser.error(f"--batch-size {parsed.batch_size} cannot be divided among {parsed.num_proc} processes")
    for text, known in ((parsed.strategies, ALL), (parsed.framework, FRAMEWORKS)):
        for name in text.split(","):
            if name not in known:
                parser.error(f"{name!r} is not one of {', '.join(known)}")
    if not wanted(parsed):
        parser.error(f"{parsed.framework} has none of these strategies: {parsed.strategies}")
    return parsed


def wanted(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Return each run's framework and strategy."""
    return [
        (framework, name)
        for framework in given.framework.split(",")
        for name in given.strategies.split(",")
        if name in FRAMEWORKS[framework]
    ]


def opened(given: argparse.Namespace) -> None:
    """Complete the options from the data. Prepare a raw file first."""
    from ringdance.data import Table

    data = Path(given.data)
    if data.is_file():
        prepared, record, stat = given.output / "data", given.output / "data.json", data.stat()
        source = [str(data.resolve()), stat.st_size, stat.st_mtime_ns, given.table_size]
        kept = _kept(record)
        if kept not in (None, source):
            _wrong(f"{prepared} is from {kept[0]}, then, with --table-size {kept[3]}: use another --output.")
        if kept is None or not (prepared / "validation.json").exists():
            command = ["data", "prepare", "criteo", str(data), str(prepared), "--validation", "0.2"]
            _ringdance([*command, "--table-size", str(given.table_size)])
            with text_file(str(record)) as file:
                json.dump(source, file)
        data = prepared
    try:
        table = Table.open(data, "train")
        Table.open(data, "validation")
    except ArgumentError as error:
        _wrong(f"{error} Both splits are needed: ringdance data generate|prepare ... --validation SHARE.")
    given.data = str(data.resolve())
    if len(table) < given.batch_size:
        _wrong(f"{data} has {len(table):,} rows to train on. Use a smaller --batch-size.")
    given.rows = given.rows or len(table)
    given.sizes = [table.table_size, table.fields, given.dim, given.hidden]


def _kept(path: Path) -> Any:
    """Return the contents of a file from an earlier run, or None if it cannot be used."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _wrong(text: str) -> NoReturn:
    print(f"compare: {text}", file=sys.stderr)
    sys.exit(2)


def _ringdance(words: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "ringdance", *words])
    if done.returncode:
        sys.exit(done.returncode)


# Runs -----------------------------------------------------------------------------------------------------


def command(given: argparse.Namespace, framework: str, name: str, more: Sequence[str]) -> list[str]:
    """Return the command line that starts a strategy's processes."""
    hosts, ranks = [list(host) for host in given.hosts], given.num_proc
    if name in _ONE_PROCESS:
        hosts, ranks = [[host, 1] for host, _ in hosts[:1]], 1
    elif name == "parameter_server":  # servers and the coordinator in addition to the workers
        for number in [0, *range(given.parameter_servers)] if hosts else []:
            hosts[number % len(hosts)][1] += 1
        ranks += given.parameter_servers + 1
    where = ["-H", hosts_text([(host, slots) for host, slots in hosts]), *ssh_words(given)] if hosts else []
    same = ("rows", "seconds", "batch_size", "validation_rows", "parameter_servers", "num_proc")
    passed = [word for one in same for word in (f"--{one.replace('_', '-')}", str(getattr(given, one)))]
    return [
        sys.executable, "-m", "ringdance", "run", "-np", str(ranks), *where, "--output-json",
        "-x", "RINGDANCE_SUMMARY_TIME=0", "-x", "RINGDANCE_STALL_CHECK_TIME=600",
        "-x", "TF_CPP_MIN_LOG_LEVEL=2",
        "python", os.path.abspath(__file__), given.data, "--child", name, "--framework", framework,
        "--sizes", json.dumps(given.sizes), *passed, *more,
    ]  # fmt: skip


def run(given: argparse.Namespace, framework: str, name: str, *more: str, quiet: bool = False) -> Result:
    """Run a strategy, print its progress, and return its results or its error."""
    result = Result(framework, name, settings=settings(given))
    told: dict[int, list[dict[str, Any]]] = defaultdict(list)
    other: list[str] = []
    began = time.time()
    limit = 240 + 4 * given.seconds
    log = given.output / f"{framework}-{name}.log"
    line = command(given, framework, name, more)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        timer = threading.Timer(limit, process.terminate)
        timer.start()
        try:
            for text in process.stdout or ():
                fact = _fact(text)
                if fact is None:
                    other.append(text)
                    continue
                told[fact[0]].append(fact[1])
                if "point" in fact[1] and not quiet:
                    samples, seconds, auc, _ = fact[1]["point"]
                    _progress(f"{framework} {name}: {samples:,} rows in {seconds:.1f} s, AUC {auc:.4f}")
        except BaseException:
            process.terminate()
            raise
        finally:
            timer.cancel()
    log.write_text("".join(other))
    if process.returncode or not any("point" in entry for entry in told[0]):
        lines = [json.loads(text)["text"] if text.startswith('{"rank"') else text for text in other]
        errors = [text.strip() for text in lines if "Error" in text] or [text.strip() for text in lines[-1:]]
        late = f"stopped after {limit:.0f} s; " if time.time() - began >= limit else ""
        result.error = f"{late}{errors[0] if errors else f'exit code {process.returncode}'}"[:300]
    else:
        _complete(result, told, began)
    return result


def _fact(text: str) -> tuple[int, dict[str, Any]] | None:
    """Return the rank and the fact in a line of output, or None if the line is something else."""
    if strategies.MARK not in text:
        return None
    line = json.loads(text)
    return line["rank"], json.loads(line["text"].removeprefix(strategies.MARK))


def _complete(result: Result, told: dict[int, list[dict[str, Any]]], began: float) -> None:
    leader = told[0]
    windows = [fact["window"] for fact in leader if "window" in fact]
    busy, memory = 0.0, 0
    for facts in told.values():
        looks = sorted((fact for fact in facts if "cpu" in fact), key=lambda one: one["time"])
        times, spent = [fact["time"] for fact in looks], [fact["cpu"] for fact in looks]
        busy += sum(float(np.interp(b, times, spent) - np.interp(a, times, spent)) for a, b in windows)
        memory += max(fact["memory"] for fact in looks)
    ready = next(fact for fact in leader if "ready" in fact)
    result.processes, result.warm, result.validation = len(told), ready["warm"], ready["validation"]
    result.threads = next((fact["threads"] for fact in leader if "threads" in fact), "")
    result.startup, result.memory = ready["ready"] - began, memory
    result.curve = [fact["point"] for fact in leader if "point" in fact]
    seconds = sum(b - a for a, b in windows)
    result.cores_busy = max(0.01, busy / seconds)
    if not result.settings.get("hosts") and os.cpu_count() == _CORES:
        used = np.array(sorted((fact["time"], fact["host"]) for fact in leader if "host" in fact)).T
        in_all = sum(float(np.diff(np.interp(ends, *used))[0]) for ends in windows)
        result.others = max(0.0, in_all / seconds - result.cores_busy)


def tuned(given: argparse.Namespace) -> str:
    """Return the numbers of TensorFlow threads that are fastest in one process, according to short runs."""
    trial = argparse.Namespace(**{**vars(given), "rows": 11 * given.batch_size, "validation_rows": 256})
    speeds = {}
    for threads in ((_CORES, 1), (_CORES, 2), (1, _CORES)):
        text = json.dumps(threads)
        result = run(trial, "tensorflow", "single", "--threads", text, quiet=True)
        speeds[text] = 0.0 if result.error else result.speed
        _progress(f"tensorflow single: threads {text}: {speeds[text]:,.0f} samples/s")
    return max(speeds, key=speeds.__getitem__)


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that results must share to be comparable."""
    names = (
        "data", "rows", "seconds", "batch_size", "validation_rows", "sizes", "num_proc", "hosts",
        "parameter_servers",
    )  # fmt: skip
    constants = {name: value for name, value in vars(rates).items() if name.isupper()}
    return {**{name: getattr(given, name) for name in names}, "rates": constants, "cores": _CORES}


def measured(given: argparse.Namespace) -> list[Result]:
    """Run the strategies that have no result yet, and return all results.

    Raises:
        SystemExit: ``--output`` has results with other settings.
    """
    results = []
    for framework, name in wanted(given):
        path = given.output / f"{framework}-{name}.json"
        if not given.again and (earlier := _kept(path)):
            kept = Result(**earlier)
            now = json.loads(json.dumps(settings(given)))
            changed = [key for key, value in now.items() if kept.settings.get(key) != value]
            if changed:
                _wrong(
                    f"{path} was measured with {changed[0]}={kept.settings.get(changed[0])}, but now it is "
                    f"{now[changed[0]]}. Use another --output, or repeat all with --again."
                )
            if not kept.error:
                results.append(kept)
                continue
        _progress(f"{framework} {name}: starting")
        more = ["--threads", tuned(given)] if (framework, name) == ("tensorflow", "single") else []
        results.append(run(given, framework, name, *more))
        with text_file(str(path)) as file:
            json.dump(asdict(results[-1]), file, indent=1)
        if results[-1].error:
            _progress(f"{framework} {name}: failed: {results[-1].error}")
    return results


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Compare the strategies, or run as one process of a strategy."""
    chosen = options()
    if chosen.child:
        table_size, fields, dim, hidden = chosen.sizes
        chosen.sizes = strategies.Sizes(table_size, fields, dim, tuple(hidden), chosen.batch_size)
        chosen.devices = 1 if chosen.child == "single" else chosen.num_proc
        strategies.main(chosen)
        return 0
    chosen.output.mkdir(parents=True, exist_ok=True)
    opened(chosen)
    results = measured(chosen)
    texts = {"table.md": table(results), "advice.txt": advice(results)}
    for name, text in texts.items():
        (chosen.output / name).write_text(text)
    curves(results, chosen.output / "curves.svg")
    print(*texts.values(), f"In {chosen.output}: {', '.join([*texts, 'curves.svg'])}", sep="\n")
    return 1 if any(result.error for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
