"""Run a command on many hosts: time, and memory of the launcher and the agents.

What: this script puts a program named ssh first in PATH. The program starts the agent of each "host" on this
machine under another host name (it needs ``unshare``). A command then runs on all hosts, as with ``ringdance
explain -H``, with a soft limit of ``--files`` open files.

Why: the launcher's needs per host determine how many hosts it can manage.

How to read: the time is from start to end, with all agents on this machine's cores. "agent" is the memory of
an agent and its backup (PSS, which divides shared memory among the processes). "launcher" is the
growth of the launcher's memory per host. A real ssh client needs another 8 MiB, of which it shares all but
1.5 MiB with others.
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

SSH = """\
#!/bin/sh
while [ "$1" != "--" ]; do shift; done
exec unshare --map-root-user --uts /bin/sh -c 'hostname "h$1"; cd /; eval "exec $2"' ssh "$2" "$3"
"""
RUN = """\
import sys
from ringdance.host.schedulers.hostfile import parse_hosts
from ringdance.tools.hosts.host_set import of_hosts
from ringdance.launch.remote.shell import RemoteShell
hosts = of_hosts(parse_hosts(sys.argv[1]), RemoteShell())
hosts.connect(300.0)
# Agents run Python modules; timeit runs a statement, which runs the shell command.
statement = f"import os; assert os.system({sys.argv[2]!r}) == 0"
argv = ["timeit", "-n", "1", "-r", "1", statement]
answers = hosts.ask({host: {"task": "run", "argv": argv} for host in hosts.names}, timeout=3000.0)
hosts.close()
failed = [answer for answer in answers.values() if "1 loop" not in answer.get("output", "")]
sys.exit("; ".join(sorted({answer["problem"] or answer["output"] for answer in failed})) or 0)
"""
AGENT = b"host.agent.main"


def main() -> None:
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="rdm-") as directory:
        ssh = Path(directory, "ssh")
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        environ = {**os.environ, "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}", "TMPDIR": directory}
        first, last = (measure(hosts, arguments.files, environ) for hosts in (1, arguments.hosts))
    growth = (last["launcher"] - first["launcher"]) / max(1, last["hosts"] - first["hosts"])
    rows = [
        ("time", f"{last['seconds']:.1f} s", f"{last['seconds'] / last['hosts'] * 1e3:.0f} ms"),
        ("launcher", f"{last['launcher'] / 2**20:.0f} MiB", f"{growth / 1024:.0f} KiB"),
        ("agent", f"{last['agents'] / 2**20:.0f} MiB", f"{last['agents'] / last['hosts'] / 2**20:.1f} MiB"),
    ]
    print(f"{last['hosts']} hosts on {os.cpu_count()} cores, soft limit of open files {arguments.files}")
    print(format_table(("", "all", "each host"), rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(last, indent=2))


def measure(hosts: int, files: int, environ: dict[str, str]) -> dict[str, float]:
    """Run a command on ``hosts`` hosts twice: for the time, and for memory (bytes) while it waits."""
    # Addresses reserved for benchmarks (RFC 2544) need no name server.
    names = ",".join(f"198.18.{number // 250}.{number % 250 + 1}" for number in range(hosts))
    line = ["sh", "-c", f'ulimit -Sn {files}; exec "$@"', "sh", sys.executable, "-c", RUN, names]
    began = time.monotonic()
    done = subprocess.run([*line, "true"], env=environ, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"many_hosts.py: exit code {done.returncode}: {done.stdout}{done.stderr}")
    go_on = Path(environ["TMPDIR"], "go-on")
    go_on.unlink(missing_ok=True)
    waiting = f"touch {environ['TMPDIR']}/at-$(hostname); until [ -e {go_on} ]; do sleep 5; done"
    with subprocess.Popen([*line, waiting], env=environ, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and len(list(Path(environ["TMPDIR"]).glob("at-*"))) < hosts:
            time.sleep(0.2)
        agents = sum(_pss(pid) for pid in _agents())
        launcher = _pss(process.pid)
        go_on.touch()
    return {"hosts": hosts, "seconds": seconds, "agents": agents, "launcher": launcher}


def _agents() -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if AGENT in path.read_bytes() and b"unshare" not in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--hosts", type=int, default=500, metavar="N", help="number of hosts (500)")
    made.add_argument("--files", type=int, default=1024, metavar="N", help="soft limit of open files (1024)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    return made


if __name__ == "__main__":
    main()
