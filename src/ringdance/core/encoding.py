"""How members tell each other of their requests: JSON, since a pickle can run code on whoever reads it."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from typing import Any

from ringdance.core.request import Collective, Description, ReduceOp

__all__ = ["decode_call", "decode_misses", "encode_call", "encode_misses"]

Call = tuple[str, tuple[Description, str | None] | None]


def encode_misses(items: Sequence[tuple[str, Description]]) -> bytes:
    """Encode names with their descriptions."""
    return _dump([[name, _fields(description)] for name, description in items])


def decode_misses(data: bytes) -> list[tuple[str, Description]]:
    """Decode what ``encode_misses`` made. Raises ValueError for anything else."""
    try:
        return [(_text(name), _description(fields)) for name, fields in json.loads(data)]
    except (TypeError, ValueError) as error:
        raise _malformed(data) from error


def encode_call(name: str, own: tuple[Description, str | None] | None) -> bytes:
    """Encode what this member submitted under a name, with why it was refused; None if it has joined."""
    return _dump([name, None if own is None else [_fields(own[0]), own[1]]])


def decode_call(data: bytes) -> Call:
    """Decode what ``encode_call`` made. Raises ValueError for anything else."""
    try:
        name, own = json.loads(data)
        if own is None:
            return _text(name), None
        fields, refusal = own
        return _text(name), (_description(fields), None if refusal is None else _text(refusal))
    except (TypeError, ValueError) as error:
        raise _malformed(data) from error


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=operator.index).encode()  # NumPy's integers too


def _fields(d: Description) -> list[Any]:
    return [d.kind, d.dtypes, d.shapes, d.operation, d.prescale, d.postscale, d.root, d.detail]


def _description(fields: Any) -> Description:
    kind, dtypes, shapes, operation, prescale, postscale, root, detail = fields
    return Description(
        Collective(kind),
        tuple(map(_text, dtypes)),
        tuple(tuple(map(operator.index, shape)) for shape in shapes),
        ReduceOp(operation),
        float(prescale),
        float(postscale),
        operator.index(root),
        tuple(map(operator.index, detail)),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value


def _malformed(data: bytes) -> ValueError:
    return ValueError(f"another rank sent what is no request: {bytes(data[:200])!r}")
