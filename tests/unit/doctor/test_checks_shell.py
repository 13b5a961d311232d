"""Checks of what a shell sets: variables, limits."""

from __future__ import annotations

import pytest
from breaking import Machine, breaks, expect

VARIABLES = [
    ("threads", {"OMP_NUM_THREADS": "640"}, "OMP_NUM_THREADS=640 with 1 rank makes 640"),
        ("unknown-settings", {"RINGDANCE_CYCEL_TIME": "2"}, "did you mean RINGDANCE_CYCLE_TIME"),
    ("unknown-settings", {"HOROVOD_FUSION_TRESHOLD": "2"}, "did you mean HOROVOD_FUSION_THRESHOLD"),
    ("setting-values", {"RINGDANCE_CYCLE_TIME": "soon"}, "RINGDANCE_CYCLE_TIME='soon'"),
    ("visible-devices", {"CUDA_VISIBLE_DEVICES": "777"}, "CUDA_VISIBLE_DEVICES=777, but"),
    ("interface-named", {"NCCL_SOCKET_IFNAME": "ib7"}, "NCCL_SOCKET_IFNAME=ib7, but the"),
    ("interface-named", {"OMPI_MCA_btl_tcp_if_include": "eth77"}, "OMPI_MCA_btl_tcp_if_include=eth77, "
                                                                  "but the"),
    ("pythonpath", {"PYTHONPATH": "/no/such/directory"}, "does not exist: /no/such/directory"),
    ("mpi-library", {"MPI4PY_LIBMPI": "/no/libmpi.so"}, "finds no MPI library"),
    ("mpi-library", {"MPI4PY_LIBMPI": "/no/libmpi.so"}, "as MPI4PY_LIBMPI=/no/libmpi.so requires"),
    ("temporary-folder", {"TMPDIR": "/no/such"}, "TMPDIR=/no/such does not exist"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "env", "says"), VARIABLES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_variable(check: str, env: dict[str, str], says: str) -> None:
    if check.startswith("mpi"):
        pytest.importorskip("mpi4py")
    expect(check, Machine(env=env), says)


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
    ("limit-address-space", {"RLIMIT_AS": 64 << 30}, "address space: 64 GiB only"),
]


@pytest.mark.parametrize(
    ("check", "limits", "says"), LIMITS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_limit(check: str, limits: dict[str, int], says: str) -> None:
    expect(check, Machine(limits=limits), says)
