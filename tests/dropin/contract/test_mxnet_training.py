"""Contract, MXNet: DistributedTrainer and DistributedOptimizer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet_inputs import ODD, RANK, SIZE, members, several, value

import horovod.mxnet as hvd

STEPS, SAMPLES = 3, 4  # samples per rank and step


def batch(step: int, rank: int) -> tuple[Any, Any]:
    made = np.random.default_rng([step, rank])
    return mx.nd.array(made.normal(size=(SAMPLES, 6))), mx.nd.array(made.integers(0, 3, SAMPLES))


def net_of(seed: int, prefix: str = "net_") -> Any:
    mx.random.seed(seed)
    np.random.seed(seed)
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(nn.Dense(8, activation="tanh", in_units=6), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Uniform(0.5))
    return net


def weights(net: Any) -> list[Any]:
    return [value(param.data()) for param in net.collect_params().values()]


def train(net: Any, trainer: Any, ranks: list[int]) -> list[Any]:
    """Train on the joined batches of these ranks and return the weights."""
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(STEPS):
        pairs = [batch(step, rank) for rank in ranks]
        data = mx.nd.concat(*[entry for entry, _ in pairs], dim=0)
        label = mx.nd.concat(*[entry for _, entry in pairs], dim=0)
        with autograd.record():
            total = loss(net(data), label)
        total.backward()
        trainer.step(data.shape[0])
    return weights(net)


def alone(ranks: list[int], optimizer: str = "adam") -> list[Any]:
    """Return the weights of one process that trains on the joined batches of these ranks."""
    net = net_of(0)
    return train(net, gluon.Trainer(net.collect_params(), optimizer, kvstore=None), ranks)


def close(got: list[Any], want: list[Any], atol: float = 2e-6) -> None:
    for actual, other in zip(got, want, strict=True):
        np.testing.assert_allclose(actual, other, rtol=0, atol=atol)


def everywhere_equal(arrays: list[Any], process_set: Any = hvd.global_process_set) -> None:
    for array in arrays:
        gathered = value(hvd.allgather(mx.nd.array(array.reshape(1, -1)), process_set=process_set))
        assert (gathered == gathered[0]).all()


@pytest.mark.parametrize("options", [
    {}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}, {"prefix": "one."}, {"num_groups": 100},
])  # fmt: skip
def test_the_weights_are_those_of_one_process(options: dict[str, Any]) -> None:
    net = net_of(RANK)
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "adam", **options)
    got = train(net, trainer, [RANK])
    everywhere_equal(got)
    close(got, alone(members()))


def test_each_optimizer_by_its_name_or_itself() -> None:
    for optimizer in ("sgd", mx.optimizer.SGD(momentum=0.9), "nag", "rmsprop"):
        net = net_of(0)
        trainer = hvd.DistributedTrainer(net.collect_params(), copy.copy(optimizer))
        everywhere_equal(train(net, trainer, [RANK]))


def test_two_trainers_of_one_net() -> None:
    """Each has half of the parameters, with and without a prefix."""
    for first, second in (("first", "second"), (None, None)):
        net = net_of(0)
        lower, upper = net[0].collect_params(), net[1].collect_params()
        trainers = [
            hvd.DistributedTrainer(lower, "adam", prefix=first),
            hvd.DistributedTrainer(upper, "adam", prefix=second),
        ]

        class Both:
            def step(self, count: int, trainers: Any = tuple(trainers)) -> None:
                for trainer in trainers:
                    trainer.step(count)

        close(train(net, Both(), [RANK]), alone(members()))


def test_compression_fp16() -> None:
    net = net_of(0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", compression=hvd.Compression.fp16)
    got = train(net, trainer, [RANK])
    everywhere_equal(got)
    close(got, alone(members(), "sgd"), 1e-4)
    for dtype in ("float32", "float64", "float16", "int32"):
        tensor = mx.nd.ones((3, 2), dtype=dtype)
        small, context = hvd.Compression.fp16.compress(tensor)
        assert small.dtype == (np.int32 if dtype == "int32" else np.float16)
        assert hvd.Compression.fp16.decompress(small, context).dtype == tensor.dtype
        assert hvd.Compression.none.compress(tensor)[0] is tensor


def test_parameters_of_fp16() -> None:
    """A single parameter instead of a net, because MXNet has no float16 layers on hosts."""
    parameter = gluon.Parameter("weight", shape=(5,), dtype="float16")
    parameter.initialize(mx.init.One())
    options = {"learning_rate": 0.5, "multi_precision": True}
    trainer = hvd.DistributedTrainer([parameter], "sgd", options)
    with autograd.record():
        total = (parameter.data() * (RANK + 1)).sum()
    total.backward()
    trainer.step(1)
    assert value(parameter.data()).tolist() == [1 - 0.5 * (SIZE + 1) / 2] * 5


def test_gradients_are_clipped_after_the_sum() -> None:
    net = net_of(0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    data, label = batch(0, RANK)
    with autograd.record():
        total = loss(net(data), label)
    total.backward()
    trainer.allreduce_grads()
    gradients = [param.grad() for param in net.collect_params().values()]
    norm = gluon.utils.clip_global_norm(gradients, 0.01)
    everywhere_equal([np.array([norm]), *map(value, gradients)])
    trainer.update(SAMPLES)
    everywhere_equal(weights(net))


@several
def test_overflow_of_one_rank_skips_the_step_on_all() -> None:
    """As in mixed precision, a loss scaler checks the gradients after the sum."""
    from mxnet.contrib.amp.loss_scaler import LossScaler

    net = net_of(0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    trainer._amp_loss_scaler = LossScaler()
    before = weights(net)
    data, label = batch(0, RANK)
    with autograd.record():
        total = gluon.loss.SoftmaxCrossEntropyLoss()(net(data), label)
    total.backward()
    if RANK == 0:
        next(iter(net.collect_params().values())).grad()[:] = np.inf
    trainer.step(SAMPLES)
    close(weights(net), before, 0.0)


def test_a_distributed_optimizer_is_unwrapped() -> None:
    net = net_of(0)
    wrapped = hvd.DistributedOptimizer(mx.optimizer.create("adam"))
    with pytest.warns(UserWarning, match="DistributedOptimizer"):
        trainer = hvd.DistributedTrainer(net.collect_params(), wrapped)
    close(train(net, trainer, [RANK]), alone(members()))


def test_a_distributed_optimizer_with_settings_of_its_own_is_refused(halves: tuple[Any, Any]) -> None:
    for options in ({"process_set": halves[0]}, {"gradient_predivide_factor": 2.0}):
        wrapped = hvd.DistributedOptimizer(mx.optimizer.create("adam"), **options)
        with pytest.raises(ValueError, match="would not use"):
            hvd.DistributedTrainer(net_of(0).collect_params(), wrapped)
        with pytest.warns(UserWarning, match="DistributedOptimizer"):
            hvd.DistributedTrainer(net_of(0).collect_params(), wrapped, **options)


def test_parameters_on_two_devices() -> None:
    net = nn.Dense(2, in_units=2)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    with autograd.record():
        total = net(mx.nd.ones((1, 2), ctx=mx.cpu(0))) * 1
    total.backward()
    if SIZE > 1:
        with pytest.raises(ValueError, match="2 devices"):
            trainer.allreduce_grads()


def test_trainers_of_process_sets(halves: tuple[Any, Any]) -> None:
    mine = halves[0]
    net = net_of(0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "adam", process_set=mine)
    got = train(net, trainer, [RANK])
    everywhere_equal(got, mine)
    close(got, alone(members(mine)))


@several
def test_weights_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing would show that the broadcast is missing."""
    net = net_of(RANK)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    messages: list[str] = []
    where = "ringdance.training.gradients.weights._log.warning"
    monkeypatch.setattr(where, lambda *words: messages.append(str(words)))
    for _ in range(4):
        train(net, trainer, [RANK])
    assert len(messages) == (RANK == 0)
    assert all("broadcast_parameters" in message for message in messages)


# DistributedOptimizer, for mx.mod.Module.


def module_weights(optimizer: Any, ranks: list[int]) -> list[Any]:
    """Return a Module's weights after ``fit`` with these ranks' batches."""
    data, label = mx.sym.var("data"), mx.sym.var("softmax_label")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=8, name="one"), act_type="tanh")
    output = mx.sym.FullyConnected(hidden, num_hidden=3, name="two")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(output, label, name="softmax"))
    pairs = [[batch(step, rank) for rank in ranks] for step in range(STEPS)]
    samples = [np.concatenate([value(pair[i]) for step in pairs for pair in step]) for i in (0, 1)]
    count = SAMPLES * len(ranks)
    iterator = mx.io.NDArrayIter(*samples, batch_size=count)
    module.bind(iterator.provide_data, iterator.provide_label)
    made = np.random.default_rng(7)
    first = {name: mx.nd.array(made.normal(size=shape)) for name, shape in {
        "one_weight": (8, 6), "one_bias": (8,), "two_weight": (3, 8), "two_bias": (3,),
    }.items()}  # fmt: skip
    module.init_params(arg_params=first)
    if isinstance(optimizer, hvd.DistributedOptimizer):
        hvd.broadcast_parameters(first, root_rank=0)
        module.set_params(first, {})
    optimizer.rescale_grad = 1 / count
    module.fit(iterator, num_epoch=2, optimizer=optimizer, kvstore=None, eval_metric="acc")
    return [value(entry) for _, entry in sorted(module.get_params()[0].items())]


@pytest.mark.parametrize("options", [{}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}])
def test_a_module(options: dict[str, Any]) -> None:
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.5), **options)
    got = module_weights(optimizer, [RANK])
    everywhere_equal(got)
    close(got, module_weights(mx.optimizer.create("sgd", learning_rate=0.5), members()))


def test_everything_else_is_the_given_optimizer_s() -> None:
    inner = mx.optimizer.create("sgd", learning_rate=0.5, momentum=0.9)
    outer = hvd.DistributedOptimizer(inner)
    assert isinstance(outer, mx.optimizer.Optimizer)
    outer.set_learning_rate(0.25)
    outer.set_wd_mult({"bias": 0.0})
    assert (inner.learning_rate, outer.learning_rate, outer.momentum) == (0.25, 0.25, 0.9)
    weight = mx.nd.ones(3)
    assert outer.create_state(0, weight).shape == (3,)
    assert outer.aggregate_num == inner.aggregate_num
    assert pickle.loads(pickle.dumps(outer)).learning_rate == 0.25


def test_an_optimizer_of_a_process_set(halves: tuple[Any, Any]) -> None:
    """Ranks outside the set only update their own weights."""
    evens = next(halve for halve in halves if 0 in halve.ranks)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0), process_set=evens)
    weight, gradient = mx.nd.zeros(2), mx.nd.full(2, RANK)
    optimizer.update(0, weight, gradient, optimizer.create_state(0, weight))
    want = RANK if ODD else np.mean(evens.ranks)
    np.testing.assert_allclose(value(weight), -want, rtol=1e-6)
