"""What people see of a call instead of its name: the tensors that it exchanges."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 4096  # names; those of a model are a few
_tensors: dict[str, tuple[str, Sequence[str]]] = {}


def note(name: str, what: str, tensors: Sequence[str]) -> None:
    """Note what is exchanged under a name: "gradients", and the names of the parameters."""
    if name not in _tensors and tensors and len(_tensors) < _MOST:
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        _tensors[name] = f"{what} of {tensors[0]}{more}", tensors


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
