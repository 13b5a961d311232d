"""Encode requests for other members as JSON, because unpickling could run arbitrary code."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from typing import Any

from ringdance.core.request import Collective, Description, ReduceOp

# The description of a request, and the reason why its call was refused (None if it was accepted).
Call = tuple[Description, str | None]


def encode_misses(items: Sequence[tuple[str, Description]]) -> bytes:
    """Encode cache misses: names with their descriptions."""
    return _encode([[name, _fields(description)] for name, description in items])


def decode_misses(data: bytes) -> list[tuple[str, Description]]:
    """Decode the result of ``encode_misses``."""
    return [(str(name), _description(fields)) for name, fields in json.loads(data)]


def encode_call(name: str, call: Call | None) -> bytes:
    """Encode what this member submitted under a name. ``call`` is None if it has joined."""
    return _encode([name, None if call is None else [_fields(call[0]), call[1]]])


def decode_call(data: bytes) -> tuple[str, Call | None]:
    """Decode the result of ``encode_call``."""
    name, call = json.loads(data)
    return str(name), None if call is None else (_description(call[0]), call[1])


def _encode(value: Any) -> bytes:
    # item() converts NumPy scalars.
    return json.dumps(value, separators=(",", ":"), default=operator.methodcaller("item")).encode()


def _fields(d: Description) -> list[Any]:
    scales = d.prescale, d.postscale
    return [d.kind, d.dtypes, d.shapes, d.operation, *scales, d.root, d.detail, d.pattern, d.device]


def _description(fields: list[Any]) -> Description:
    kind, dtypes, shapes, operation, prescale, postscale, root, detail, pattern, device = fields
    return Description(
        Collective(kind), tuple(dtypes), tuple(map(tuple, shapes)), ReduceOp(operation),
        float(prescale), float(postscale), root, tuple(detail), str(pattern), str(device),
    )  # fmt: skip
