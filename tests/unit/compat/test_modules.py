"""Horovod's modules: their imports, the modules that are absent, and the helpers in ``horovod.common``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch.distributed

pytest.importorskip("horovod")

import horovod
import horovod.torch as hvd
import ringdance.errors
import ringdance.torch
from horovod.common import exceptions, util


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python process."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )


# as MXNet fails with a newer NumPy
@pytest.mark.parametrize("code", ["", "import types; types.no_such_name"])
def test_mxnet_that_cannot_be_imported_names_the_versions(tmp_path: Path, code: str) -> None:
    if not code and importlib.util.find_spec("mxnet"):
        pytest.skip("MXNet is installed")
    if code:
        (tmp_path / "mxnet.py").write_text(code)
    done = python("import horovod.mxnet", PYTHONPATH=str(tmp_path))
    last = done.stderr.splitlines()[-1]
    assert ("MXNet is not installed: " in last) is not bool(code)
    assert "MXNet 1.9.1, which needs Python 3.11 and NumPy below 1.24: use the extra `mxnet`" in last


@pytest.mark.parametrize(
    "names",
    [
        "horovod",
        "horovod.common.util, horovod.common.exceptions",
        "horovod.common.elastic",
        "horovod.runner.launch",
    ],
)
def test_no_framework_is_imported(names: str) -> None:
    done = python(
        f"import sys, {names}\n"
        "print([m for m in ('torch', 'tensorflow', 'keras', 'jax', 'mxnet', 'mpi4py') if m in sys.modules])"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_ranks_that_wait_for_each_other_are_only_warned_of() -> None:
    """Without importing Horovod's names, ranks that wait for each other raise DeadlockError."""
    ask = "from ringdance.training import session as s; s.init(); print(s.engine().settings.deadlock_time)"
    assert python(ask).stdout == "30.0\n"
    assert python(f"import horovod; {ask}").stdout == "0.0\n"
    assert python(f"import horovod; {ask}", RINGDANCE_DEADLOCK_TIME="7").stdout == "7.0\n"


def test_the_original_is_noticed(tmp_path: Path) -> None:
    """An installed Horovod is noticed, because its files mix with these, whichever was installed last."""
    directory = tmp_path / "horovod-0.28.1.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    done = python("import horovod.torch", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ImportError: horovod 0.28.1 and ringdance-horovod are both installed")
    assert "pip uninstall --yes horovod ringdance-horovod" in error


def test_the_version_compares_like_the_original_s() -> None:
    version = pytest.importorskip("packaging.version")
    assert version.Version("0.28.0") < version.Version(horovod.__version__) < version.Version("0.28.2")
    assert horovod.__version__.endswith(ringdance.__version__)
    assert {"run", "__version__"}.issubset(dir(horovod))
    with pytest.raises(AttributeError, match="'horovod' has no attribute 'torrch'"):
        _ = horovod.torrch  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("from horovod.spark.common.store import Store", "horovod.run(function"),
        ("from horovod.ray import ElasticRayExecutor", "RayExecutor(settings"),
    ],
)
def test_what_is_not_here_says_what_to_use(statement: str, advice: str) -> None:
    with pytest.raises(ImportError, match="is not part of ringdance-horovod") as caught:
        exec(statement)
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_those_of_ringdance() -> None:
    for name in ringdance.torch.__all__:
        expected = getattr(hvd.mpi_ops if name == "synchronize" else ringdance.torch, name)
        assert getattr(hvd, name) is expected
    assert hvd.elastic.run is ringdance.torch.elastic.run
    assert hvd.optimizer.__name__ == "horovod.torch.optimizer"


def test_errors_are_one_family() -> None:
    assert exceptions.HorovodInternalError is hvd.HorovodInternalError is ringdance.errors.CollectiveError
    for kind in (ringdance.errors.MismatchError, ringdance.errors.ShutDownError, ringdance.errors.StallError):
        assert issubclass(kind, hvd.HorovodInternalError)
    assert issubclass(ringdance.errors.NotInitializedError, (ValueError, hvd.HorovodInternalError))
    assert not issubclass(exceptions.HostsUpdatedInterrupt, hvd.HorovodInternalError)
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync is True
    assert exceptions.HostsUpdatedInterrupt().skip_sync is False
    mismatch = exceptions.HorovodVersionMismatchError("torch", "2.1", "2.0")
    assert (mismatch.name, mismatch.version, mismatch.installed_version) == ("torch", "2.1", "2.0")
    assert all(word in str(mismatch) for word in ("torch", "2.1", "2.0"))


def test_built_before_init() -> None:
    for module in (hvd, hvd.mpi_ops, hvd.mpi_ops._basics):
        assert module.mpi_built() is True
        assert module.gloo_enabled() is False
        assert not any([module.ddl_built(), module.ccl_built(), module.cuda_built(), module.rocm_built()])
        assert type(module.nccl_built()) is int
    assert (hvd.nccl_built() > 0) is torch.distributed.is_nccl_available()


def test_gloo_is_built_where_scripts_find_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts take HOROVOD_RANK as a sign of Gloo. Both horovodrun and ``init()`` set it."""
    modules = (hvd, hvd.mpi_ops, hvd.mpi_ops._basics, util)
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    assert not any(module.gloo_built() for module in modules)
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert all(module.gloo_built() for module in modules)


def test_what_is_available(capsys: pytest.CaptureFixture[str]) -> None:
    assert util.extension_available("torch")
    installed = importlib.util.find_spec("tensorflow") is not None
    assert util.extension_available("tensorflow") is installed
    assert not util.extension_available("caffe", verbose=True)
    assert "not available" in capsys.readouterr().out
    assert util.extension_available("mxnet") is (importlib.util.find_spec("mxnet") is not None)
    assert util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2") is None
    with pytest.raises(ImportError, match=r"horovod\.caffe is not available"):
        util.check_extension("horovod.caffe", "HOROVOD_WITH_CAFFE", __file__, "mpi_lib")
    assert util.gpu_available("tensorflow") is False
    assert (util.mpi_built(), util.nccl_built(verbose=True)) == (True, torch.distributed.is_nccl_available())


def test_environment_for_a_while() -> None:
    os.environ["RD_ONE"] = "before"
    with util.env(RD_ONE=None, RD_TWO="2"):
        assert "RD_ONE" not in os.environ
        assert os.environ["RD_TWO"] == "2"
    assert os.environ.pop("RD_ONE") == "before"
    assert "RD_TWO" not in os.environ


def test_small_helpers() -> None:
    assert util.split_list([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2, 3], [4, 5], [6, 7]]
    assert util.split_list([], 2) == [[], []]
    assert [n for n in range(-1, 20) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]
    assert util.is_iterable(()) is True
    assert util.is_iterable(3) is False
    assert util.is_version_greater_equal_than("2.13.0+cpu", "2.9.1")
    assert not util.is_version_greater_equal_than("1.9.0", "1.10.0")
    with pytest.raises(ValueError, match=r"1\.2\.3"):
        util.is_version_greater_equal_than("newest", "1.0.0")
    calls: list[int] = []
    remembered = util._cache(lambda n: calls.append(n) or n)
    assert [remembered(1), remembered(1), remembered(2)] == [1, 1, 2]
    assert calls == [1, 2]
