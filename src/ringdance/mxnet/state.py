"""Give all ranks the parameters of one."""

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
    """Overwrite parameters with those of global rank ``root_rank``.

    Those of Gluon without values yet, as their shape is known only in the first forward pass, follow when
    they get them.

    Args:
        params: what ``collect_params()`` returns, or a dictionary of parameters or arrays, with equal keys
            on all ranks.
        root_rank: global rank.
        prefix: begins the names of the operations, followed by the key.

    Raises:
        ValueError: ``params`` is something else.
    """
    if not isinstance(params, (dict, mx.gluon.ParameterDict)):
        raise ArgumentError(
            f"broadcast_parameters needs a dictionary of arrays or parameters, got {type(params).__name__}."
        )
    if session.engine().size == 1:
        return
    now = []
    for key, one in sorted(params.items()):
        name = f"{prefix or ''}{key}"
        if isinstance(one, mx.nd.NDArray):
            now.append((name, [one]))
            continue
        try:
            now.append((name, one.list_data()))
        except mx.gluon.parameter.DeferredInitializationError:
            after_init(one, partial(_later, name, root_rank))
    _broadcast(now, root_rank)


def _later(name: str, root_rank: int, arrays: list[NDArray]) -> None:
    _broadcast([(name, arrays)], root_rank)


def _broadcast(named: list[tuple[str, list[NDArray]]], root_rank: int) -> None:
    """Broadcast arrays, each with its copies on other devices of this process."""
    calls = [
        (movement(Collective.BROADCAST, name, global_process_set, root=root_rank), (arrays[0],))
        for name, arrays in named
    ]
    run_in_place(calls)
    for _, (first, *others) in named:
        for other in others:
            first.copyto(other)
