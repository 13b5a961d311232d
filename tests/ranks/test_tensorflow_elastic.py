"""States are committed, restored and synchronized, and training continues after an error in a graph."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringdance.tensorflow as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)
v1 = tf.compat.v1


def test_keras_state() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse")
    model.optimizer.build(model.trainable_variables)
    for weight in model.weights:
        weight.assign(tf.fill(weight.shape, float(RANK)))
    state = hvd.elastic.TensorFlowKerasState(model, batch=10 + RANK, epoch=1)
    state.sync()
    assert (state.batch, state.epoch) == (10, 1)
    assert float(np.max(np.asarray(model.weights[0]))) == 0.0
    model.weights[0].assign([[5.0], [5.0]])
    model.optimizer.variables[-1].assign(tf.ones_like(model.optimizer.variables[-1].value))
    state.batch = 20
    state.restore()
    assert state.batch == 10
    assert np.asarray(model.weights[0]).tolist() == [[0.0], [0.0]]
    assert float(np.max(np.asarray(model.optimizer.variables[-1]))) == 0.0
    model.weights[0].assign([[5.0 + RANK], [5.0]])
    state.batch = 30
    state.commit()
    model.weights[0].assign([[6.0], [6.0]])
    state.restore()
    assert np.asarray(model.weights[0])[0, 0] == 5.0 + RANK
    with pytest.raises(ValueError, match="weights"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential())
    with pytest.raises(ValueError, match="needs variables"):
        hvd.elastic.TensorFlowState()


def test_state_of_a_session() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("w", initializer=float(RANK))
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, epoch=RANK)
        state.sync()
        assert session.run(weight) == 0.0
        weight.load(7.0, session)
        state.restore()
        assert (session.run(weight), state.epoch) == (0.0, 0)
        weight.load(8.0 + RANK, session)
        state.sync()  # again, with values other than the first time
        assert session.run(weight) == 8.0


def test_a_restore_clears_sums_between_passes() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("w", initializer=0.0)
        plain = v1.train.GradientDescentOptimizer(1.0)
        step = hvd.DistributedOptimizer(plain, backward_passes_per_step=2).minimize(weight * (RANK + 1.0))
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState([weight], session)
        session.run(step)
        state.restore()
        session.run(step)
        assert session.run(weight) == 0.0
        session.run(step)
        assert session.run(weight) == -(SIZE + 1.0)


@several
def test_training_goes_on_after_a_failed_graph() -> None:
    weight = tf.Variable([float(RANK)])
    state = hvd.elastic.TensorFlowState([weight], step=0, failed=0)
    starts = []

    @tf.function(reduce_retracing=True)
    def step(values: tf.Tensor) -> None:
        weight.assign_add(hvd.allreduce(values, op=hvd.Sum, name="elastic")[:1])

    @hvd.elastic.run
    def train(state: hvd.elastic.TensorFlowState) -> int:
        starts.append(int(state.step))
        while state.step < 4:
            wrong = state.step == 2 and len(starts) == 1
            step(tf.ones(1 + (RANK if wrong else 0)))
            state.step += 1
            state.commit()
        return int(state.step)

    assert train(state) == 4
    assert starts == [0, 2]
    assert weight.numpy().tolist() == [4.0 * SIZE]


def test_other_errors_pass() -> None:
    @hvd.elastic.run
    def train(state: hvd.elastic.TensorFlowState) -> None:
        tf.function(lambda x: tf.debugging.check_numerics(x, "wrong"))(tf.constant(np.nan))

    with pytest.raises(tf.errors.InvalidArgumentError):
        train(hvd.elastic.TensorFlowState([]))


def test_seeds_stay_each_ranks_own() -> None:
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    keras.utils.set_random_seed(0)  # all tests of this process share TensorFlow's seed
    seeds = [variable for variable in model.variables if "seed" in variable.path]
    assert len(seeds) == 1
    before = np.asarray(seeds[0])
    hvd.broadcast_variables(model.variables, root_rank=0)
    assert np.array_equal(seeds[0], before)
    assert len({item.tobytes() for item in hvd.allgather_object(np.asarray(model.weights[0]))}) == 1


class Noted(hvd.elastic.TensorFlowKerasState):
    """A state as a script may derive it."""

    def on_reset(self) -> None:
        self.resets = getattr(self, "resets", 0) + 1
        super().on_reset()


def test_derived_states_keep_what_they_override() -> None:
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    state = Noted(net, keras.optimizers.SGD(0.1), backend=keras.backend, epoch=3)
    assert isinstance(state, Noted)
    assert isinstance(state, hvd.elastic.State)
    state.on_reset()
    assert (state.resets, state.epoch) == (1, 3)
