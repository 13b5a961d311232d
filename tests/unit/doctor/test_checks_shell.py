"""Checks of what a shell sets: variables, limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from breaking import Machine, breaks, expect, program

from ringdance.doctor.check import Usage

_ROUTED = Usage(hosts=("node1", "node2"))

VARIABLES = [
    ("threads", {"OMP_NUM_THREADS": "640"}, "OMP_NUM_THREADS=640 with 1 rank makes 640"),
        ("unknown-settings", {"RINGDANCE_CYCEL_TIME": "2"}, "did you mean RINGDANCE_CYCLE_TIME"),
    ("unknown-settings", {"HOROVOD_FUSION_TRESHOLD": "2"}, "did you mean HOROVOD_FUSION_THRESHOLD"),
    ("setting-values", {"RINGDANCE_CYCLE_TIME": "soon"}, "RINGDANCE_CYCLE_TIME='soon'"),
    ("duplicate-openmp", {"KMP_DUPLICATE_LIB_OK": "TRUE"}, "two OpenMP libraries"),
    ("tf-config", {"TF_CONFIG": '{"cluster": {}}'}, 'TF_CONFIG={"cluster": {}} is set'),
    ("visible-devices", {"CUDA_VISIBLE_DEVICES": "777"}, "CUDA_VISIBLE_DEVICES=777, but"),
    ("proxies", {"http_proxy": "http://p:1"}, "does not name localhost"),
    ("interface-named", {"NCCL_SOCKET_IFNAME": "ib7"}, "NCCL_SOCKET_IFNAME=ib7, but the"),
    ("interface-named", {"OMPI_MCA_btl_tcp_if_include": "eth77"}, "OMPI_MCA_btl_tcp_if_include=eth77, "
                                                                  "but the"),
    ("pythonpath", {"PYTHONPATH": "/no/such/directory"}, "does not exist: /no/such/directory"),
    ("inside-a-job", {"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 of another"),
    ("mpi-library", {"MPI4PY_LIBMPI": "/no/libmpi.so"}, "finds no MPI library"),
    ("mpi-library", {"MPI4PY_LIBMPI": "/no/libmpi.so"}, "as MPI4PY_LIBMPI=/no/libmpi.so requires"),
    ("temporary-folder", {"TMPDIR": "/no/such"}, "TMPDIR=/no/such does not exist"),
    ("slurm-mpi", {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 tasks without"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "env", "says"), VARIABLES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_variable(check: str, env: dict[str, str], says: str) -> None:
    if check.startswith("mpi"):
        pytest.importorskip("mpi4py")
    expect(check, Machine(env=env), says)


@breaks("proxies")
def test_no_proxy_must_name_the_hosts() -> None:
    env = {"https_proxy": "http://user:secret@p:1", "no_proxy": "localhost,node1"}
    expect("proxies", Machine(env=env), "no_proxy does not name node2", usage=_ROUTED)
    facts = Machine(env=env).facts(["environment"])
    assert "secret" not in repr(facts)


@breaks("mpi-prefix")
def test_a_prefix_of_another_place() -> None:
    pytest.importorskip("mpi4py")
    facts = Machine().facts(["mpi"])
    if facts["mpi"]["family"] != "openmpi":
        pytest.skip("needs Open MPI")
    expect(
        "mpi-prefix", Machine(env={"OPAL_PREFIX": "/opt/other"}), "OPAL_PREFIX=/opt/other, but Open MPI is in"
    )


LIMITS = [
    ("limit-open-files", {"RLIMIT_NOFILE": 256}, "may open 256 files only"),
    ("limit-processes", {"RLIMIT_NPROC": 400}, "may have 400 processes"),
    ("limit-stack", {"RLIMIT_STACK": 1 << 20}, "the stack may have 1 MiB"),
    ("limit-address-space", {"RLIMIT_AS": 64 << 30}, "address space: 64 GiB only"),
    ("limit-file-size", {"RLIMIT_FSIZE": 1 << 30}, "size of files: 1 GiB only"),
    ("limit-cpu-time", {"RLIMIT_CPU": 1800}, "CPU time: 1800 s only"),
]


@pytest.mark.parametrize(
    ("check", "limits", "says"), LIMITS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_limit(check: str, limits: dict[str, int], says: str) -> None:
    expect(check, Machine(limits=limits), says)


@breaks("slurm-mpi")
def test_slurm_without_the_plugin(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    # Slurm writes the list to stderr, indented.
    program(tmp_path / "srun", "printf 'MPI plugin types are...\\n\\tnone\\n' >&2")
    program(tmp_path / "all" / "srun", "printf '\\tnone\\n\\tpmi2\\n\\tpmix\\n\\tpmix_v4\\n' >&2")
    path = os.environ["PATH"]
    sound = Machine(env={"PATH": f"{tmp_path}/all:{path}"})
    expect("slurm-mpi", Machine(env={"PATH": f"{tmp_path}:{path}"}), "srun offers none, but", sound=sound)
    other = Machine(env={"PATH": f"{tmp_path}/all:{path}", "SLURM_MPI_TYPE": "none"})
    expect("slurm-mpi", other, "SLURM_MPI_TYPE=none, but", sound=sound)
