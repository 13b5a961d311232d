"""MXNet scripts as users write them for Horovod, and the scripts of the pages."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

pytest.importorskip("mxnet")

import mxnet as mx
import numpy as np
from doc_blocks import blocks
from script_jobs import LIMIT, ROOT, SCRIPTS, Outcome, run_each

from horovod.common import util

pytestmark = pytest.mark.limit(2 * LIMIT)


def trained(directory: Path, way: str, size: int, *words: str) -> Outcome:
    directory.mkdir()
    done = run_each(way, size, [str(SCRIPTS / "gluon_mnist.py"), *words], directory)
    assert done.code == 0, done.out + done.err
    assert set(done.of_ranks("equal: .*")) == {"equal: True"}
    return done


def test_two_ranks_train_as_one_process_with_the_double_batch(tmp_path: Path) -> None:
    """In the first pass, all parameters of a Gluon net get their shape and rank 0's values."""
    trained(tmp_path / "two", "horovodrun", 2, "--batch-size", "32", "--lr", "0.02")
    trained(tmp_path / "one", "alone", 1, "--batch-size", "64", "--lr", "0.04")
    two, first = (mx.nd.load(str(tmp_path / name / "mnist.params")) for name in ("two", "one"))
    assert len(two) == 6
    for name, array in first.items():
        np.testing.assert_allclose(two[name].asnumpy(), array.asnumpy(), rtol=0, atol=2e-4)


def test_the_script_of_the_page(tmp_path: Path) -> None:
    result = blocks(ROOT / "docs" / "tutorials" / "frameworks.md")
    (tmp_path / "train_mxnet.py").write_text(next(one.text for one in result if one.file == "train_mxnet.py"))
    done = run_each("mpiexec", 2, ["train_mxnet.py"], tmp_path)
    assert done.code == 0, done.out + done.err
    assert done.out.splitlines() == ["good fit: True"] * 2
    assert "model.params" in done.files()


def test_the_example(tmp_path: Path) -> None:
    done = run_each("mpiexec", 2, [str(ROOT / "examples" / "digits_mxnet.py")], tmp_path)
    assert done.code == 0, done.out + done.err
    assert "all 2 ranks hold the same weights: yes" in done.out
    assert done.one(r"test accuracy: ([\d.]+)%") > 95


def test_what_is_asked_of_the_build() -> None:
    assert util.extension_available("mxnet")
    assert not util.gpu_available("mxnet")
    done = run_each("alone", 1, ["-m", "horovod.runner.launch", "--check-build"], ROOT)
    assert "[X] MXNet" in done.out


def test_the_module_of_the_page(tmp_path: Path) -> None:
    page = ROOT / "docs" / "reference" / "mxnet.md"
    (tmp_path / "module.py").write_text(next(item.text for item in blocks(page) if item.language == "python"))
    done = run_each("mpiexec", 2, ["module.py"], tmp_path)
    assert done.code == 0, done.out + done.err


def test_the_rows_of_the_contract_name_tests_that_exist() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "dropin" / "contract"))
    import rows

    results = [row for row in rows.load() if row["part"] == "MXNet"]
    assert rows.mistakes(results, rows.collected(results)) == []


def test_the_names_are_horovod_s() -> None:
    """This checks names.toml for the module. The other frameworks' environment does not have MXNet."""
    path = ROOT / "compat" / "horovod" / "compare_names.py"
    names = SourceFileLoader("compare_names", str(path)).load_module()
    data, _ = names.load()
    assert names.compare({"horovod.mxnet": data["horovod.mxnet"]}, []) == []
