"""Traces for simulators, read by a reader of the wire format and by a second, complete description."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from ringdance.tune.chakra import write_step

# Field numbers as of schema/protobuf/et_def.proto, mlcommons/chakra 6dc63e1.
NODE = {1: "id", 2: "name", 3: "type", 4: "ctrl_deps", 5: "data_deps", 6: "start", 7: "duration", 10: "attr"}
ATTRIBUTE = {1: "name", 9: "int64_val", 27: "bool_val"}


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size, at = varint(data, at)
        yield data[at : at + size]
        at += size


def fields(data: bytes, names: dict[int, str]) -> dict[str, list[Any]]:
    """Read a message by the wire format alone: varints, and bytes with their length before them."""
    found: dict[str, list[Any]] = defaultdict(list)
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        value: Any
        if tag & 7 == 0:
            value, at = varint(data, at)
        else:
            assert tag & 7 == 2
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        found[names[tag >> 3]].append(value)
    return found


def unpacked(parts: list[Any]) -> list[int]:
    """Return repeated integers, which proto3 packs."""
    found = []
    for data in parts:
        at = 0
        while at < len(data):
            value, at = varint(data, at)
            found.append(value)
    return found


def test_a_step_is_compute_and_all_reduce_nodes_with_their_dependencies(tmp_path: Path) -> None:
    gradients = [(4000, 0.05), (800_000, 0.05), (12, 0.09)]
    files = write_step(tmp_path / "traces", gradients, 0.1, 3)
    assert [file.name for file in files] == ["step.0.et", "step.1.et", "step.2.et"]
    assert len({file.read_bytes() for file in files}) == 1
    metadata, *rest = messages(files[0].read_bytes())
    assert fields(metadata, {1: "version", 2: "attr"})["version"] == [b"0.0.4"]
    nodes = [fields(data, NODE) for data in rest]
    by_id = {node["id"][0]: node for node in nodes}
    assert len(by_id) == len(nodes) == 6  # two computations, three all-reduces, the update
    computes = [node for node in nodes if node["type"] == [4]]
    exchanges = [node for node in nodes if node["type"] == [7]]
    assert [node["duration"][0] for node in computes] == [50_000, 40_000, 10_000]
    sizes = []
    for node in exchanges:
        attributes = {one["name"][0]: one for one in (fields(data, ATTRIBUTE) for data in node["attr"])}
        assert attributes[b"comm_type"]["int64_val"] == [0]
        assert attributes[b"is_cpu_op"]["bool_val"] == [0]
        sizes += attributes[b"comm_size"]["int64_val"]
        (before,) = unpacked(node["data_deps"])
        assert by_id[before]["type"] == [4]
        assert by_id[before].get("start", [0])[0] + by_id[before]["duration"][0] == node["start"][0]
    assert sizes == [4000, 800_000, 12]
    last = set(unpacked(computes[-1]["data_deps"]))
    assert {node["id"][0] for node in exchanges} < last
    seen: set[int] = set()
    for node in nodes:  # simulators read a file from its begin
        assert set(unpacked(node["data_deps"])) <= seen
        seen.add(node["id"][0])
