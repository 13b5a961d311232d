"""The list of checks in Horovod's tests: every test that it names exists, and its page is up to date."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("horovod")

DIRECTORY = Path(__file__).parents[2] / "dropin" / "contract"


@pytest.fixture(scope="module")
def rows() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract_rows", DIRECTORY / "rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_check_names_tests_that_exist_or_a_reason(rows: ModuleType) -> None:
    loaded = rows.here(rows.load())
    assert rows.mistakes(loaded, rows.collected(loaded)) == []


def test_every_check_names_functions_that_exist(rows: ModuleType) -> None:
    """This check does not import frameworks. Collecting the tests with their parameters would."""
    for where, check in rows.checks(rows.load()):
        for test in check.get("tests", []):
            file, _, name = test.partition("[")[0].partition("::")
            assert f"def {name}(" in (rows.TESTS / file).read_text(), where


def test_no_test_of_the_original_is_left_out(rows: ModuleType) -> None:
    counts: Counter[str] = Counter()
    for row in rows.load():
        if not row["name"].endswith(".py"):  # the list also has smaller files of Horovod's tests
            counts[row["part"]] += row["count"]
    assert counts["PyTorch"] == 115
    assert counts["TensorFlow"] == 143


def test_every_test_of_the_folder_is_named(rows: ModuleType) -> None:
    checks = [check for _, check in rows.checks(rows.load())]
    named = {test.partition("[")[0] for check in checks for test in check.get("tests", [])}
    there = {
        f"dropin/contract/{path.name}::{line[4:].partition('(')[0]}"
        for path in DIRECTORY.glob("test_*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def test_")
    }
    beyond = {name for name in there if "test_torch_mismatch.py" in name}
    assert there - named - beyond == set()


def test_the_page_is_current(rows: ModuleType) -> None:
    assert rows.page(rows.load()) == rows.PAGE.read_text(), f"run {DIRECTORY}/rows.py --write"


@pytest.mark.parametrize(
    ("checks", "message"),
    [
        ([], "no checks"),
        ([{"says": "x"}], "neither a test nor a difference"),
        ([{"says": "", "difference": "d"}], "['difference', 'says']"),
        ([{"says": "x", "tests": ["f.py::test_other"]}], "no test f.py::test_other"),
        ([{"says": "x", "test": ["f.py::test_one"], "difference": "d"}], "['difference', 'says', 'test']"),
        ([{"says": "x", "tests": ["f.py::test_one"], "gpu": "also"}], "has a form for a GPU"),
        ([{"says": "x", "tests": ["f.py::test_one"], "gpu": "perhaps"}], "gpu = 'perhaps'"),
    ],
)
def test_mistakes_are_found(rows: ModuleType, checks: list[Any], message: str) -> None:
    mistakes = rows.mistakes([{"part": "P", "name": "n", "count": 1, "checks": checks}], {"f.py::test_one"})
    assert any(message in mistake for mistake in mistakes), mistakes
