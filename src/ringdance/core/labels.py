"""Readable labels for collective calls, made from the names of the tensors that a call exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST = 4096  # maximum number of names; a model needs only a few
_tensors: dict[str, tuple[str, Sequence[str]]] = {}
_owners: dict[str, str] = {}  # by label: the model or optimizer that uses it


def note(name: str, owner: str, what: str, tensors: Sequence[str]) -> None:
    """Record which tensors are exchanged under a name.

    Args:
        name: Name of the call.
        owner: The model or optimizer that makes the call. If another owner uses the same label, a number is
            added to it.
        what: Kind of the tensors, such as "gradients".
        tensors: Names of the parameters.
    """
    if not tensors or len(_tensors) >= _MOST:
        return
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    label, number = f"{what} of {tensors[0]}{more}", 1
    while _owners.setdefault(label if number == 1 else f"{label} ({number})", owner) != owner:
        number += 1
    _tensors[name] = label if number == 1 else f"{label} ({number})", tensors


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """Return the labels of the names that have one. Another rank passes the result to ``adopt``."""
    return {name: _tensors[name][0] for name in names if name in _tensors}


def adopt(labels: dict[str, str]) -> None:
    """Adopt another rank's labels for names that have no label on this rank."""
    for name, label in labels.items():
        taken = any(label == other for other, _ in list(_tensors.values()))  # a copy: other threads may add
        _tensors.setdefault(name, (f"{label} ('{name}')" if taken else label, ()))


def known(name: str, number: int) -> bool:
    """Return True if exactly ``number`` tensors are recorded for a name."""
    return len(tensors_of(name)) == number


def tensors_of(name: str) -> Sequence[str]:
    """Return the names of the tensors that a call exchanges, or an empty sequence if unknown."""
    return _tensors.get(name, ("", ()))[1]


def label_of(name: str) -> str:
    """Return a readable label for a name. Omits the number at the end of a generated name."""
    if name in _tensors:
        return _tensors[name][0]
    return name.rstrip("0123456789").rstrip(".") if ".noname." in name else name


def quoted(name: str) -> str:
    """Return how a message refers to a call: by its label or, if it has none, by its quoted name."""
    return f"the {label_of(name)}" if name in _tensors else f"'{name}'"
