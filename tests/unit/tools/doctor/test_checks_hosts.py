"""Checks that compare hosts or test how they are reached.

Here, ``ssh`` is a program of the test that runs the command in a namespace. A host's answer is what the real
probes find there, and hosts can be made to differ.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from breaking import OTHER, SOURCE, breaks, distribution, need_namespaces, program
from test_checks_installed import SMI, SOUND

from ringdance.launch.remote.shell import RemoteShell
from ringdance.tools.doctor import examine as module
from ringdance.tools.doctor.check import Result, Usage
from ringdance.tools.doctor.examine import CHECKS, collect, examine
from ringdance.tools.hosts.host_set import HostSet

HOSTS = ("one", "two", "three")


def facts_of(
    names: Sequence[str], shell: RemoteShell, probes: Sequence[str], usage: Usage
) -> dict[str, dict[str, Any]]:
    with closing(HostSet(dict.fromkeys(names, 0), shell)) as hosts:
        hosts.connect(15.0)
        return collect(hosts, probes, usage, 60.0)


class Cluster:
    """Three hosts behind the test's own ``ssh``. A file per host has the commands that make it differ."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        need_namespaces("--uts")
        self.directory = directory
        program(
            directory / "ssh",
            # Arguments: ... -- HOST COMMAND. The command is one word, for the host's shell. Each host has its
            # own hostname.
            '[ "$NAMED" ] || NAMED=1 exec unshare --uts "$0" "$@"; unset NAMED\n'
            'while [ "$1" != -- ]; do shift; done; host=$2; command=$3\n'
            "echo $host >/proc/sys/kernel/hostname\n"
            f'[ -e {directory}/$host.local ] || exec sh -c "$command"\n'
            f'. {directory}/$host.local\n',
        )  # fmt: skip
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

    def odd(self, host: str, shell: str) -> None:
        """Run these lines of shell on a host instead of the command, which is in ``$command``."""
        (self.directory / f"{host}.local").write_text(shell + "\n")

    def facts(self, check: str, usage: Usage = OTHER) -> dict[str, dict[str, Any]]:
        probes = [probe for probe in CHECKS[check].needs if probe != "reach"]
        return facts_of(HOSTS, RemoteShell(), probes, usage)

    def wrong(self, check: str, usage: Usage = OTHER) -> list[Result]:
        results = examine(self.facts(check, usage), usage, [check])
        for result in results:
            assert "\n" not in result.text + result.fix
        return [result for result in results if result.wrong]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


@breaks("reached")
@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("ssh: Could not resolve hostname two: Name or service not known", "/etc/hosts"),
        ("ssh: connect to host two port 22: Connection refused", "-p PORT"),
        ("ssh: connect to host two port 22: Connection timed out", "ssh -v -o BatchMode=yes two true"),
        ("me@two: Permission denied (publickey,password)", "ssh-copy-id two"),
        ("Host key verification failed.", "ssh two true"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "-R two"),
        ("No ED25519 host key is known for two and you have requested strict checking.", "ssh-keyscan two"),
        ("no such thing", "ssh two true"),
    ],
)
def test_a_host_that_cannot_be_reached(cluster: Cluster, words: str, fix: str) -> None:
    assert cluster.wrong("reached") == []
    cluster.odd("two", f"echo '{words}' >&2; exit 255")
    (result,) = cluster.wrong("reached")
    assert result.hosts == ("two",)
    assert words.splitlines()[-1].rstrip(".") in result.text
    assert fix in result.fix


def test_a_host_that_does_not_answer_in_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPARE_S", 3.0)
    site = cluster.directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")  # the agent does not load it
    cluster.odd("two", f'export PYTHONPATH={site}; exec sh -c "$command"')
    with closing(HostSet(dict.fromkeys(HOSTS, 0), RemoteShell())) as hosts:
        hosts.connect(15.0)
        facts = collect(hosts, ["limits"], Usage(), 0.1)
    assert "no answer within 3.1 s" in facts["two"]["reach"]["error"]
    assert "limits" in facts["one"]


@breaks("reached")
def test_the_doctor_cannot_start_there(cluster: Cluster) -> None:
    site = cluster.directory / "site"
    site.mkdir()
    (site / "ringdance.py").write_text("")
    cluster.odd("two", f'export PYTHONPATH={site}; exec sh -c "$command"')
    (result,) = cluster.wrong("reached")
    assert result.hosts == ("two",)
    assert "No module named 'ringdance.tools'" in result.text


def test_probes_end_with_their_agent(cluster: Cluster) -> None:
    site, pid = cluster.directory / "site", cluster.directory / "pid"
    site.mkdir()
    (site / "psutil.py").write_text(
        f"import os, time, pathlib\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(60)\n"
    )
    cluster.odd("two", f'export PYTHONPATH={site}; exec sh -c "$command"')
    hosts = HostSet({"two": 0}, RemoteShell())
    hosts.connect(15.0)
    with closing(hosts):
        request = json.dumps({"probes": ["network"], "usage": {}, "seconds": 60})
        hosts.send("two", {"task": "run", "argv": ["ringdance.tools.doctor.probe"], "input": request})
        until = time.monotonic() + 20
        while not (pid.exists() and pid.read_text()):
            assert time.monotonic() < until
            time.sleep(0.02)
    until = time.monotonic() + 10
    while Path(f"/proc/{pid.read_text()}").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Yield the port of a real sshd and the key that it accepts."""
    daemon = shutil.which("sshd") or "/usr/sbin/sshd"
    if not os.path.exists(daemon) or not shutil.which("ssh-keygen") or os.getuid():
        pytest.skip("needs root and an sshd")
    for name in ("host", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    shutil.copy(tmp_path / "key.pub", tmp_path / "authorized")
    port = 20000 + os.getpid() % 20000
    (tmp_path / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nAuthorizedKeysFile "
        f"{tmp_path}/authorized\n"
        "StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n"
        "PidFile none\nUsePAM no\n"
    )
    os.makedirs("/run/sshd", exist_ok=True)
    need_namespaces("--uts")  # with this machine's own hostname, it would count as this machine
    named = ["unshare", "--uts", "sh", "-ec", 'echo there >/proc/sys/kernel/hostname; exec "$@"', "sh"]
    process = subprocess.Popen(
        [*named, daemon, "-D", "-e", "-f", str(tmp_path / "config")], stderr=subprocess.DEVNULL
    )
    try:
        yield port, tmp_path / "key"
    finally:
        process.terminate()
        process.wait()


@breaks("reached")
def test_a_real_sshd(sshd: tuple[int, Path], tmp_path: Path) -> None:
    port, key = sshd
    arguments = ("-F", "none", "-o", f"UserKnownHostsFile={tmp_path}/known", "-o", "ConnectionAttempts=5")

    def outcome(shell: RemoteShell) -> str:
        facts = facts_of(["127.0.0.1"], shell, ["machine"], Usage())
        (result,) = examine(facts, Usage(), ["reached"])
        return f"{result.text} {result.fix}".strip()

    assert outcome(RemoteShell(port=port, identity=str(key), arguments=arguments)) == "reached"
    wrong = (*arguments, "-o", "IdentitiesOnly=yes")
    other = str(tmp_path / "host")
    assert "passwordless login fails" in outcome(RemoteShell(port=port, identity=other, arguments=wrong))
    assert "no sshd answers" in outcome(RemoteShell(port=1, identity=str(key), arguments=arguments))


@breaks("reached")
def test_no_interpreter_there(cluster: Cluster) -> None:
    cluster.odd("two", f'exec sh -c "$(echo "$command" | sed s,{sys.executable},/no/such/python,)"')
    (result,) = cluster.wrong("reached")
    assert result.hosts == ("two",)


@breaks("reached")
def test_no_ringdance_there(cluster: Cluster) -> None:
    cluster.odd("two", f'exec sh -c "$(echo "$command" | sed s,{SOURCE}/ringdance,/no/such/place,)"')
    (result,) = cluster.wrong("reached")
    assert result.hosts == ("two",)
    assert "has no ringdance in" in result.text


@breaks("reached")
def test_another_ringdance(cluster: Cluster) -> None:
    other = cluster.directory / "other"
    shutil.copytree(SOURCE / "ringdance", other, ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "__init__.py"
    init.write_text(re.sub('__version__ = ".*"', '__version__ = "0.0.1"', init.read_text()))
    cluster.odd("two", f'exec sh -c "$(echo "$command" | sed s,{SOURCE}/ringdance,{other},)"')
    (result,) = cluster.wrong("reached")
    assert (result.hosts, result.fix) == (("two",), "Install the same version on all hosts")
    assert "it has ringdance 0.0.1, but this machine" in result.text


@breaks("reached")
def test_another_python(cluster: Cluster) -> None:
    # Only one Python is installed here, so host two pretends to have another version.
    lie = "import platform;platform.python_version = lambda: chr(51) + chr(46) + chr(57);import sys;sys.path"
    cluster.odd("two", f'''exec sh -c "$(echo "$command" | sed "s,import sys;sys.path,{lie},")"''')
    (result,) = cluster.wrong("reached")
    assert "is Python 3.9 there" in result.text
    assert result.hosts == ("two",)


def test_a_login_that_prints(cluster: Cluster) -> None:
    cluster.odd("two", 'printf "Welcome to node two!"; exec sh -c "$command"')
    assert cluster.wrong("reached") == []


@breaks("reached")
def test_two_names_for_one_machine(cluster: Cluster) -> None:
    cluster.odd("two", 'echo one >/proc/sys/kernel/hostname; exec sh -c "$command"')
    (result,) = cluster.wrong("reached")
    assert result.hosts == ("two",)
    assert "it is host one by another name" in result.text


@breaks("same-nccl")
def test_another_nccl(cluster: Cluster) -> None:
    program(cluster.directory / "nvidia-smi", SMI.replace("$GPUS", SOUND))
    distribution(cluster.directory / "site", "nvidia-nccl-cu12", "0.1")
    assert cluster.wrong("same-nccl") == []
    cluster.odd("two", f'export PYTHONPATH={cluster.directory}/site; exec sh -c "$command"')
    (result,) = cluster.wrong("same-nccl")
    assert re.search("NCCL 0.1.* on two, but", result.text)  # PyTorch may have installed another NCCL


DIFFERENT = [
    ("same-system", 'exec setarch linux32 sh -c "$command"', "machine", "i686"),
    (
        "same-frameworks",
        'export PYTHONPATH=$D; exec sh -c "$command"',
        "python",
        "numpy 0.1 on two, but ",
    ),
    ("same-mpi", 'export PYTHONPATH=$D; exec sh -c "$command"', "python", "mpi4py 0.1 with"),
]


@pytest.mark.parametrize(("check", "shell", "probe", "says"), DIFFERENT, ids=[row[0] for row in DIFFERENT])
def test_a_host_that_differs(cluster: Cluster, check: str, shell: str, probe: str, says: str) -> None:
    for name in ("numpy", "mpi4py"):
        distribution(cluster.directory / "site", name, "0.1")
    assert cluster.wrong(check) == []
    cluster.odd("two", f"D={cluster.directory}/site; {shell}")
    assert any(says in result.text and result.hosts == ("two",) for result in cluster.wrong(check))


def namespaced(lines: str, *flags: str) -> str:
    flags = ("--mount", "--propagation", "private", *flags)
    need_namespaces(*flags)
    return f'exec unshare {" ".join(flags)} sh -ec \'{lines}; exec sh -c "$0"\' "$command"'


@breaks("working-folder")
def test_a_folder_that_is_not_shared(cluster: Cluster) -> None:
    here = cluster.directory / "work" / "logs"
    here.mkdir(parents=True)
    usage = Usage(hosts=HOSTS, cwd=str(here), directories=(str(here),))
    assert cluster.wrong("working-folder", usage) == []
    cluster.odd("two", namespaced(f"mount -t tmpfs none {here.parent}"))
    assert cluster.wrong("working-folder", usage)[0].hosts == ("two",)


def test_a_host_resolves_some_names_and_several_resolve_each() -> None:
    class Asked(HostSet):
        def ask(
            self, messages: Mapping[str, Mapping[str, Any]], payload: bytes = b"", timeout: float = 60.0
        ) -> dict[str, dict[str, Any]]:
            found.extend(json.loads(message["input"])["usage"]["hosts"] for message in messages.values())
            return {}

    for count, each in ((3, 3), (500, 17)):
        found: list[Sequence[str]] = []
        names = tuple(f"node{number}" for number in range(count))
        collect(Asked(dict.fromkeys(names, 0), RemoteShell()), ["network"], Usage(hosts=names), 1.0)
        assert {len(names) for names in found} == {each}
        assert set(Counter(name for names in found for name in names).values()) == {each}


@breaks("names-agree")
def test_names_that_mean_different_hosts(cluster: Cluster) -> None:
    for host, address in (("one", "10.0.0.3"), ("two", "10.0.0.3"), ("three", "10.0.0.4")):
        file = cluster.directory / f"{host}.names"
        known = "" if host == "two" else "10.0.0.1 one\n"
        file.write_text(f"127.0.0.1 localhost\n{known}10.0.0.2 two\n{address} three\n")
        cluster.odd(host, namespaced(f"mount --bind {file} /etc/hosts"))
    texts = [result.text for result in cluster.wrong("names-agree", Usage(hosts=HOSTS))]
    assert "the name one does not resolve on two" in texts
    (cluster.directory / "three.names").write_text(
        "127.0.0.1 localhost\n10.0.0.1 one\n10.0.0.9 two\n10.0.0.3 three\n"
    )
    texts = [result.text for result in cluster.wrong("names-agree", Usage(hosts=HOSTS))]
    assert any("two resolves to 10.0.0.9 on three" in text for text in texts), texts
