"""`ringdance run` over ssh on simulated hosts."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hosts import Hosts
from jobs import ENV_INIT, PLACES, TRAINING

pytestmark = pytest.mark.limit(300)
ROOT = Path(__file__).resolve().parents[2]
RUN = (sys.executable, "-m", "ringdance", "run")


@pytest.fixture
def places(tmp_path: Path) -> str:
    (tmp_path / "places.py").write_text(PLACES)
    return str(tmp_path / "places.py")


def test_ranks_are_where_the_plan_says(three_hosts: Hosts, places: str) -> None:
    done = three_hosts.run("h1", *RUN, "-H", "h2:2,h1:2,h3:1", "--no-check", "python", places)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0]<h2> h2 0 5 0 2 0 3 10",
        "[1]<h2> h2 1 5 1 2 0 2 10",
        "[2]<h1> h1 2 5 0 2 1 3 10",
        "[3]<h1> h1 3 5 1 2 1 2 10",
        "[4]<h3> h3 4 5 0 1 2 3 10",
    ]
    assert done.stderr == ""
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]


def test_the_launchers_host_need_not_have_ranks(three_hosts: Hosts, places: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h2 slots=2\n10.83.7.3 slots=2 # h3\n")
    done = three_hosts.run("h1", *RUN, "--hostfile", str(tmp_path / "hosts"), "-np", "3", "python", places)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[1] for line in done.stdout.splitlines()) == ["h2", "h2", "h3"]


def test_training_on_numpy_arrays(three_hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    line = [*RUN, "-H", "h1:2,h2:2,h3:2", "python", str(tmp_path / "training.py")]
    done = three_hosts.run("h1", *line, timeout=200.0)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"of 6: loss", done.stdout)) == 6
    assert len(set(re.findall(r"loss (\S+)", done.stdout))) == 1
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]


def test_training_over_three_hosts(three_hosts: Hosts) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    script = str(ROOT / "examples" / "digits_torch.py")
    done = three_hosts.run("h1", *RUN, "-H", "h1:2,h2:2,h3:2", "python", script, timeout=200.0)
    assert done.returncode == 0, done.stderr
    accuracy = re.findall(r"accuracy\D*([\d.]+)", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[-1]) > 0.9 or float(accuracy[-1]) > 90.0


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
def test_torch_distributed_meets_at_rank_0s_host(three_hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ENV_INIT)
    line = [*RUN, "-H", "h2:1,h1:2", "--no-check", "python", str(tmp_path / "program.py")]
    done = three_hosts.run("h1", *line)
    assert done.returncode == 0, done.stderr
    lines = {line.partition("> ")[2] for line in done.stdout.splitlines()}
    assert len(lines) == 1
    assert lines.pop().startswith(f"6.0 {three_hosts.address['h2']} ")


def test_a_function_on_three_hosts(three_hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "call.py").write_text(
        "import ringdance\n"
        "def where(start):\n"
        "    import os\n"
        "    return os.uname().nodename, start + int(os.environ['RINGDANCE_RANK'])\n"
        "print(ringdance.run(where, args=(5,), np=3, hosts='h1:1,h2:1,h3:1'))\n"
    )
    done = three_hosts.run("h1", sys.executable, str(tmp_path / "call.py"))
    assert done.stdout == "[('h1', 5), ('h2', 6), ('h3', 7)]\n", done.stderr


def test_horovodrun(three_hosts: Hosts, places: str) -> None:
    pytest.importorskip("horovod")
    line = [sys.executable, "-m", "horovod.runner.launch", "-np", "4", "-H", "h1:2,h2:2"]
    done = three_hosts.run("h1", *line, "--network-interface", "eth0", "-p", "22", "python", places)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines())[2] == "[2]<stdout>:h2 2 4 0 2 1 2 6"


def test_much_output_from_another_host_comes_whole(three_hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("for n in range(200000): print(n, 'x' * 60)\n")
    done = three_hosts.run("h1", *RUN, "-H", "h2:1,h3:1", "python", str(tmp_path / "talk.py"), timeout=120.0)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank, host in enumerate(("h2", "h3")):
        mine = [line for line in lines if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}]<{host}> {n} {'x' * 60}" for n in range(200000)]


def test_secrets_are_in_no_argument_list(three_hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(
        "import os\n"
        "lines = [open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()]\n"
        "print(os.environ['MY_TOKEN'], os.environ['OTHER'], sum('tok-' + '123' in line for line in lines))\n"
    )
    done = three_hosts.run(
        "h1", *RUN, "-H", "h1:1,h2:1", "-x", "OTHER", "python", str(tmp_path / "look.py"),
        env={"MY_TOKEN": "tok-123", "OTHER": "tok-123"},
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == ["[0]<h1> tok-123 tok-123 0", "[1]<h2> tok-123 tok-123 0"], (
        done.stderr
    )


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ((), ["BUCKET", "HF_TOKEN", "RINGDANCE_CYCLE_TIME"]),
        (("--env", "none"), ["RINGDANCE_CYCLE_TIME"]),
        (("--env", "none", "-x", "CUDA_VISIBLE_DEVICES"), ["CUDA_VISIBLE_DEVICES", "RINGDANCE_CYCLE_TIME"]),
    ],
)
def test_which_variables_go_to_other_hosts(
    three_hosts: Hosts, tmp_path: Path, words: tuple[str, ...], there: list[str]
) -> None:
    own = {name: "7" for name in ("BUCKET", "HF_TOKEN", "RINGDANCE_CYCLE_TIME", "CUDA_VISIBLE_DEVICES")}
    (tmp_path / "look.py").write_text(f"import os\nprint(*sorted({set(own)} & os.environ.keys()))\n")
    line = [*RUN, "-H", "h1:1,h2:1", "--no-check", *words, "python", str(tmp_path / "look.py")]
    done = three_hosts.run("h1", *line, env=own)
    assert sorted(done.stdout.splitlines()) == [
        " ".join(["[0]<h1>", *sorted(own)]),
        " ".join(["[1]<h2>", *there]),
    ], done.stderr


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("h1:1,h9:1", r"host h9: ssh cannot connect: .*Could not resolve"),
        ("h1:1,10.83.7.99:1", r"host 10.83.7.99: ssh cannot connect"),
        ("h1:1,h2:1,10.83.7.2:1", r"host 10.83.7.2: it is host h2 by another name"),
        ("h1:1,h2:1,nowhere:2,h8:1", r"Cannot start:\n  host nowhere: .*\n  host h8: "),
    ],
)
def test_hosts_that_cannot_be_used(three_hosts: Hosts, places: str, hosts: str, words: str) -> None:
    done = three_hosts.run("h1", *RUN, "-H", hosts, "python", places)
    assert done.returncode == 2
    assert re.search(words, done.stderr), done.stderr
    assert done.stdout == ""
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]


def test_a_folder_that_one_host_does_not_have(three_hosts: Hosts, places: str) -> None:
    line = f"mkdir -p /run/here && cd /run/here && exec {' '.join(RUN)} -H h1:1,h2:1 python {places}"
    done = three_hosts.run("h1", "sh", "-c", line)
    assert done.returncode == 2
    assert "host h2: /run/here does not exist" in done.stderr, done.stderr


def test_the_plan_knows_the_hosts(three_hosts: Hosts, places: str) -> None:
    done = three_hosts.run("h1", *RUN, "-H", "h1:2,h2:2", "--dry-run", "python", places)
    rows = [line.split() for line in done.stdout.splitlines()]
    cores = str(len(os.sched_getaffinity(0)))
    assert ["h1", "(here)", "2", "0-1", cores, "-", "eth0"] in rows
    assert ["h2", "2", "2-3", cores, "-", "eth0"] in rows
    assert ["network:", "10.83.7.0/24"] in rows
