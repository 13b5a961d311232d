"""Copy a file with `ringdance hosts copy` to one host and to three, at 1 Gbit/s.

What: this script creates four hosts from network namespaces on this machine (it needs root, ``ip``, ``tc``
and ``sshd``; see tests/hosts/hosts.py), with links limited to ``--rate``. A file is copied from the first
host to the second with plain ssh, to the second with `ringdance hosts copy`, and to all three others.

Why: if hosts pass data on, the data use the sender's link only once, no matter how many hosts there are.

How to read: "x one" is the time as a multiple of our copy to one host. "x wire" is the time as a multiple of
the bound: the file's bytes at the link's rate without any headers. Each time includes starting Python and
ssh, and all hosts share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import format_table

HERE = Path(__file__).resolve()


def main() -> None:
    arguments = _parser().parse_args()
    sys.path.insert(0, str(HERE.parents[1] / "tests" / "hosts"))
    from hosts import Hosts, why_not

    if why_not():
        raise SystemExit(f"hosts_copy.py: cannot create hosts: {why_not()}")
    size = int(arguments.megabytes * 1e6)
    with tempfile.TemporaryDirectory(prefix="rdh-") as directory:
        source = Path(directory) / "file"
        with open(source, "wb") as file:
            for _ in range(int(arguments.megabytes)):
                file.write(os.urandom(1_000_000))
        hosts = Hosts(Path(directory) / "net", 4, rate=arguments.rate)
        try:
            copy = [sys.executable, "-m", "ringdance", "hosts", "copy", "-H"]
            contestants = {
                "ssh, one host": ["sh", "-c", f"ssh {hosts.names[1]} 'cat > /run/0' < {source}"],
                "copy, one host": [*copy, hosts.names[1], str(source), "/run/1"],
                "copy, three hosts": [*copy, ",".join(hosts.names[1:]), str(source), "/run/3"],
            }
            hosts.run(
                hosts.names[0], "sh", "-c", f"ssh -o StrictHostKeyChecking=accept-new {hosts.names[1]} true"
            )
            times = {name: _timed(hosts.line(hosts.names[0], *line)) for name, line in contestants.items()}
        finally:
            hosts.down()
    one, wire = times["copy, one host"], size * 8 / (arguments.rate * 1e6)
    rows = [(name, f"{t:.2f} s", f"{t / one:.2f}", f"{t / wire:.2f}") for name, t in times.items()]
    print(f"{size / 1e6:g} MB at {arguments.rate} Mbit/s; the wire's bound is {wire:.2f} s")
    print(format_table(("", "time", "x one", "x wire"), rows))
    if arguments.json:
        results = {"size": size, "rate_mbit": arguments.rate, "seconds": times, "wire_s": wire}
        arguments.json.write_text(json.dumps(results, indent=2))


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--megabytes", type=float, default=1000.0, metavar="N", help="size of the file (1000)")
    made.add_argument("--rate", type=int, default=1000, metavar="MBIT", help="link speed in Mbit/s (1000)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the times to FILE")
    return made


def _timed(line: list[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}: exit code {done.returncode}: {done.stderr}")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
