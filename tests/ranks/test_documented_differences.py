"""The differences from Horovod in docs/coming-from-horovod.md, row by row, as far as ranks can show them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ringdance.torch as hvd  # noqa: E402

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
MEAN = (SIZE + 1) / 2  # mean of rank + 1
pytestmark = pytest.mark.ranks(2, 3, 4)


def parameter(value: float) -> Any:
    return torch.nn.Parameter(torch.tensor([value]))


def wrapped(parameters: list[Any], kind: Any = torch.optim.SGD, **options: Any) -> Any:
    names = [(f"p{index}", value) for index, value in enumerate(parameters)]
    return hvd.DistributedOptimizer(kind(parameters, **({"lr": 1.0} | options)), names)


def test_a_gradient_that_nobody_has_stays_none_and_one_of_some_ranks_is_reduced() -> None:
    used, unused, some = parameter(1.0), parameter(1.0), parameter(1.0)
    optimizer = wrapped([used, unused, some], weight_decay=0.5)
    (used.sum() + (some.sum() if RANK == 0 else 0)).backward()
    assert used.grad.item() == pytest.approx(1.0)
    assert unused.grad is None
    assert some.grad.item() == pytest.approx(1 / SIZE)
    optimizer.step()
    assert unused.item() == 1.0
    optimizer.zero_grad(set_to_none=True)
    assert used.grad is None


def test_step_after_synchronize_warns_and_reduces_nothing_twice() -> None:
    weight = parameter(1.0)
    optimizer = wrapped([weight])
    (weight * (RANK + 1)).sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert len(caught) == 1
    assert weight.grad.item() == pytest.approx(MEAN)


def test_more_passes_than_announced_add_up() -> None:
    weight = parameter(1.0)
    optimizer = wrapped([weight])
    for _ in range(3):
        (weight * (RANK + 1)).sum().backward()
    optimizer.step()
    assert weight.grad.item() == pytest.approx(3 * MEAN)


def test_a_closure_sees_reduced_gradients() -> None:
    weight = parameter(5.0)
    optimizer = wrapped([weight], torch.optim.LBFGS)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = ((weight - RANK) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert weight.item() == pytest.approx((SIZE - 1) / 2, abs=1e-4)


def test_wrapping_keeps_the_state_and_its_broadcast_makes_no_step() -> None:
    weight = parameter(5.0)
    plain = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(1)
    plain.step()
    optimizer = hvd.DistributedOptimizer(plain, [("weight", weight)])
    assert "momentum_buffer" in optimizer.state[weight]
    fresh = wrapped([parameter(5.0)], torch.optim.Adam)
    hvd.broadcast_optimizer_state(fresh, root_rank=0)
    assert fresh.param_groups[0]["params"][0].item() == 5.0


def test_groups_honour_the_factor() -> None:
    first, second = parameter(0.0), parameter(0.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([first, second], lr=1.0), [("first", first), ("second", second)],
        groups=1, gradient_predivide_factor=float(SIZE),
    )  # fmt: skip
    ((RANK + 1) * (first + second)).sum().backward()
    assert [first.grad.item(), second.grad.item()] == pytest.approx([MEAN, MEAN])
    optimizer.step()


def test_batch_norm_works_on_the_cpu() -> None:
    assert torch.isfinite(hvd.SyncBatchNorm(3)(torch.randn(4 + RANK, 3))).all()


def test_averages_of_integers_and_further_types() -> None:
    total = sum(1 + 2 * rank for rank in range(SIZE))
    assert hvd.allreduce(torch.tensor([49, -3])).tolist() == [49, -3]
    assert hvd.allreduce(torch.tensor([-1 - 2 * RANK])).item() == -(total // SIZE)
    assert hvd.allreduce(torch.tensor([RANK == 0]), op=hvd.Max).item() is True
    assert hvd.allreduce(torch.ones(2, dtype=torch.bfloat16)).tolist() == [1.0, 1.0]
    assert hvd.allreduce(torch.ones(2, dtype=torch.uint16), op=hvd.Sum).tolist() == [SIZE, SIZE]


def test_float16_is_summed_in_float32() -> None:
    # In float16, 2048 + 1 is 2048, so the ones would be lost one by one.
    own = torch.tensor([2048.0 if RANK == 0 else 1.0], dtype=torch.float16)
    wanted = torch.tensor([2048.0 + SIZE - 1]).to(torch.float16)
    assert torch.equal(hvd.allreduce(own, op=hvd.Sum), wanted)


def test_not_contiguous_is_copied_out_of_place_and_raises_in_place() -> None:
    assert hvd.allreduce(torch.ones(2, 3).t()).shape == (3, 2)
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce_(torch.ones(2, 3).t())


def test_a_wrong_argument_of_one_rank_is_told_to_all() -> None:
    splits = [9] * SIZE if RANK == 0 else [4] + [0] * (SIZE - 1)
    with pytest.raises((ValueError, RuntimeError), match="splits"):
        hvd.alltoall(torch.ones(4), splits=splits, name="splits")


def test_reducescatter_compares_the_operation() -> None:
    with pytest.raises(RuntimeError, match=r"[Oo]peration"):
        hvd.reducescatter(torch.ones(4), op=hvd.Sum if RANK else hvd.Average, name="scatter")


def test_objects_of_different_types() -> None:
    assert hvd.broadcast_object([1] if RANK == 0 else None, root_rank=0) == [1]


def test_process_sets_need_no_permission_and_bad_ones_do_no_harm() -> None:
    with pytest.raises(ValueError, match="77"):
        hvd.add_process_set([0, 77])
    added = hvd.add_process_set([0])
    assert hvd.remove_process_set(added)
