"""What people see of a call instead of its name: the tensors that it exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST = 4096  # names; those of a model are a few
_tensors: dict[str, tuple[str, Sequence[str]]] = {}
_owners: dict[str, str] = {}  # who has a label


def note(name: str, owner: str, what: str, tensors: Sequence[str]) -> None:
    """Note what is exchanged under a name.

    Args:
        name: of the call.
        owner: which model or optimizer it is of: another one's label gets a number.
        what: such as "gradients".
        tensors: names of the parameters.
    """
    if not tensors or len(_tensors) >= _MOST:
        return
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    label, number = f"{what} of {tensors[0]}{more}", 1
    while _owners.setdefault(label if number == 1 else f"{label} ({number})", owner) != owner:
        number += 1
    _tensors[name] = label if number == 1 else f"{label} ({number})", tensors


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """Return the labels of those names that have one, for another rank's ``adopt``."""
    return {name: _tensors[name][0] for name in names if name in _tensors}


def adopt(labels: dict[str, str]) -> None:
    """Take over another rank's labels of names that this rank does not use."""
    for name, label in labels.items():
        taken = any(label == other for other, _ in list(_tensors.values()))  # others may note more
        _tensors.setdefault(name, (f"{label} ('{name}')" if taken else label, ()))


def known(name: str, number: int) -> bool:
    """Return whether so many tensors are noted of a name."""
    return len(tensors_of(name)) == number


def tensors_of(name: str) -> Sequence[str]:
    """Return the names of the tensors, as far as known."""
    return _tensors.get(name, ("", ()))[1]


def label_of(name: str) -> str:
    """Return the name for people; those of unnamed calls without their numbers, which never end."""
    if name in _tensors:
        return _tensors[name][0]
    return name.rstrip("0123456789").rstrip(".") if ".noname." in name else name


def quoted(name: str) -> str:
    """Return the name of a call for a message."""
    return f"the {label_of(name)}" if name in _tensors else f"'{name}'"
