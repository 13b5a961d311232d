"""Horovod's names and signatures: the list in the repository matches exactly, and its page is up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("horovod")

DIRECTORY = Path(__file__).parents[3] / "compat" / "horovod"


@pytest.fixture(scope="module")
def names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_names", DIRECTORY / "compare_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_name_agrees(names: ModuleType) -> None:
    data, absent = names.load()
    assert names.compare(data, absent) == []
    assert sum(len(names.names_of(section)) for section in data.values()) > 100


def test_the_page_is_current(names: ModuleType) -> None:
    assert names.page(*names.load()) == names.PAGE.read_text(), f"run {DIRECTORY}/compare_names.py --write"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"functions": {"join": "device"}}, "the default of device is -1"),
        ({"functions": {"join": "device=-1.0"}}, "the default of device is -1"),
        ({"functions": {"poll": "handles"}}, "the parameters are (handle), expected (handles)"),
        ({"functions": {"broadcast_": "root_rank, tensor, name=None, process_set=None"}}, "parameters are"),
        ({"functions": {"poll": "*, handle"}}, "handle is positional or keyword, expected keyword-only"),
        ({"functions": {"barrier": "process_set=Average"}}, "the default of process_set is ProcessSet("),
        ({"functions": {"ProcessSet": "ranks_or_comm"}}, "is not a function"),
        ({"classes": {"poll": "handle"}}, "is not a class"),
        ({"functions": {"pole": "handle"}}, "is missing"),
        ({"classes": {"ProcessSet.size": "self, other"}}, "parameters are"),
        ({"values": {"Average": 1}}, "is 0, expected 1"),
        ({"values": {"Average": False}}, "is 0, expected False"),
        ({"exceptions": {"HorovodInternalError": ["KeyError"]}}, "no subclass of KeyError"),
        ({"objects": {"Average": "str"}}, "is a int"),
        ({"also_in": {"horovod.torch.functions": ["poll"]}}, "is missing"),
        ({"also_in": {"horovod.common.basics": ["__name__"]}}, "is not the one of horovod.torch"),
        ({"functions": {"poll": ""}, "signatures": {"poll": "handle"}}, "without an explanation"),
        ({"differences": {"poll": "none"}}, "is explained, but not listed"),
    ],
)
def test_a_difference_is_found(names: ModuleType, section: dict[str, Any], message: str) -> None:
    problems = names.compare({"horovod.torch": section}, [])
    assert len(problems) == 1
    assert message in problems[0]


def test_an_absent_module_that_is_there_is_found(names: ModuleType) -> None:
    assert names.compare({}, ["horovod.torch"]) == [
        "horovod.torch can be imported, but is listed as absent"
    ]
