"""Messages of mismatch errors, which are raised if ranks submit different requests under one name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ringdance.core.labels import quoted, tensors_of
from ringdance.core.request import Collective, Description
from ringdance.core.transport.base import Identity
from ringdance.errors import UNEVEN_STEPS


def _shape(description: Description) -> str:
    free_first = description.kind in (Collective.ALLGATHER, Collective.ALLTOALL)
    shown = []
    for shape in description.shapes:
        dims = (["*"] if free_first else []) + [str(length) for length in shape]
        shown.append("(" + ", ".join(dims) + ("," if len(dims) == 1 else "") + ")")
    return shown[0] if len(shown) == 1 else "[" + ", ".join(shown) + "]"


def _dtypes(description: Description) -> str:
    return ", ".join(dict.fromkeys(description.dtypes)) or "none"


def _of_gradients(description: Description) -> str:
    return description.pattern if " for variable " in description.pattern else ""


_CHECKS: tuple[tuple[str, Callable[[Description], Any], Callable[[Description], str]], ...] = (
    ("operations", lambda d: d.kind, lambda d: d.kind.name.lower()),
    ("gradients", _of_gradients, lambda d: _of_gradients(d) or "all dense"),
    ("calls", lambda d: d.pattern, lambda d: d.pattern or "another one"),
    ("devices", lambda d: d.device, lambda d: d.device or "host memory"),
    ("element types", lambda d: tuple(dict.fromkeys(d.dtypes)), _dtypes),
    ("numbers of tensors in the group", lambda d: len(d.shapes), lambda d: str(len(d.shapes))),
    ("orders of element types", lambda d: d.dtypes, lambda d: ", ".join(d.dtypes)),
    ("shapes", lambda d: d.shapes, _shape),
    ("prescale factors", lambda d: d.prescale, lambda d: repr(d.prescale)),
    ("postscale factors", lambda d: d.postscale, lambda d: repr(d.postscale)),
    ("reduce operations", lambda d: d.operation, lambda d: d.operation.name.title()),
    ("root ranks", lambda d: d.root, lambda d: str(d.root)),
    ("ranks of the process set", lambda d: d.detail, lambda d: str(list(d.detail))),
)
_ADVICE = {
    "gradients": "Compute gradients of the same variables on all ranks, with zeros for a variable that the "
    "loss does not use. A table's gradient must consist of rows on all ranks, or on no rank "
    "(sparse_as_dense=True).",
    "devices": "Keep the tensor on the same kind of device, and use the same settings and packages, on all "
    "ranks.",
    "element types": "Cast to one dtype on all ranks before the call.",
    "operations": "Call the same operation on all ranks under one name, and others under another name.",
    "shapes": "Give the tensor the same shape on all ranks, or use allgather for unequal lengths.",
    "reduce operations": "Pass the same op on all ranks.",
    "root ranks": "Pass the same root_rank on all ranks.",
}

_ORDER = (
    " Calls without names are matched by their order. Check whether a rank has made one call more or fewer "
    f"before this one, for instance in a training step that other ranks do not make. {UNEVEN_STEPS}"
)


def mismatch_message(
    name: str, who: Sequence[Identity], submitted: Sequence[tuple[Description, str | None] | None]
) -> str:
    """Return the message of a mismatch error, which is the same on all members.

    Args:
        name: Name of the requests.
        who: The members.
        submitted: For each member, the description that it submitted, and the reason why its call was refused
            (None if it was accepted), or None for a member that has joined.
    """
    shown_name, tensors = quoted(name), tensors_of(name)
    for identity, entry in zip(who, submitted, strict=True):
        if entry is not None and entry[1] is not None:
            begin = shown_name[:1].upper() + shown_name[1:]
            return f"{begin} failed because of the call on {identity}: {entry[1]}"
    present = [(identity, entry[0]) for identity, entry in zip(who, submitted, strict=True) if entry]
    for title, key, text in _CHECKS:
        groups: dict[Any, list[tuple[Identity, Description]]] = {}
        for identity, description in present:
            groups.setdefault(key(description), []).append((identity, description))
        if len(groups) > 1:
            if title == "shapes" and len(tensors) == len(present[0][1].shapes):
                text, shown_name = _first_other_shape(tensors, [d for _, d in present])
            differs = [f"{text(g[0][1])} on {_ranks([peer for peer, _ in g])}" for g in groups.values()]
            advice = _ADVICE.get(title, "Make the call with equal arguments on all ranks.")
            if ".noname." in name:
                advice += _ORDER
            return f"Mismatched {title} for {shown_name}: {'; '.join(differs)}. {advice}"
    return f"Ranks submitted different requests for {shown_name}."


def _first_other_shape(
    tensors: Sequence[str], all_of: Sequence[Description]
) -> tuple[Callable[[Description], str], str]:
    """Find the first tensor whose shapes differ. Returns a formatter of its shape, and its quoted name."""
    index = next(i for i, _ in enumerate(tensors) if len({call.shapes[i] for call in all_of}) > 1)
    return lambda call: _shape(replace(call, shapes=(call.shapes[index],))), f"'{tensors[index]}'"


def _ranks(members: Sequence[Identity]) -> str:
    by_host: dict[str, list[int]] = {}
    for identity in members:
        by_host.setdefault(identity.host, []).append(identity.rank)
    parts = []
    for host, ranks in by_host.items():
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        shown = ", ".join(map(str, ranks[:8])) + more
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {shown} on host {host}")
    return " and ".join(parts)
