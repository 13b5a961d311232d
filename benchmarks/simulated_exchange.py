"""Measure the exchange of gradients between hosts, and compare it with ``ringdance.tools.plan.simulator``.

What: this script creates hosts from network namespaces on this machine (it needs root, ``ip`` and ``sshd``;
see tests/hosts/hosts.py), with links limited to ``--rate``, and starts ``--slots`` ranks on each. They
exchange lists of gradients, all ready at the same time, through the engine. Each host counts the bytes that
its link sends. The same lists are simulated, at the rate without TCP's headers and with all hosts on this
machine's cores.

Why: a planner is only as good as its predictions.

How to read: a sample is the slowest rank's time. "of least" and "of median" are these times divided by the
simulated time: 1 if the prediction is right. Bytes are for the host that sends the most. Measured bytes
include headers. A rank that waits for a core slows down small lists, so measure them on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import cores, format_table, summarize, under_launcher
from shapes import resnet50

HERE = Path(__file__).resolve()
MARK = "samples: "
WARM_CALLS = 3
PAYLOAD = 1448 / 1514  # share of payload in an Ethernet frame with TCP
LISTS = {
    "161 of ResNet-50": [4 * math.prod(shape) for _, shape in resnet50(backward=True)],
    "one of 16 MiB": [16 << 20],
    "40 of 25 kB": [25_000] * 40,
    "one of 4 kB": [4096],
}


def sent_bytes() -> int:
    """Return the bytes that this host's links have sent."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(words[9]) for words in lines if words[0] != "lo:")


def rank(seconds: float) -> None:
    """Measure in a rank. Rank 0 prints the milliseconds and bytes per call by list, as JSON."""
    import numpy as np

    import ringdance.numpy as rd

    rd.init()
    from mpi4py import MPI

    comm, results = MPI.COMM_WORLD.Dup(), {}
    for name, sizes in LISTS.items():
        arrays = [np.ones(nbytes // 4, np.float32) for nbytes in sizes]
        samples: list[float] = []
        calls, sent, end = 0, 0, time.perf_counter() + seconds
        while comm.bcast(time.perf_counter() < end or calls < 2 * WARM_CALLS):
            comm.Barrier()
            before, start = sent_bytes(), time.perf_counter()
            rd.allreduce(arrays, op=rd.Average, name=name, out=arrays)
            took = comm.allreduce(1e3 * (time.perf_counter() - start), MPI.MAX)
            calls += 1
            if calls > WARM_CALLS:
                samples.append(took)
                sent += sent_bytes() - before
        most = comm.allreduce(sent / len(samples), MPI.MAX)
        results[name] = {"ms": samples, "bytes": most}
    if rd.rank() == 0:
        print(MARK + json.dumps(results), flush=True)
    rd.shutdown()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Create the hosts and run the job. Returns the results that rank 0 printed."""
    sys.path.insert(0, str(HERE.parents[1] / "tests" / "hosts"))
    from hosts import Hosts, why_not

    if why_not():
        raise SystemExit(f"simulated_exchange.py: cannot create hosts: {why_not()}")
    with tempfile.TemporaryDirectory(prefix="sim-") as directory:
        hosts = Hosts(Path(directory) / "net", arguments.hosts, rate=arguments.rate)
        try:
            names = ",".join(f"h{number + 1}:{arguments.slots}" for number in range(arguments.hosts))
            line = [sys.executable, "-m", "ringdance", "run", "--no-prefix", "-H", names]
            line += [sys.executable, str(HERE), "--seconds", str(arguments.seconds)]
            job = hosts.run("h1", *line, timeout=300.0)
        finally:
            hosts.down()
    marked = [text for text in job.stdout.splitlines() if text.startswith(MARK)]
    if job.returncode or not marked:
        raise SystemExit(f"simulated_exchange.py: exit code {job.returncode}\n{job.stdout}{job.stderr}")
    return json.loads(marked[0][len(MARK) :])


def main() -> None:
    """Start the measurement, or run as one of its ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=int, default=3, help="number of hosts (default 3)")
    add("--rate", type=int, default=1000, help="speed of each host's link in Mbit/s (default 1000)")
    add("--slots", type=int, default=1, help="ranks on each host (default 1)")
    add("--seconds", type=float, default=5.0, help="time for each list (default 5)")
    add("--json", type=Path, metavar="FILE", help="write the numbers to FILE as well")
    arguments = parser.parse_args()
    if under_launcher():
        rank(arguments.seconds)
        return
    from ringdance.tools.plan.simulator import Machine, simulate

    ranks = arguments.hosts * arguments.slots
    # All hosts are on this machine, so data sent from one host pass through the machine's cores twice.
    machine = Machine(
        bandwidth=arguments.rate * 1e6 / 8 * PAYLOAD, latency=50e-6, memory_bandwidth=4e9,
        stack_bandwidth=1.5e9, message_seconds=10e-6, chunk_seconds=20e-6,
        ranks_per_core=max(1.0, ranks / cores()), turn=0.0,
    )  # fmt: skip
    print(f"{ranks} ranks on {arguments.hosts} hosts at {arguments.rate} Mbit/s, on {cores()} cores")
    runs, rows = measure(arguments), []
    for name, sizes in LISTS.items():
        step = simulate(machine, arguments.hosts, arguments.slots, [(nbytes, 0.0) for nbytes in sizes], 0.0)
        one, sent = summarize(runs[name]["ms"]), runs[name]["bytes"]
        runs[name]["simulated ms"], runs[name]["simulated bytes"] = 1e3 * step.seconds, step.sent_bytes
        rows.append([
            name, str(one.count), *(f"{ms:.2f}" for ms in (one.least, one.median, one.p90)),
            f"{1e3 * step.seconds:.2f}", f"{one.least / 1e3 / step.seconds:.2f}",
            f"{one.median / 1e3 / step.seconds:.2f}", f"{sent / 1e6:.3f}", f"{step.sent_bytes / 1e6:.3f}",
        ])  # fmt: skip
    columns = ("calls", "least ms", "median", "p90", "simulated", "of least", "of median", "MB", "simulated")
    print(format_table(("gradients", *columns), rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({**vars(arguments), "json": None, "results": runs}))


if __name__ == "__main__":
    main()
