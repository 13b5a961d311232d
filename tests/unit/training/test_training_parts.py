"""Learning rates, top-k counts and numbers by first use, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError
from ringdance.training.gradients.lists import UseOrder
from ringdance.training.loaders.binding import arrays


@pytest.fixture
def job() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_rates_of_published_runs() -> None:
    goyal = hvd.Schedule(3.2, 90, "step", 5, 0.1, milestones=(30, 60, 80))
    assert [round(goyal(epoch), 6) for epoch in (0, 2.5, 5, 29.9, 30, 60, 80, 90)] == [
        0.1, 1.65, 3.2, 3.2, 0.32, 0.032, 0.0032, 0.0032
    ]  # fmt: skip
    cosine = hvd.Schedule(2.0, 90, warmup_epochs=10)
    assert (cosine(0), cosine(10)) == (0.0, 2.0)
    assert (cosine(50), cosine(90), cosine(91)) == (pytest.approx(1.0), pytest.approx(0), pytest.approx(0))
    mlperf = hvd.Schedule(10.0, 42, "polynomial", 2)
    assert (mlperf(22), mlperf(42)) == (pytest.approx(2.5), 0.0)
    assert hvd.Schedule(1.0, 3, "constant", 0)(2) == 1.0
    with pytest.raises(ArgumentError, match="cosine"):
        hvd.Schedule(1.0, 3, "cosinus", 0)
    with pytest.raises(ArgumentError, match="warmup_epochs=5"):
        hvd.Schedule(1.0, 3)


def test_top_k_is_strict(job: None) -> None:
    metric = hvd.TopK((1, 2))
    metric.add([[0.1, 0.9, 0.5], [0.9, 0.1, 0.5], [0.5, 0.5, 0.5]], [1, 2, 0])
    metric.add(np.array([[np.nan, 1.0, 2.0]], np.float32), np.array([0]))
    assert metric.result() == {"count": 4, "top1": 0.25, "top2": 0.5}
    with pytest.raises(ArgumentError, match=r"\(2, 3\) and \(3,\)"):
        metric.add(np.zeros((2, 3)), np.zeros(3, int))


def test_top_k_leaves_out_what_has_no_class(job: None) -> None:
    metric = hvd.TopK((1,))
    metric.add([[0.1, 0.9], [0.1, 0.9], [0.9, 0.1]], [-1, 1, -100])
    assert metric.result() == {"count": 1, "top1": 1.0}
    for labels in ([2], [1.0]):
        with pytest.raises(ArgumentError, match=r"label 2 is out of range for 2 classes|\(float64\)"):
            metric.add([[0.1, 0.9]], labels)
    assert metric.count == 1


class Model:
    """An object that can be numbered."""


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_numbers_by_first_use_begin_anew_with_each_job(job: None) -> None:
    order, first, second = UseOrder(), Model(), Model()
    assert [order.number("equal", model) for model in (first, second, first)] == [0, 1, 0]
    hvd.shutdown()
    hvd.init()  # elastic training does this; a rank that failed has not numbered what other ranks have
    assert order.number("equal", second) == 0


def test_numbers_of_threads_whose_order_is_not_certain(job: None) -> None:
    order, models = UseOrder(), [Model() for _ in range(4)]
    assert order.number("equal", models[0]) == 0
    in_thread(lambda: order.number("equal", models[1]))  # started later, so it is second on every rank
    assert order.number("equal", models[1]) == 1
    values = np.zeros(2)  # like a variable, an array has no defined truth value
    assert (order.number("other", values), order.number("other", models[1])) == (0, 1)
    go = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(lambda: go.wait(10) and order.number("equal", models[3]))
        assert order.number("equal", models[2]) == 2  # the other thread already existed
        go.set()
        with pytest.raises(ArgumentError, match="Two threads"):
            late.result()


def test_numpy_has_no_devices() -> None:
    labels = np.zeros(2)
    assert arrays.tensor(labels, None) is arrays.tensor(labels, "cpu") is labels
    with pytest.raises(ArgumentError, match="device='cuda'"):
        arrays.tensor(labels, "cuda")
