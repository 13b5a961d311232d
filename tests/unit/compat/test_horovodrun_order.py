"""Translate Horovod's arguments into a job: sizes, hosts, options for mpiexec, and messages."""

from __future__ import annotations

import importlib
import inspect
import time
from pathlib import Path

import pytest

import horovod
from horovod.runner import mpi_run
from horovod.runner.common.util import env, host_hash, hosts
from horovod.runner.common.util.hosts import HostInfo, SlotInfo
from horovod.runner.launch import parse_args
from horovod.runner.request import order_of, tell
from ringdance.errors import LaunchError
from ringdance.launch.prepare import prepare
from ringdance.launch.spec import JobSpec
from ringdance.settings import NO_EFFECT, SETTINGS, WARNED, load, without_effect


def order(*words: str) -> JobSpec:
    return order_of(parse_args([*words, "python", "train.py"]), ["python", "train.py"])


def said(*words: str) -> list[str]:
    args = parse_args([*words, "python", "train.py"])
    lines: list[str] = []
    tell(args, order_of(args, args.command), lines.append)
    return lines


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["-np", "2"], 2),
        (["-np", "2", "-H", "localhost:4"], 2),
        (["-H", "localhost:4"], 4),
        (["-np", "2", "-H", "localhost:1,127.0.0.1:1"], 2),
        (["-np", "2", "--min-np", "2", "-H", "localhost:4"], 4),
        (["-np", "2", "--min-np", "1", "--max-np", "3", "-H", "localhost:4"], 3),
        (["-np", "2", "--min-np", "2"], 2),
        (["--min-np", "2"], 2),
    ],
)
def test_number_of_processes(words, ranks):
    assert prepare(order(*words)).plan.ranks == ranks


def test_ranks_have_horovods_time_to_end():
    assert order("-np", "2").grace == 5.0
    with pytest.raises(LaunchError, match=r"--grace must be at least 0 and less than 1e9 seconds, got -1"):
        JobSpec(["x"], ranks=1, grace=-1.0).resolved()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "5", "-H", "localhost:4"], "-np 5 needs 5 slots, but the hosts given have 4"),
        (["-np", "5", "--min-np", "5", "-H", "localhost:4"], "-np 5 needs 5 slots"),
        (["-np", "2", "-H", "localhost"], "form HOST:SLOTS"),
        (["-np", "2", "-H", "no-such-host.invalid:2"], "host no-such-host.invalid: ssh cannot connect"),
        ([], "Specify -np N"),
    ],
)
def test_sizes_and_hosts_that_cannot_be(words, message):
    with pytest.raises(LaunchError, match=message):
        prepare(order(*words))


def script(directory: Path, text: str) -> str:
    path = directory / "discover.sh"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "more", "found"),
    [
        ("echo localhost:2\n", [], [("localhost", 2)]),
        ("echo localhost:2\necho\necho 127.0.0.1\n", ["--slots", "3"], [("localhost", 2), ("127.0.0.1", 3)]),
        ("echo localhost:2\necho localhost:2\n", [], [("localhost", 2)]),
    ],
)
def test_hosts_of_a_discovery_script(tmp_path, text, more, found):
    made = order("-np", "2", "--host-discovery-script", script(tmp_path, text), *more)
    assert made.hosts == found
    assert prepare(made).plan.ranks == sum(slots for _, slots in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo localhost\n", "pass --slots-per-host"),
        ("echo a:b:c\n", "form HOST:SLOTS"),
        ("echo broken >&2; exit 3\n", "exit code 3: broken"),
        ("", "prints no host"),
    ],
)
def test_discovery_scripts_that_fail(tmp_path, text, message):
    with pytest.raises(LaunchError, match=message):
        order("-np", "1", "--host-discovery-script", script(tmp_path, text))


def test_nothing_is_left_of_a_discovery_script(tmp_path):
    text = f"sleep 60 & echo $! > {tmp_path}/pid; wait\n"
    with pytest.raises(LaunchError, match="timed out"):
        order("-np", "1", "--start-timeout", "1", "--host-discovery-script", script(tmp_path, text))
    status, until = Path("/proc", (tmp_path / "pid").read_text().strip()), time.monotonic() + 5
    while status.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not status.exists()


def test_options_for_mpiexec():
    made = order("-np", "2", "--mpi-args=-x A='b c'", "--binding-args=-bind-to core")
    assert made.mpi_args == ["-x", "A=b c"]
    assert made.binding == ["-bind-to", "core"]
    assert order("-np", "2").binding is None
    with pytest.raises(ValueError, match="--mpi-args"):
        order("-np", "2", "--mpi-args='")


def test_interfaces_must_exist():
    assert order("-np", "1", "--network-interface", "lo").exports["NCCL_SOCKET_IFNAME"] == "lo"
    with pytest.raises(ValueError, match=r"'nothing0' does not exist here; there are: .*lo"):
        order("-np", "1", "--network-interfaces", "lo,nothing0")


def test_what_changes_nothing_is_said_once_for_each_reason(monkeypatch):
    monkeypatch.setenv("HOROVOD_CCL_CACHE", "1")
    words = ["-np", "2", "--autotune", "--autotune-bayes-opt-max-samples", "5", "--gloo", "--min-np", "1"]
    lines = said(*words)
    assert len(lines) == 4
    assert lines[0].startswith("--gloo: Gloo is not used")
    assert lines[1].startswith("--min-np: this job keeps the processes")
    assert lines[2].startswith("--autotune-bayes-opt-max-samples: no effect, ")
    assert lines[3].startswith("HOROVOD_CCL_CACHE=1: no effect, ")
    exports = order(*words).exports
    assert set(exports[WARNED].split(",")) == {
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "HOROVOD_CCL_CACHE",
    }  # fmt: skip


def test_ranks_do_not_repeat_what_has_been_said(recwarn):
    load({"HOROVOD_TORUS_ALLREDUCE": "1", "HOROVOD_CCL_CACHE": "1", WARNED: "HOROVOD_TORUS_ALLREDUCE"})
    assert [str(warning.message) for warning in recwarn] == [
        "HOROVOD_CCL_CACHE=1 has no effect: oneCCL is not used."
    ]


def test_nothing_is_said_of_what_works(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("params: {cycle_time_ms: 2}\n")
    words = [
        "--fusion-threshold-mb",
        "8",
        "--cache-capacity",
        "9",
        "--mpi",
        "--log-level",
        "debug",
        "--verbose",
    ]
    assert said("-np", "2", *words, "--stall-check", "--config-file", str(file), "-H", "localhost:2") == []
    file.write_text("params: {cycle_tme: 2}\n")
    (line,) = said("-np", "2", "--config-file", str(file))
    assert line.endswith("params.cycle_tme is not known and has no effect")


# Every variable that Horovod's runtime reads, with a value that differs from its default.
RUNTIME = {
    "FUSION_THRESHOLD": "1048576", "CYCLE_TIME": "2", "CACHE_CAPACITY": "16", "HIERARCHICAL_ALLREDUCE": "1",
    "HIERARCHICAL_ALLGATHER": "1", "TORUS_ALLREDUCE": "1", "AUTOTUNE": "1", "AUTOTUNE_LOG": "a.csv",
    "AUTOTUNE_WARMUP_SAMPLES": "4", "AUTOTUNE_STEPS_PER_SAMPLE": "11", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "21",
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.7", "TIMELINE": "DYNAMIC", "TIMELINE_MARK_CYCLES": "1",
    "STALL_CHECK_DISABLE": "1", "STALL_CHECK_TIME_SECONDS": "61", "STALL_SHUTDOWN_TIME_SECONDS": "90",
    "LOG_LEVEL": "info", "LOG_HIDE_TIME": "1", "THREAD_AFFINITY": "0,1", "MPI_THREADS_DISABLE": "1",
    "NUM_NCCL_STREAMS": "2", "BATCH_D2D_MEMCOPIES": "0", "ENABLE_ASYNC_COMPLETION": "1",
    "DISABLE_GROUP_FUSION": "1", "DISABLE_NVTX_RANGES": "1", "DYNAMIC_PROCESS_SETS": "1",
    "ENABLE_XLA_OPS": "1", "ADASUM_MPI_CHUNK_SIZE": "4096", "CCL_CACHE": "1", "GLOO_TIMEOUT_SECONDS": "31",
    "GLOO_IFACE": "eth0", "CPU_OPERATIONS": "GLOO", "CONTROLLER": "gloo",
}  # fmt: skip


@pytest.mark.parametrize("name", RUNTIME)
def test_every_variable_of_horovod_s_is_honoured_or_answered(name, recwarn):
    environ = {f"HOROVOD_{name}": RUNTIME[name]}
    settings = load(environ)
    lines = [str(warning.message) for warning in recwarn]
    if name in NO_EFFECT and name != "DYNAMIC_PROCESS_SETS":  # process sets can always be changed
        reason = NO_EFFECT[name][1]
        assert lines == [f"HOROVOD_{name}={RUNTIME[name]} has no effect: {reason}."]
        assert without_effect(environ) == [(f"HOROVOD_{name}", RUNTIME[name], reason)]
    else:
        changed = [s for s in SETTINGS if getattr(settings, s.name) != s.default]
        assert name in NO_EFFECT or [s.legacy for s in changed] == [f"HOROVOD_{name}"]
        assert lines == []
        assert without_effect(environ) == []


def test_hosts_for_scripts(tmp_path):
    assert hosts.parse_hosts("a:2,b.c-d:1") == [HostInfo("a", 2), HostInfo("b.c-d", 1)]
    assert HostInfo.from_string("a:2") == HostInfo("a", 2)
    for text in ("a", "a:", "a:x", "a:2 b:3", ""):
        with pytest.raises(ValueError, match="HOST:SLOTS"):
            hosts.parse_hosts(text)
    file = tmp_path / "hosts"
    file.write_text("# two\na slots=2\n\nb slots=1\n")
    assert hosts.parse_host_files(str(file)) == "a:2,b:1"
    file.write_text("a slots=\n")
    with pytest.raises(ValueError, match="line 1"):
        hosts.parse_host_files(str(file))


def test_places_of_ranks():
    assignments = hosts.get_host_assignments([HostInfo("a", 2), HostInfo("b", 2)], 4)
    assert assignments == [
        SlotInfo("a", rank=0, local_rank=0, cross_rank=0, size=4, local_size=2, cross_size=2),
        SlotInfo("a", rank=1, local_rank=1, cross_rank=0, size=4, local_size=2, cross_size=2),
        SlotInfo("b", rank=2, local_rank=0, cross_rank=1, size=4, local_size=2, cross_size=2),
        SlotInfo("b", rank=3, local_rank=1, cross_rank=1, size=4, local_size=2, cross_size=2),
    ]


def test_places_on_unequal_hosts():
    ranks = hosts.get_host_assignments([HostInfo("a", 1), HostInfo("b", 2)], 3)
    assert [
        (slot.hostname, slot.local_rank, slot.cross_rank, slot.local_size, slot.cross_size) for slot in ranks
    ] == [
        ("a", 0, 0, 1, 2),
        ("b", 0, 1, 2, 2),
        ("b", 1, 0, 2, 1),
    ]


def test_places_are_cut_at_the_most_that_is_wanted():
    three = [HostInfo("a", 2), HostInfo("b", 2)]
    assert [slot.hostname for slot in hosts.get_host_assignments(three, 2, 3)] == ["a", "a", "b"]
    assert {slot.size for slot in hosts.get_host_assignments(three, 2)} == {4}
    with pytest.raises(ValueError, match="only 4 slots"):
        hosts.get_host_assignments(three, 5)


def test_a_rank_s_numbers_in_the_environment():
    assert env.get_env_rank_and_size({}) == (0, 1)
    assert env.get_env_rank_and_size({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "3"}) == (2, 3)
    assert env.get_env_rank_and_size({"PMI_RANK": "1", "PMI_SIZE": "4"}) == (1, 4)


def test_variables_that_travel():
    assert [
        name
        for name in ("PATH", "BASH_FUNC_x%%", "OLDPWD", "CUDA_VISIBLE_DEVICES")
        if env.is_exportable(name)
    ] == ["PATH"]


def test_a_machine_is_told_from_others():
    assert host_hash.host_hash() == host_hash.host_hash()
    assert host_hash.host_hash("a") != host_hash.host_hash("b")


def test_the_signature_of_run():
    names = [
        "num_proc", "min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "hosts",
        "hostfile", "host_discovery_script", "start_timeout", "ssh_port", "ssh_identity_file",
        "disable_cache", "output_filename", "verbose", "use_gloo", "use_mpi", "mpi_args", "network_interface",
        "network_interfaces", "executable", "np", "min_np", "max_np",
    ]  # fmt: skip
    parameters = inspect.signature(horovod.run).parameters
    assert list(parameters) == ["func", "args", "kwargs", *names]
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert (defaults.pop("args"), defaults.pop("num_proc")) == ((), 1)
    assert defaults.pop("func") is inspect.Parameter.empty
    assert set(defaults.values()) == {None}


@pytest.mark.parametrize(
    ("module", "advice"),
    [("gloo_run", "horovod.run"), ("js_run", "mpiexec"), ("elastic", "horovod.torch.elastic")],
)
def test_modules_that_are_not_here_say_what_is(module, advice):
    with pytest.raises(ImportError, match=f"horovod.runner.{module} is not part of .*{advice}"):
        importlib.import_module(f"horovod.runner.{module}")


def test_the_library_is_known():
    libraries = [mpi_run.is_open_mpi(), mpi_run.is_mpich(), mpi_run.is_intel_mpi(), mpi_run.is_spectrum_mpi()]
    assert sum(libraries) == mpi_run.mpi_available() == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hosts": "localhost:2", "hostfile": "f"}, "hosts and hostfile exclude one another"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo and use_mpi exclude one another"),
        ({"num_proc": 0}, "num_proc=0 must be > 0"),
        ({"start_timeout": -1}, "start_timeout=-1 must be > 0"),
        ({"network_interfaces": "nothing0"}, "does not exist here"),
    ],
)
def test_run_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        horovod.run(print, **given)


@pytest.mark.parametrize("old", ["np", "min_np", "max_np"])
def test_older_names_of_run_s_parameters(old):
    with (
        pytest.warns(DeprecationWarning, match=f"{old} is deprecated"),
        pytest.raises(ValueError, match="must be > 0"),
    ):
        horovod.run(print, **{old: 0})
