"""Detect hosts and slots from the environment variables that job schedulers set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringdance.errors import LaunchError
from ringdance.host.schedulers.allocation import Allocation
from ringdance.host.schedulers.detect import detect, left_idle
from ringdance.host.schedulers.slurm import counts, expand, of_a_step, step
from ringdance.launch.remote.shell import RemoteShell
from ringdance.launch.spec import JobSpec


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("a[08-11,20],b,c[1]-x", ["a08", "a09", "a10", "a11", "a20", "b", "c1-x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_slurm_names(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["a[1-2", "a[x]", "a[1-b]"])
def test_slurm_names_that_are_none(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_JOB_NODELIST"):
        expand(text)


def test_slurm_counts() -> None:
    assert counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(LaunchError):
        counts("2(y3)")


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "PATH": "/nowhere"}


@pytest.mark.parametrize(
    ("more", "slots"),
    [
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"}, [2, 2, 1]),
        ({"SLURM_NTASKS_PER_NODE": "4"}, [4, 4, 4]),
        ({"SLURM_TASKS_PER_NODE": "32(x3)", "SLURM_GPUS_ON_NODE": "8"}, [8, 8, 8]),
        ({"SLURM_GPUS_PER_NODE": "a100:2"}, [2, 2, 2]),
        ({}, [1, 1, 1]),
    ],
)
def test_a_slurm_allocation(more: dict[str, str], slots: list[int]) -> None:
    allocation = detect({**SLURM, **more})
    assert allocation
    assert list(allocation.hosts) == list(zip(["n1", "n2", "n3"], slots, strict=True))
    assert (allocation.source, allocation.method) == ("Slurm job 7", "ssh")


def test_a_step_is_not_confined_to_one_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job step drops the variables that would confine srun to one task (Slurm 22.05 and later).

    Source: the man pages of srun.
    """
    names = (
        "CPUS_PER_TASK", "TRES_PER_TASK", "GPUS_PER_TASK", "GPUS_PER_SOCKET", "CPUS_PER_GPU", "GPUS",
        "NTASKS_PER_GPU", "MEM_PER_CPU", "NTASKS_PER_CORE", "THREADS_PER_CORE", "GPU_BIND", "TRES_BIND",
        "HINT", "EXACT", "LABELIO", "STDOUTMODE",
    )  # fmt: skip
    sizes = {f"SLURM_{name}": "1" for name in names}
    kept = {**SLURM, "SLURM_CONF": "/c", "SLURM_GPUS_PER_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": "8"}
    sizes["SRUN_CPUS_PER_TASK"] = "1"
    assert of_a_step({**kept, **sizes}) == sizes
    assert not [word for word in step("n2", ["x"], kept) if "gres" in word]

    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\n[ \"$*\" = '--details show job 7' ] || { echo no controller >&2; exit 1; }\n"
        "echo 'JobId=7 ArrayJobId=7 ArrayTaskId=2 JobName=x'\n"
        "echo '   JOB_GRES=gpu:a100:5'\n"
        "echo '     Nodes=n[1-2] CPU_IDs=0-3 Mem=0 GRES=gpu:a100:2(IDX:0-1),nic:1(IDX:0)'\n"
        "echo '     Nodes=n3 CPU_IDs=0-3 Mem=0 GRES='\n"
        "echo; echo 'JobId=70 ArrayJobId=7 ArrayTaskId=1 JobName=x'\n"
        "echo '     Nodes=n[1-3] CPU_IDs=4-7 Mem=0 GRES=gpu:a100:4(IDX:2-5)'\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    words = step("n2", ["x", "y"], {**kept, **sizes})
    assert words[-3:] == ["--gres=gpu:a100:2,nic:1", "x", "y"]
    assert not [word for word in step("n3", ["x"], {**kept, **sizes}) if "gres" in word]
    for host in ("n1", "n2"):
        words = step(host, ["x"], {**kept, **sizes, "SLURM_JOB_ID": "8"})
        assert "gres" not in " ".join(words)
    assert capsys.readouterr().err.count("show job 8: no controller. Ranks might not see all GPUs") == 1


def test_a_slurm_allocation_that_contradicts_itself() -> None:
    with pytest.raises(LaunchError, match="3 nodes"):
        detect({**SLURM, "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"})


def test_srun_reaches_the_nodes_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    allocation = detect({**SLURM, "PATH": str(tmp_path)})
    assert allocation
    assert allocation.method == "srun"


@pytest.mark.parametrize(
    ("name", "text", "more"),
    [
        ("OMPI_MCA_orte_default_hostfile", "w-0.j.ns.svc slots=2\nw-1.j.ns.svc slots=2\n", {}),
        ("I_MPI_HYDRA_HOST_FILE", "w-0.j.ns.svc:2\nw-1.j.ns.svc:2\n", {}),
        ("HYDRA_HOST_FILE", "w-0.j.ns.svc\nw-1.j.ns.svc\n", {"I_MPI_PERHOST": "2"}),
    ],
)
def test_the_launcher_pod_of_an_mpijob(tmp_path: Path, name: str, text: str, more: dict[str, str]) -> None:
    path = tmp_path / "hostfile"
    path.write_text(text)
    environ = {
        name: str(path),
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }
    allocation = detect({**environ, **more})
    assert allocation
    assert list(allocation.hosts) == [("w-0.j.ns.svc", 2), ("w-1.j.ns.svc", 2)]
    assert list(allocation.ssh_arguments) == ["-o", "ConnectionAttempts=10"]
    assert allocation.start_timeout > 0
    assert name in allocation.source


def test_sagemaker() -> None:
    environ = {"SM_HOSTS": json.dumps(["algo-1", "algo-2"]), "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "0"}
    allocation = detect(environ)
    assert allocation
    assert allocation == Allocation(
        [("algo-1", 1), ("algo-2", 1)], "SageMaker", start_timeout=300.0, start=allocation.start
    )
    parameters = json.dumps({"sagemaker_mpi_num_of_processes_per_host": 3})
    allocation = detect({**environ, "SM_HPS": "{}", "SM_FRAMEWORK_PARAMS": parameters, "SM_NUM_GPUS": "8"})
    assert allocation
    assert list(allocation.hosts) == [("algo-1", 3), ("algo-2", 3)]
    with pytest.raises(LaunchError, match="SM_HOSTS"):
        detect({**environ, "SM_HOSTS": "algo-1"})


def test_only_sagemaker_s_first_host_starts_ranks_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MPI, SageMaker's toolkit runs the script on every host."""
    monkeypatch.setenv("SM_HOSTS", json.dumps(["algo-1", "algo-2"]))
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    assert JobSpec(["x"]).resolved().ranks == 2
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    for ranks in (None, 2):
        with pytest.raises(LaunchError, match=r"this is algo-2 of algo-1, algo-2: .*--processes-per-host"):
            JobSpec(["x"], ranks=ranks).resolved()
    assert JobSpec(["x"], hosts=[("localhost", 2)]).resolved().ranks == 2


@pytest.mark.parametrize(
    "more",
    [
        {"LSB_MCPU_HOSTS": "batch5 1 n1 4 n2 2"},
        {"LSB_HOSTS": "batch5 n1 n1 n1 n1 n2 n2"},
        {"LSB_MCPU_HOSTS": "n1 4 n2 2"},
    ],
)
def test_lsf(more: dict[str, str]) -> None:
    allocation = detect({"LSB_JOBID": "9", **more})
    assert allocation
    assert (list(allocation.hosts), allocation.source) == ([("n1", 4), ("n2", 2)], "LSF job 9")


def test_a_batch_node_is_left_out_where_the_others_have_more_slots() -> None:
    allocation = detect({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "batch1 1 batch2 1 batch3 1"})
    assert allocation
    assert [name for name, _ in allocation.hosts] == ["batch1", "batch2", "batch3"]


def test_lsf_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("n1\nn1\nn2\n")
    allocation = detect({"LSB_JOBID": "9", "LSB_DJOB_HOSTFILE": str(path)})
    assert allocation
    assert list(allocation.hosts) == [("n1", 2), ("n2", 1)]


@pytest.mark.parametrize(
    "environ",
    [{}, {"SLURM_JOB_NODELIST": "n1"}, {"SM_HOSTS": "[]"}, {"LSB_JOBID": "1"},
     {"LSB_JOBID": "1", "LSB_HOSTS": " "}, {"HYDRA_HOST_FILE": "/no"}],
)
def test_a_plain_machine(environ: dict[str, str]) -> None:
    assert detect(environ) is None


def test_the_program_that_reaches_pods(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("w1 slots=2\n")
    named = {"OMPI_MCA_orte_default_hostfile": str(tmp_path / "hostfile"), "OMPI_MCA_plm_rsh_args": "-q"}
    allocation = detect({**named, "OMPI_MCA_plm_rsh_agent": "/usr/bin/ssh -p 2222"})
    assert allocation
    assert list(allocation.ssh_arguments) == ["-p", "2222", "-q"]
    with pytest.raises(LaunchError, match=r"OMPI_MCA_plm_rsh_args=-o 'x: No closing quotation"):
        detect({**named, "OMPI_MCA_plm_rsh_args": "-o 'x"})
    with pytest.raises(LaunchError, match="An old MPIJob"):
        detect({**named, "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh"})


def test_hosts_picked_from_a_job_are_reached_as_the_job_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostfile").write_text("w1 slots=2\nw2 slots=2\n")
    monkeypatch.setenv("OMPI_MCA_orte_default_hostfile", str(tmp_path / "hostfile"))
    monkeypatch.setenv("OMPI_MCA_plm_rsh_args", "-p 2222")
    picked = JobSpec(["x"], hosts=[("w2", 1)]).resolved()
    assert (picked.hosts, picked.ranks) == ([("w2", 1)], 1)
    assert list(picked.shell.arguments) == ["-p", "2222"]
    assert picked.shell.start_timeout > 0
    others = JobSpec(["x"], hosts=[("w2", 1), ("elsewhere", 1)]).resolved()
    assert (list(others.shell.arguments), others.shell.start_timeout) == ([], 0.0)
    monkeypatch.delenv("OMPI_MCA_orte_default_hostfile")
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    for name, value in {**SLURM, "PATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert JobSpec(["x"], hosts=[("n2", 1)]).resolved().shell.method == "srun"
    assert JobSpec(["x"], hosts=[("n2", 1)], shell=RemoteShell(port=22)).resolved().shell.method == "ssh"


BATCH = {**SLURM, "SLURM_PROCID": "0"}
LSF = {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "a 4 b 4"}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}


@pytest.mark.parametrize(
    ("environ", "idle"),
    [
        (BATCH, 3),
        ({**BATCH, "SLURM_STEP_NUM_TASKS": "1"}, 0),  # srun --ntasks=1
        ({**BATCH, "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "8"}, 0),
        ({**BATCH, "SLURM_JOB_NODELIST": "n[1-"}, 0),  # `ringdance run` reports the error
        (SLURM, 0),  # a shell that salloc started
        (LSF, 2),
        ({**LSF, "LSB_INTERACTIVE": "Y"}, 0),
        (SAGEMAKER, 2),
        ({**SAGEMAKER, "SM_HOSTS": '["algo-1"]'}, 0),
        ({}, 0),
    ],
)
def test_hosts_that_a_lone_process_leaves_idle(environ: dict[str, str], idle: int) -> None:
    allocation = left_idle(environ, launched=False)
    assert len(allocation.hosts if allocation else []) == idle
    assert not left_idle(environ, launched=True)


def test_ranks_in_the_launcher_s_pod_leave_the_workers_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI 5 does not read the variable in which MPI operators pass the host file."""
    file = tmp_path / "hostfile"
    file.write_text("job-worker-0.job.ns.svc slots=8\n")
    environ = {"OMPI_MCA_orte_default_hostfile": str(file)}
    monkeypatch.setattr("socket.gethostname", lambda: "job-launcher")
    for pod in ({"K_MPI_JOB_ROLE": "launcher"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}):
        for launched in (True, False):
            assert left_idle({**environ, **pod}, launched)
    assert not left_idle(environ, False)  # a host file that the user wrote
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert not left_idle({**environ, "OMPI_MCA_plm_rsh_args": "-o 'x", **pod}, False)  # cannot be parsed
    for own in ("localhost", "127.0.0.1"):
        file.write_text(f"{own} slots=8\n")
        for launched in (True, False):
            assert not left_idle({**environ, **pod}, launched)
    file.write_text("job-worker-0.job.ns.svc slots=8\n")
    monkeypatch.setattr("socket.gethostname", lambda: "job-worker-0")
    assert not left_idle({**environ, **pod}, True)
