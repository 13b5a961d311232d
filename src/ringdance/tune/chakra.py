"""Write a step as execution traces of MLCommons Chakra, which simulators such as ASTRA-sim read.

A file for each rank, PREFIX.RANK.et: messages with their length before them as a varint, first the
GlobalMetadata, then the Nodes. chakra.textproto has what a step needs of the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ringdance.errors import LaunchError, optional

_COMPUTE, _COLLECTIVE = 4, 7  # of NodeType
_ALL_REDUCE = 0  # of CollectiveCommType


def write_step(
    directory: Path, gradients: Sequence[tuple[int, float]], step_seconds: float, ranks: int
) -> list[Path]:
    """Write the traces of one step of all ranks.

    Args:
        directory: gets step.RANK.et, and is made if it is not there.
        gradients: bytes, and seconds after the step's begin at which it is ready, in that order.
        step_seconds: computation of a step without exchanges.
        ranks: in the group of all.

    Returns:
        The files, by rank.

    Raises:
        LaunchError: protobuf is not installed.
    """
    kinds = _kinds()
    metadata = kinds["GlobalMetadata"](version="0.0.4")
    data = b"".join(_framed(one) for one in [metadata, *_nodes(kinds["Node"], gradients, step_seconds)])
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / f"step.{rank}.et" for rank in range(ranks)]
    for file in files:
        file.write_bytes(data)  # ranks are alike: a simulator knows a trace's rank by its name
    return files


def _nodes(kind: Any, gradients: Sequence[tuple[int, float]], step_seconds: float) -> Iterable[Any]:
    """Yield the nodes: computation up to a gradient, its all-reduce, ..., the rest, and the update."""
    number, last, began, exchanges = 1, list[int](), 0, list[int]()

    def compute(name: str, ended: int, after: Iterable[int]) -> Any:
        node = kind(id=number, name=name, type=_COMPUTE, data_deps=after)
        node.start_time_micros, node.duration_micros = began, ended - began
        node.attr.add(name="is_cpu_op", bool_val=False)
        return node

    for place, (size, ready) in enumerate(gradients):
        at = max(began, round(ready * 1e6))
        if at > began or not last:
            yield compute(f"compute until gradient {place}", at, last)
            last, began, number = [number], at, number + 1
        node = kind(id=number, name=f"all-reduce of gradient {place}", type=_COLLECTIVE, data_deps=last)
        node.start_time_micros = at
        node.attr.add(name="is_cpu_op", bool_val=False)
        node.attr.add(name="comm_type", int64_val=_ALL_REDUCE)
        node.attr.add(name="comm_size", int64_val=size)
        yield node
        exchanges.append(number)
        number += 1
    yield compute("update", max(began, round(step_seconds * 1e6)), [*last, *exchanges])


def _framed(message: Any) -> bytes:
    """Return a message with its length before it, as a varint."""
    data: bytes = message.SerializeToString()
    size, head = len(data), bytearray()
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + data


def _kinds() -> dict[str, Any]:
    """Return the schema's messages as classes."""
    why = "Chakra traces need protobuf"
    descriptor = optional("google.protobuf.descriptor_pb2", LaunchError, why, "protobuf")
    pool = optional("google.protobuf.descriptor_pool", LaunchError, why, "protobuf").DescriptorPool()
    factory = optional("google.protobuf.message_factory", LaunchError, why, "protobuf")
    text_format = optional("google.protobuf.text_format", LaunchError, why, "protobuf")
    schema = Path(__file__).with_name("chakra.textproto").read_text()
    file = text_format.Parse(schema, descriptor.FileDescriptorProto())
    pool.Add(file)
    found = {one.name: pool.FindMessageTypeByName(f"{file.package}.{one.name}") for one in file.message_type}
    return {name: factory.GetMessageClass(one) for name, one in found.items()}
