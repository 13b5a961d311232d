"""Private torch names that the binding uses, each with its purpose and the fallback if it is missing.

All of them exist in torch 2.2 to 2.14. They are looked up when this module is imported. The tests also cover
the fallbacks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.function import BackwardCFunction

F = TypeVar("F", bound=Callable[..., Any])

_MESSAGE = "Ringdance's communication between processes cannot be part of a compiled graph"

# torch._C._dynamo.eval_frame: marks a code object so that Dynamo compiles neither its frames nor the frames
# that they call. This costs nothing per call and does not import torch._dynamo, which would take several
# seconds. If the name is missing, a wrapper applies torch.compiler.disable once torch._dynamo is loaded.
try:
    from torch._C._dynamo import eval_frame as _eval_frame

    _SKIP: Any = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
except (ImportError, AttributeError):
    _SKIP = None


def compiler_disable(function: F) -> F:
    """Exclude a function from ``torch.compile``, as ``torch.compiler.disable`` does. May return a wrapper."""
    if _SKIP is None:
        return _disabled_later(function)
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    # When traced code calls the function, Dynamo reads these attributes, breaks the graph and shows _MESSAGE.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _MESSAGE  # type: ignore[attr-defined]
    return function


def _disabled_later(function: F) -> F:
    disabled: Any = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


# torch._C._current_graph_task_id: the id of the backward pass that this thread is running, or -1 if there is
# none. Ids increase, so a nested pass has a higher id than the pass that contains it.
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def has_run_backward() -> bool:
    """Return True if this process has run a backward pass.

    Always returns False in a process that uses ``torch.distributed``.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    # In pipeline-parallel training, which uses torch.distributed, gradients are not averaged over the ranks.
    if distributed or "ringdance.torch.backend" in sys.modules:
        return False
    tasks: list[int] = []
    with torch.enable_grad():
        tensor: Any = torch.ones(1, device="cpu", requires_grad=True)
        tensor.register_hook(lambda _: tasks.append(graph_task()))
        tensor.sum().backward()
    return tasks[0] > 0  # Passes are numbered from 0.


# Variable._execution_engine.queue_callback: calls a function at the end of the current backward pass.
# DistributedDataParallel uses it, too.
_queue_callback: Callable[[Callable[[], None]], None] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None
)


def has_end_callback() -> bool:
    """Return True if a function passed to ``queue_callback`` now would be called.

    Returns False if torch lacks one of the private names, and within compiled autograd, which accepts
    callbacks from code that it has not compiled but never calls them.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    inside = getattr(compiled, "in_compiled_autograd_region", False)
    return graph_task() >= 0 and _queue_callback is not None and not inside


def queue_callback(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the backward pass that this thread is running."""
    assert _queue_callback is not None
    _queue_callback(function)


# torch._C._current_autograd_node: the autograd node that this thread is running, or None in a callback at the
# end of a pass. If the name is missing, such callbacks are treated as part of the pass.
_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: True)


def end_is_ahead() -> bool:
    """Return True if a callback queued now will run at the end of this thread's current backward pass."""
    return has_end_callback() and _node() is not None


# BackwardCFunction: its methods run the backward() of each torch.autograd.Function written in Python, with
# the graph node as ``self``. If the methods are missing, nested passes are treated as separate passes.
_RUNS_BACKWARD = frozenset(
    method.__code__ for method in vars(BackwardCFunction).values() if hasattr(method, "__code__")
)


def outermost_function_node() -> Any:
    """Return the node of the outermost ``Function.backward`` that this thread is running, or None.

    A pass that starts inside such a node is part of the pass that runs the node, as in checkpointing with
    ``use_reentrant=True``.
    """
    node, frame = None, sys._getframe(1)
    while True:
        if frame.f_code in _RUNS_BACKWARD:
            node = frame.f_locals.get("self")
        if frame.f_back is None:
            return node
        frame = frame.f_back


# Attributes that torch itself reads from optimizers and their step methods. If a torch version uses other
# names, learning rate schedulers warn that step() was not called, and step hooks may run twice.


def note_step(optimizer: Any) -> None:
    """Record that ``step()`` was called. Otherwise, learning rate schedulers warn that it was not called."""
    optimizer._opt_called = True


def counts_steps(step: Any) -> None:
    """Mark a ``step`` function as the wrapper that counts steps for learning rate schedulers."""
    step._wrapped_by_lr_sched = True


def hooks_run_inside(step: Any) -> None:
    """Mark a ``step`` method as hooked, because the base class's ``step``, which it calls, runs the hooks."""
    step.hooked = True


# torch.nn.modules.batchnorm._BatchNorm: the base class of all batch norm layers. If the name is missing,
# convert_sync_batchnorm converts only BatchNorm1d, its subclasses and torch's SyncBatchNorm.
BatchNorm: Any = getattr(torch.nn.modules.batchnorm, "_BatchNorm", torch.nn.BatchNorm1d)


# Tensor._indices and _values: the entries of a sparse tensor, coalesced or not. If a name is missing, entries
# with equal indices are summed first, because the public indices() and values() need a coalesced tensor.
def sparse_entries(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of a sparse tensor, with shape (dimensions, entries), and its values."""
    plain = tensor.detach()
    if hasattr(plain, "_indices") and hasattr(plain, "_values"):
        return plain._indices(), plain._values()
    plain = plain.coalesce()
    return plain.indices(), plain.values()


# GradScaler._per_optimizer_states: records which gradients were unscaled since the last update().
# load_state_dict() does not reset it. If the name is missing and an error occurs between unscale_() and
# update(), the first unscale_() after the state has been restored raises an error.
def forget_unscaled(scaler: Any) -> None:
    """Make a GradScaler treat all gradients as still scaled. Has no effect on other objects."""
    getattr(scaler, "_per_optimizer_states", {}).clear()


def divided_by(tensor: Any) -> str | None:
    """Return the name of the torch.distributed feature that sharded a tensor, or None if it is not sharded.

    DTensors have the public attribute ``device_mesh``. FSDP1 marks its parameters with the private attribute
    ``_fsdp_flattened``. In a torch version without this attribute, they are treated as plain tensors.
    """
    if hasattr(tensor, "device_mesh"):
        return "torch.distributed (it is a DTensor, as with fully_shard)"
    return "FullyShardedDataParallel" if getattr(tensor, "_fsdp_flattened", False) else None


# torch.autograd.profiler._is_profiler_enabled: True while a torch profiler is recording. If the name is
# missing, each wait creates a profiler span, which takes a few microseconds.
profiler_running: Callable[[], bool] = functools.partial(
    getattr, torch.autograd.profiler, "_is_profiler_enabled", True
)

# Maps the current names of process group methods to their names in earlier versions of torch.
_OLDER = {
    "all_gather_single": "_allgather_base", "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base", "all_to_all_single": "alltoall_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}  # fmt: skip


def renamed(group: Any, name: str) -> Any:
    """Return a process group's method ``name``, which earlier versions of torch define under another name."""
    return getattr(group, name) if hasattr(group, name) else getattr(group, _OLDER[name])


# torch._C._distributed_c10d: registers the work that torch.ops._c10d_functional.wait_tensor waits for.
# torch's own groups register their works in C++. If a name is missing, wait_tensor does not wait for a tensor
# that was passed to dist.all_reduce(async_op=True). torch itself registers the works of functional
# collectives.
_distributed: Any = getattr(torch._C, "_distributed_c10d", None)
_registers_works: Callable[[], bool] = getattr(
    _distributed, "_allow_inflight_collective_as_graph_input", lambda: False
)


def register_work(tensors: Sequence[torch.Tensor], work: Any) -> None:
    """Make ``wait_tensor`` wait for ``work`` when called on these tensors, if torch's setting allows this."""
    if _registers_works():
        for tensor in tensors:
            _distributed._register_work(tensor, work)
