"""The order in which streams receive work for tensors on a device. The fake device only logs this order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ringdance.core.exchange.base import Context
from ringdance.core.request import Collective, Description, ReduceOp, Request
from ringdance.errors import RankLostError
from ringdance.torch import gradients, memory
from ringdance.torch.device import communicators, direct, streams
from ringdance.torch.device import exchange as device
from ringdance.training.collectives import Call as CollectiveCall
from ringdance.training.gradients.source import DENSE

log: list[str] = []


class Event:
    done = False

    def record(self, stream: Stream) -> None:
        self.stream = stream.name
        log.append(f"event behind {stream.name}")

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait")


class Stream:
    device = torch.device("cpu")

    def __init__(self, _: Any = None, name: str = "side") -> None:
        self.name = name

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        log.append(f"{self.name} waits for {event.stream}")

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait")


class Call:
    def wait(self) -> None:
        log.append(f"{FakeModule.current} waits for the communicator")


class Group:
    error = "SUCCESS"

    def allreduce(self, tensors: list[Any], options: Any) -> Call:
        log.append(f"allreduce of {tensors[0].numel()} on {FakeModule.current}")
        return Call()

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.error)

    def name(self) -> str:
        return "nccl"

    def shutdown(self) -> None:
        log.append("shutdown")

    def abort(self) -> None:
        log.append("abort")


class FakeModule:
    current = "main"

    @staticmethod
    def current_stream(_: Any) -> Stream:
        return Stream(name=FakeModule.current)

    @staticmethod
    def device(_: Any) -> Any:
        return contextlib.nullcontext()

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        before, FakeModule.current = FakeModule.current, stream.name
        yield
        FakeModule.current = before


class OnDevice(torch.Tensor):
    """A tensor that claims not to be on the CPU."""

    is_cpu = False

    def record_stream(self, stream: Stream) -> None:
        log.append(f"memory is used on {stream.name}")


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> device.TorchExchange:
    log.clear()
    monkeypatch.setattr(torch, "cpu", FakeModule)
    monkeypatch.setattr(communicators, "group_of", lambda *_: Group())
    place = SimpleNamespace(rank=0, size=2, context=Context())
    made = device.TorchExchange(None, torch.device("cpu"), place)
    made._stream = Stream()
    return made


def reduced(exchange: device.TorchExchange, *tensors: Any) -> device.DeviceResults:
    shapes, dtypes = tuple(tuple(tensor.shape) for tensor in tensors), ("float32",) * len(tensors)
    described = Description(Collective.ALLREDUCE, dtypes, shapes, ReduceOp.AVERAGE, device="cuda")
    request = Request(described, tensors, None, "gradients", ready=streams.mark(tensors[0]))
    steps = exchange.execute([(described, request)], (0, 1))
    with pytest.raises(StopIteration) as end:
        next(steps)  # completes at once, because the host does not wait
    results: device.DeviceResults = end.value.value[0]
    return results


def on_device(*values: float) -> Any:
    return torch.tensor(values).as_subclass(OnDevice)


def test_streams_wait_for_one_another_and_the_host_for_none(exchange: device.TorchExchange) -> None:
    first, second = reduced(exchange, on_device(2.0, 4.0), on_device(6.0))
    assert log == [
        "event behind main", "side waits for main", "allreduce of 3 on side",
        "side waits for the communicator", "memory is used on side", "memory is used on side",
        "event behind side",
    ]  # fmt: skip
    log.clear()
    outputs = streams.await_results(device.DeviceResults([first, second]))
    assert log == [], "without an event there is nothing to wait for"
    # the fake does not sum, so the values are halved
    assert [output.tolist() for output in outputs] == [[1.0, 2.0], [3.0]]


def test_who_uses_results_lets_its_own_stream_wait(exchange: device.TorchExchange) -> None:
    results = reduced(exchange, on_device(2.0))
    log.clear()
    streams.await_results(results)
    assert log == ["main waits for side", "memory is used on main"]


def test_what_nccl_reports_is_told_with_the_tensor(exchange: device.TorchExchange) -> None:
    """A communicator's error is raised even if the abort has completed its events."""
    reduced(exchange, on_device(2.0))
    exchange.check()  # still under way, so there is nothing to report
    assert len(exchange._under_way) == 1
    exchange._under_way[0][0].done = True
    exchange.group.error = "COMM_ERROR"
    with pytest.raises(RankLostError, match=r"nccl failed on rank 0 .*'gradients' or a later .*: COMM_ERROR"):
        exchange.check()
    exchange.group.error = "SUCCESS"
    exchange.check()
    assert not exchange._under_way


def test_an_agreed_end_waits_for_what_is_enqueued(
    exchange: device.TorchExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "synchronize", lambda self: log.append(f"the host waits for {self.name}"))
    exchange.close(True)
    assert log == ["the host waits for side", "shutdown"]
    exchange.close(False)  # again, as after a restart
    exchange.check()
    assert len(log) == 2


def test_buckets_that_became_gradients_are_exchanged_before_their_communicator_is_aborted(
    exchange: device.TorchExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host runs ahead of a GPU, so an abort would leave this rank's own gradients of the last step."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    ready = Event()
    ready.record(Stream(name="main"))
    monkeypatch.setattr(direct, "mark", lambda _: ready)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    source = gradients.Gradients([weight], memory.Compression.none, False)
    source._direct, source._agreed = exchange, {(0,): [torch.float32]}
    work = source.launch(CollectiveCall(Collective.ALLREDUCE, "bucket"), (0,))
    source.write_back((0,), bytes([DENSE]))
    event = work.result.event

    def pass_time(_: float) -> None:
        log.append("time passes")
        event.done = True

    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=pass_time))
    monkeypatch.setattr(exchange, "close", lambda agreed: log.append(f"closed, agreed: {agreed}"))
    source.close_direct()
    assert log[-2:] == ["time passes", "closed, agreed: False"]
    source.close_direct()
    assert log[-2:] == ["time passes", "closed, agreed: False"], "no communicator is left to close"


def test_what_communicators_of_torch_do_otherwise_goes_through_the_host() -> None:
    def stays(operation: ReduceOp, dtype: Any, scale: float = 1.0) -> bool:
        return device.exchanges(Collective.ALLREDUCE, operation, (scale, 1.0), dtype)

    assert stays(ReduceOp.AVERAGE, torch.bfloat16, 0.5)
    assert stays(ReduceOp.SUM, torch.int64)
    assert not stays(ReduceOp.AVERAGE, torch.int64)
    assert not stays(ReduceOp.SUM, torch.int32, 0.5)
    assert not stays(ReduceOp.MAX, torch.float32)
    assert not stays(ReduceOp.SUM, torch.bool)
    assert device.exchanges(Collective.BROADCAST, ReduceOp.SUM, (1.0, 1.0), torch.bool)


def test_an_unknown_kind_of_collective_is_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="does not support the collective BARRIER"):
        device.exchanges(Collective.BARRIER, ReduceOp.SUM, (1.0, 1.0), torch.float32)
