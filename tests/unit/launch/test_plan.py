"""The plan is pure data: what would be started, for which MPI, with which variables."""

from __future__ import annotations

import json

import pytest

from ringdance.errors import LaunchError
from ringdance.launch.mpi import Mpi, family_of
from ringdance.launch.plan import Plan, build_plan, session_environment

OPENMPI = Mpi("openmpi", "/env/bin/mpiexec", "test")


def plan(**changes: object) -> Plan:
    given = {"ranks": 2, "mpi": OPENMPI, "cores": 8, "environ": {}, **changes}
    return build_plan(["/env/bin/python", "train.py"], **given)  # type: ignore[arg-type]


def test_openmpi_line_unbinds_and_yields() -> None:
    line = " ".join(plan(ranks=4).argv("SOCK", "77"))
    assert line.startswith("/env/bin/mpiexec --bind-to none --map-by slot --oversubscribe")
    assert " -n 4 " in line
    assert "--mca mpi_yield_when_idle 1" in line
    assert line.endswith("SOCK 77 /env/bin/python train.py")


@pytest.mark.parametrize(
    ("family", "words"),
    [("mpich", "-bind-to none -launcher fork -n 3"), ("intel", "-bootstrap fork -n 3")],
)
def test_hydra_lines(family: str, words: str) -> None:
    made = plan(ranks=3, mpi=Mpi(family, "/env/bin/mpiexec", "test"))
    assert " ".join(made.mpiexec) == f"/env/bin/mpiexec {words}"
    assert "OMPI_MCA_osc" not in dict(made.environment)


def test_root_needs_permission() -> None:
    assert "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" not in dict(plan().environment)
    assert dict(plan(root=True).environment)["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(2, 8, 4), (3, 8, 2), (4, 2, 1), (1, 1, 1)])
def test_cores_are_shared_out(ranks: int, cores: int, threads: int) -> None:
    made = plan(ranks=ranks, cores=cores)
    assert made.threads == threads
    assert dict(made.environment)["OMP_NUM_THREADS"] == str(threads)


def test_the_users_own_thread_count_wins() -> None:
    made = plan(environ={"OMP_NUM_THREADS": "3"})
    assert made.threads is None
    assert made.environ({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    assert dict(plan(exports={"OMP_NUM_THREADS": "5"}).environment)["OMP_NUM_THREADS"] == "5"


def test_the_users_own_mpi_parameters_win() -> None:
    own = {"OMPI_MCA_osc": "rdma"}
    assert plan(environ=own).environ(own)["OMPI_MCA_osc"] == "rdma"


def test_variables_of_a_job_around_this_one_are_removed() -> None:
    own = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_FD": "9", "OMPI_MCA_btl": "tcp", "HOME": "/h"}
    environ = plan(environ=own).environ(own)
    assert {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD"}.isdisjoint(environ)
    assert environ["OMPI_MCA_btl"] == "tcp"
    assert environ["HOME"] == "/h"


def test_session_files_go_with_the_job() -> None:
    found = session_environment("openmpi", "/tmp/job", "/dev/shm/job")
    assert found["PRTE_MCA_prte_tmpdir_base"] == "/tmp/job"
    assert found["OMPI_MCA_osc_sm_backing_directory"] == "/dev/shm/job"
    assert session_environment("mpich", "/tmp/job", "/dev/shm/job") == {}


def test_one_machine_under_several_names_is_one_host() -> None:
    made = plan(ranks=3, hosts=[("localhost", 2), ("me", 2)], local=("localhost", "me"))
    assert [(host.name, host.slots, host.ranks) for host in made.hosts] == [("localhost", 4, (0, 1, 2))]


def test_more_ranks_than_slots() -> None:
    with pytest.raises(LaunchError, match="-np 5 needs 5 slots, but the hosts given have 4: localhost:4"):
        plan(ranks=5, hosts=[("localhost", 4)])


@pytest.mark.parametrize("hosts", [[("other", 4)], [("localhost", 1), ("other", 4)]])
def test_other_machines_are_refused(hosts: list[tuple[str, int]]) -> None:
    with pytest.raises(LaunchError, match="host 'other' is not this machine"):
        plan(hosts=hosts)


@pytest.mark.parametrize(
    ("family", "given", "words"),
    [
        ("openmpi", {"mpi_args": ["--bind-to", "core"]}, "--map-by slot --oversubscribe"),
        ("openmpi", {"binding": ["-bind-to", "core"]}, "--oversubscribe"),
        ("openmpi", {"binding": []}, "--oversubscribe"),
        ("mpich", {"mpi_args": ["-bind-to", "core"]}, "-launcher fork -bind-to core"),
    ],
)
def test_the_users_own_binding_replaces_ours(family: str, given: dict[str, object], words: str) -> None:
    line = " ".join(plan(mpi=Mpi(family, "/env/bin/mpiexec", "test"), **given).mpiexec)
    assert line.startswith(f"/env/bin/mpiexec {words}")
    assert line.count("bind-to") <= 1


def test_options_with_one_dash_are_spelt_as_open_mpi_5_wants_them() -> None:
    own = ["-bind-to", "none", "-mca", "btl", "tcp,self", "-x", "HOME", "-np"]
    made = plan(mpi_args=own)
    assert " ".join(made.mpiexec).endswith("--bind-to none --mca btl tcp,self -x HOME -np -n 2")
    assert "OMPI_MCA_btl" not in dict(made.environment)
    assert "OMPI_MCA_pml" in dict(made.environment)


def test_no_ranks() -> None:
    with pytest.raises(LaunchError, match="1 or more"):
        plan(ranks=0)


def test_a_plan_can_be_printed_and_compared() -> None:
    made = plan()
    assert made == plan()
    assert json.loads(made.to_json())["ranks"] == 2
    assert "ranks 0-1 (2 slots)" in made.describe()


@pytest.mark.parametrize(
    ("version", "family"),
    [
        ("Open MPI v5.0.11, package: ...", "openmpi"),
        ("mpiexec (OpenRTE) 4.1.4", "openmpi"),
        ("prterun (PRRTE) 3.0", "openmpi"),
        ("MPICH Version: 5.0.2", "mpich"),
        ("HYDRA build details:", "mpich"),
        ("Intel(R) MPI Library 2021.18 for Linux", "intel"),
        ("Fujitsu MPI", None),
    ],
)
def test_family_of(version: str, family: str | None) -> None:
    assert family_of(version) == family
