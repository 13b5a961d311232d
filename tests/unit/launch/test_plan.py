"""The plan is pure data: the command lines to start, for which MPI library and with which variables."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from ringdance.errors import LaunchError
from ringdance.host.system import machine
from ringdance.launch.hosts import HostFacts
from ringdance.launch.mpi import Mpi, family_of
from ringdance.launch.mpi.options import machine_file, session_environment
from ringdance.launch.plan import Plan, build_plan
from ringdance.launch.remote.shell import RemoteShell
from ringdance.launch.spec import JobSpec
from ringdance.settings.names import STARTED_BY

OPENMPI = Mpi("openmpi", "/env/bin/mpiexec", "test", 5)


_OF_SPEC = {field.name for field in fields(JobSpec)}


def plan(**changes: object) -> Plan:
    arguments = {"mpi": OPENMPI, "cores": 8, "environ": {}, **changes}
    job = {"ranks": 2} | {name: arguments.pop(name) for name in changes if name in _OF_SPEC}
    ssh = {name: arguments.pop(name) for name in ("method", "python") if name in arguments}
    spec = JobSpec(
        ["/env/bin/python", "train.py"], shell=RemoteShell(**ssh), **job,  # type: ignore[arg-type]
    )
    return build_plan(spec, **arguments)  # type: ignore[arg-type]


def test_openmpi_line_unbinds_and_yields() -> None:
    line = " ".join(plan(ranks=4).argv(["/a", "/tmp"], "77"))
    assert line.startswith("/env/bin/mpiexec --bind-to none --map-by slot --oversubscribe")
    assert " -n 4 " in line
    assert "--mca mpi_yield_when_idle 1" in line
    assert line.endswith(" /a:/tmp 77 /env/bin/python train.py")


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
    environ = {"OMPI_MCA_osc": "rdma", "PMIX_MCA_psec": "munge", "PMIX_MCA_gds": "hash", "PRTE_MCA_x": "1"}
    # HYDRA_FULL_ERROR belongs to Hydra, the configuration library
    environ |= {"HYDRA_IFACE": "eth0", "HYDRA_FULL_ERROR": "1"}
    made = plan(environ=environ)
    assert made.environ(environ).items() >= environ.items()
    assert made.forwarded(environ).items() >= environ.items()


def test_variables_of_a_job_around_this_one_are_removed() -> None:
    old = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_FD": "9", "OMPI_MCA_btl": "tcp", "HOME": "/h"}
    old[STARTED_BY] = "{}"
    environ = plan(environ=old).environ(old)
    assert {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", STARTED_BY}.isdisjoint(environ)
    assert environ["OMPI_MCA_btl"] == "tcp"
    assert environ["HOME"] == "/h"


def test_where_torch_distributed_meets() -> None:
    assert dict(plan().environment)["MASTER_ADDR"] == "127.0.0.1"
    # rank 0's host, in the network that all hosts share
    assert dict(plan(**WIDE).environment)["MASTER_ADDR"] == "10.0.0.2"
    own = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert plan(environ=own).environ(own).items() >= own.items()
    nested = own | {"RINGDANCE_JOB": "0123456789abcdef"}  # these two belong to the outer job
    environ = plan(environ=nested).environ(nested)
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert "MASTER_PORT" not in environ


def test_session_files_go_with_the_job() -> None:
    environment = session_environment("openmpi", "/tmp/job", "/dev/shm/job")
    assert environment["PRTE_MCA_prte_tmpdir_base"] == "/tmp/job"
    assert environment["OMPI_MCA_osc_sm_backing_directory"] == "/dev/shm/job"
    # A shell reads this script, because a noexec /tmp would not allow executing it.
    environment = session_environment("mpich", "/tmp/job", "/dev/shm/job")
    assert environment == {"HYDRA_LAUNCHER_EXTRA_ARGS": "/tmp/job/ssh"}


def test_one_machine_under_several_names_is_one_host() -> None:
    made = plan(ranks=3, hosts=[("localhost", 2), ("me", 2)], local=("localhost", "me"))
    assert [(host.name, host.slots, host.ranks) for host in made.hosts] == [("localhost", 4, (0, 1, 2))]


def test_more_ranks_than_slots() -> None:
    with pytest.raises(LaunchError, match=r"have 4: localhost:4\. Use -np 4, or .*: -H localhost:5, slots=5"):
        plan(ranks=5, hosts=[("localhost", 4)])


WIDE = {
    "hosts": [("a", 2), ("me", 1), ("b", 4)],
    "ranks": 4,
    "local": ("me",),
    "facts": {
        "a": HostFacts(cores=16, devices=("H100", "H100"), networks=(("eth0", "10.0.0.2", 24),)),
        "me": HostFacts(cores=8, networks=(("eth0", "10.0.0.1", 24),)),
        "b": HostFacts(cores=4, networks=(("eth0", "10.0.0.3", 24),)),
    },
}


def test_several_hosts() -> None:
    made = plan(**WIDE)
    assert [(host.name, host.ranks, host.local) for host in made.hosts] == [
        ("a", (0, 1), False),
        ("me", (2,), True),
        ("b", (3,), False),
    ]
    assert made.threads == 4
    assert made.networks.include == ("10.0.0.0/24",)
    assert "2 x H100" in made.describe({})
    assert "me (here)" in made.describe({})


@pytest.mark.parametrize(
    ("mpi", "words"),
    [
        (OPENMPI, "--host a:2,me:1,b:1 --prtemca plm ssh --prtemca plm_ssh_agent /bin/sh RSH_SHIM"),
        (OPENMPI, "--prtemca prte_if_include eth0 -n 4"),
        (Mpi("openmpi", "m", "test", 4), "--mca plm rsh --mca plm_rsh_agent /bin/sh RSH_SHIM"),
        (Mpi("openmpi", "m", "test", 4), "--mca oob_tcp_if_include eth0 -n 4"),
        (Mpi("openmpi", "m", "test", 4), "--map-by seq --oversubscribe"),
        (
            Mpi("openmpi", "m", "test", 4),
            "--hostfile RSH_SHIM.machines --mca orte_default_hostfile RSH_SHIM.machines",
        ),
        (
            Mpi("mpich", "m", "test"),
            "-launcher rsh -launcher-exec /bin/sh -genvnone -hosts a:2,me:1,b:1 -iface eth0 -n 4",
        ),
        (
            Mpi("intel", "m", "test"),
            "-bootstrap ssh -bootstrap-exec RSH_SHIM -genvnone -machinefile RSH_SHIM.machines -iface eth0 "
            "-n 4",
        ),
    ],
)
def test_lines_for_several_hosts(mpi: Mpi, words: str) -> None:
    line = " ".join(plan(**WIDE, mpi=mpi).argv())
    assert words in line
    assert "fork" not in line


def test_what_stands_in_the_file_of_machines() -> None:
    hosts = plan(**WIDE, mpi=OPENMPI).hosts
    assert machine_file(hosts, "intel") == "a:2\nme:1\nb:1\n"
    assert machine_file(hosts, "openmpi") == "a\na\nme\nb\n"  # a line for each rank, in rank order


def test_networks_that_the_user_excludes_replace_those_we_include() -> None:
    # Open MPI refuses to start with both variables.
    environ = plan(**WIDE, mpi_args=["-mca", "btl_tcp_if_exclude", "docker0"]).environ({})
    assert "OMPI_MCA_btl_tcp_if_include" not in environ
    assert "OMPI_MCA_btl_tcp_if_include" in plan(**WIDE).environ({})


def test_open_mpi_talks_tcp_between_hosts_unless_there_is_better() -> None:
    environment = dict(plan(**WIDE).environment)
    assert environment["OMPI_MCA_btl_tcp_links"] == "4"
    assert "tcp" not in environment["OMPI_MCA_btl"]
    assert environment["NCCL_SOCKET_IFNAME"] == environment["GLOO_SOCKET_IFNAME"] == "eth0"
    fast = {**WIDE, "facts": {**WIDE["facts"], "a": HostFacts(infiniband=True)}}  # type: ignore[dict-item]
    assert "OMPI_MCA_pml" not in dict(plan(**fast).environment)


def test_ipv6_networks_are_given_to_mpi_by_interface() -> None:
    facts = {name: HostFacts(networks=(("eth0", f"fd00::{name}", 64),)) for name in "ab"}
    wide = {"hosts": [("a", 1), ("b", 1)], "local": ("a",), "facts": facts}
    assert dict(plan(**wide).environment)["OMPI_MCA_btl_tcp_if_include"] == "eth0"
    other = {**wide, "facts": facts | {"b": HostFacts(networks=(("ens3", "fd00::b", 64),))}}
    assert "OMPI_MCA_btl_tcp_if_include" not in dict(plan(**other).environment)
    with pytest.raises(LaunchError, match=r"only IPv6 networks \(fd00::/64\), but MPICH's mpiexec supports"):
        plan(**wide, mpi=Mpi("mpich", "m", "test"))


def test_no_shared_memory_transport_where_a_host_has_no_room_for_it() -> None:
    facts: dict[str, HostFacts] = WIDE["facts"]
    room = {name: replace(host_facts, shared_memory=18 << 20) for name, host_facts in facts.items()}
    plain = dict(plan(**{**WIDE, "facts": room}).environment)["OMPI_MCA_btl"]
    assert "sm" not in plain
    made = plan(**{**WIDE, "facts": room | {"a": replace(room["a"], shared_memory=(18 << 20) - 1)}})
    assert dict(made.environment)["OMPI_MCA_btl"] == plain.replace("^", "^sm,vader,")
    assert made.notes[0].startswith("/dev/shm on a has 17 MiB free, less than the 18 MiB that openmpi needs")
    assert made.notes[0] in made.describe()


def test_an_ipv6_address_has_another_name_towards_mpiexec() -> None:
    made = plan(hosts=[("fe80::1", 2)], local=())
    assert "--host host0:2" in " ".join(made.mpiexec)
    host = made.host_of("host0")
    assert host
    assert host.name == "fe80::1"
    assert made.host_of("fe80::1") is None


@pytest.mark.parametrize(
    ("devices", "variable", "count"),
    [
        (4, None, 4),
        (4, "", 0),
        (4, "2, 3", 2),
        (4, "0,-1,1", 1),
        (4, "0,4,1", 1),
        (1, "MIG-a,MIG-b,GPU-c", 3),
        (0, "0,1", 0),
    ],
)
def test_gpus_that_ranks_see(devices: int, variable: str | None, count: int) -> None:
    facts = HostFacts(devices=["H100"] * devices, visible_devices=variable)
    assert list(facts.visible) == ["H100"] * count


def test_a_variable_that_is_given_decides_which_gpus_all_hosts_show() -> None:
    four = HostFacts(devices=["H100"] * 4)
    facts = {"a": four, "b": replace(four, visible_devices="0,1")}
    two = {"hosts": [("a", 4), ("b", 2)], "ranks": 6, "local": ("a",), "facts": facts}
    assert [len(host.devices) for host in plan(**two).hosts] == [4, 2]
    asked = plan(**two, exports={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert [len(host.devices) for host in asked.hosts] == [4, 4]


def test_gpus_are_counted_by_their_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        f"/proc/driver/nvidia/gpus/{n}/information": f"Model: \t\t NVIDIA H{n}00\nDevice Minor: \t {n}\n"
        for n in (1, 2)
    }
    for files, names in ((["/dev/nvidia2"], ["NVIDIA H200"]), ([], ["NVIDIA H100", "NVIDIA H200"])):
        paths = {"/proc/driver/nvidia/gpus/*/information": [*texts], "/dev/nvidia[0-9]*": files}
        monkeypatch.setattr(machine.glob, "glob", paths.get)
        monkeypatch.setattr(machine.linux, "text", texts.get)
        assert machine.devices() == names


def test_what_is_a_machines_own_is_not_forwarded() -> None:
    own = {"PATH": "/bin", "MY_SECRET": "s", "TMPDIR": "/run", "HOSTNAME": "a", "CUDA_VISIBLE_DEVICES": "0"}
    own |= {
        "SLURM_PROCID": "0",
        "KUBERNETES_PORT": "1",
        "NVIDIA_VISIBLE_DEVICES": "",
        "HOME": "/h",
        "BASH_FUNC_x%%": "()",
    }
    found = plan(**WIDE, environ=own, exports={"TMPDIR": "/mine"}).forwarded(own)
    assert {"PATH", "MY_SECRET", "OMP_NUM_THREADS", "TMPDIR"} <= found.keys()
    assert found["TMPDIR"] == "/mine"
    assert {"HOSTNAME", "CUDA_VISIBLE_DEVICES", "SLURM_PROCID", "KUBERNETES_PORT", "HOME"}.isdisjoint(found)
    assert not any(name.startswith(("NVIDIA_", "BASH_FUNC_")) for name in found)


def test_what_srun_must_not_have_reaches_the_ranks() -> None:
    environ = {"SLURM_CPUS_PER_TASK": "4", "SLURM_PROCID": "0", "SRUN_CPUS_PER_TASK": "4", "SLURM_GPUS": "2"}
    for forward in (True, False):
        forwarded = plan(**WIDE, environ=environ, forward=forward, method="srun").forwarded(environ)
        assert {name: forwarded.get(name) for name in environ} == environ | {"SLURM_PROCID": None}
    assert "SLURM_CPUS_PER_TASK" not in plan(**WIDE, environ=environ).forwarded(environ)


def test_secrets_are_in_no_plan() -> None:
    made = plan(**WIDE, environ={"DB_PASSWORD": "hunter2"}, exports={"API_TOKEN": "tok-123"})
    text = made.describe({"DB_PASSWORD": "hunter2"})
    assert "hunter2" not in text
    assert "tok-123" not in text
    assert "DB_PASSWORD" in text
    assert "API_TOKEN" in text
    assert not any("tok-123" in word or "hunter2" in word for word in made.argv())
    assert made.environ({"DB_PASSWORD": "hunter2"})["API_TOKEN"] == "tok-123"


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
    options = ["-bind-to", "none", "-mca", "btl", "tcp,self", "-x", "HOME", "-np"]
    made = plan(mpi_args=options)
    assert " ".join(made.mpiexec).endswith("--bind-to none --mca btl tcp,self -x HOME -np -n 2")
    assert "OMPI_MCA_btl" not in dict(made.environment)
    assert "OMPI_MCA_pml" in dict(made.environment)


def test_no_ranks() -> None:
    with pytest.raises(LaunchError, match="at least 1"):
        plan(ranks=0)


def test_a_plan_can_be_printed_and_compared() -> None:
    made = plan()
    assert made == plan()
    assert "localhost  2      0-1    8" in made.describe()


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


def test_interfaces_of_different_names_are_given_as_a_network() -> None:
    facts = {**WIDE["facts"], "b": HostFacts(networks=(("ens3", "10.0.0.3", 24),))}  # type: ignore[dict-item]
    made = plan(**{**WIDE, "facts": facts})
    assert dict(made.environment)["OMPI_MCA_btl_tcp_if_include"] == "10.0.0.0/24"
    assert "NCCL_SOCKET_IFNAME" not in dict(made.environment)
    assert "-iface" not in plan(**{**WIDE, "facts": facts}, mpi=Mpi("mpich", "m", "test")).mpiexec
