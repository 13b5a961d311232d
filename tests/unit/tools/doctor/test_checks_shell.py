"""Checks of what a shell sets: variables and limits."""

from __future__ import annotations

import pytest
from breaking import Machine, breaks, expect

VARIABLES = [
    ("threads", {"OMP_NUM_THREADS": "640"}, "OMP_NUM_THREADS=640 with 1 rank starts 640"),
    ("visible-devices", {"CUDA_VISIBLE_DEVICES": "777"}, "CUDA_VISIBLE_DEVICES=777, but"),
    ("interface-named", {"NCCL_SOCKET_IFNAME": "ib7"}, "NCCL_SOCKET_IFNAME=ib7, but this host"),
    ("interface-named", {"OMPI_MCA_btl_tcp_if_include": "eth77"}, "OMPI_MCA_btl_tcp_if_include=eth77, "
                                                                  "but this host"),
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
        "mpi-prefix", Machine(env={"OPAL_PREFIX": "/opt/other"}), "OPAL_PREFIX=/opt/other, but Open MPI is"
    )


@breaks("limit-address-space")
def test_a_limit() -> None:
    limits = {"RLIMIT_AS": 64 << 30}
    expect("limit-address-space", Machine(limits=limits), "the address space is limited to 64 GiB")
