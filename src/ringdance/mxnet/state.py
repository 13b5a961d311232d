"""Broadcast one rank's parameters to all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import mxnet as mx

from ringdance.core.request import Collective
from ringdance.errors import ArgumentError
from ringdance.mxnet._private import after_init
from ringdance.mxnet.exchange import run_in_place
from ringdance.mxnet.memory import NDArray
from ringdance.training import session
from ringdance.training.collectives import movement
from ringdance.training.process_sets import global_process_set


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite parameters with the values from global rank ``root_rank``.

    A Gluon parameter whose initialization is deferred to the first forward pass, because its shape is not
    known yet, is broadcast once it is initialized.

    Args:
        params: The result of ``collect_params()``, or a dictionary of parameters or arrays. Keys must be the
            same on all ranks.
        root_rank: Global rank of the root.
        prefix: Prefix of the operation names, followed by the parameter's key.

    Raises:
        ValueError: ``params`` has the wrong type.
    """
    if not isinstance(params, (dict, mx.gluon.ParameterDict)):
        raise ArgumentError(
            "broadcast_parameters needs a dictionary of arrays or parameters, but got "
            f"{type(params).__name__}."
        )
    if session.engine().size == 1:
        return
    now = []
    for key, parameter in sorted(params.items()):
        name = f"{prefix or ''}{key}"
        if isinstance(parameter, mx.nd.NDArray):
            now.append((name, [parameter]))
            continue
        try:
            now.append((name, parameter.list_data()))
        except mx.gluon.parameter.DeferredInitializationError:
            after_init(parameter, partial(_later, name, root_rank))
    _broadcast(now, root_rank)


def _later(name: str, root_rank: int, arrays: list[NDArray]) -> None:
    _broadcast([(name, arrays)], root_rank)


def _broadcast(named: list[tuple[str, list[NDArray]]], root_rank: int) -> None:
    """Broadcast arrays, then copy each array to its replicas on other devices of this process."""
    calls = [
        (movement(Collective.BROADCAST, name, global_process_set, root=root_rank), (arrays[0],))
        for name, arrays in named
    ]
    run_in_place(calls)
    for _, (first, *others) in named:
        for other in others:
            first.copyto(other)
