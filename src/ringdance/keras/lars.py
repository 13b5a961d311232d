"""LARS for Keras 3: momentum SGD with a learning rate for each layer, for very large batches.

You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", arXiv 1708.03888.
"""

from __future__ import annotations

from typing import Any

from ringdance.errors import ArgumentError
from ringdance.keras.library import KERAS2, keras, ops


class LARS(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Momentum SGD whose rate follows, layer by layer, the norms of weights and gradients.

    For each variable with more than one dimension::

        trust = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon)    1 where a norm is 0
        v = momentum * v + learning_rate * trust * (g + weight_decay * w)
        w = w - v

    Biases, scales and offsets of normalization have one dimension: there trust is 1 and nothing decays.

    Args:
        learning_rate: a number or a schedule.
        momentum: factor of the last step.
        weight_decay: L2; within the trust ratio, as in the paper.
        trust_coefficient: the paper's eta.
        epsilon: added to the denominator of the trust ratio.
        exclude: variables with one of these words in their path are treated like biases.
        kwargs: of ``keras.optimizers.Optimizer``, such as ``gradient_accumulation_steps``.

    Raises:
        ArgumentError: with Keras 2.
    """

    def __init__(
        self, learning_rate: Any = 0.1, momentum: float = 0.9, weight_decay: float = 0.0,
        trust_coefficient: float = 0.001, epsilon: float = 0.0,
        exclude: tuple[str, ...] = (), **kwargs: Any,
    ) -> None:
        if KERAS2:
            raise ArgumentError("LARS is for Keras 3: unset TF_USE_LEGACY_KERAS.")
        super().__init__(learning_rate=learning_rate, weight_decay=None, **kwargs)
        self.momentum = momentum
        self.decay = weight_decay  # not the base class's weight_decay, which takes it off the weights
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon
        self.exclude = tuple(exclude)

    def build(self, variables: Any) -> None:
        """Make the velocities."""
        if self.built:
            return
        super().build(variables)
        self.velocities = [self.add_variable_from_reference(one, name="velocity") for one in variables]
        # Here, since TensorFlow's variables in update_step() have other names.
        self.adapts = [
            len(one.shape) > 1 and not any(word in getattr(one, "path", one.name) for word in self.exclude)
            for one in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        index = self._get_variable_index(variable)
        velocity = self.velocities[index]
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        if self.adapts[index]:
            # Squares of float16 overflow.
            weights, slope = (
                ops.sqrt(ops.sum(ops.square(ops.cast(one, "float32")))) for one in (variable, gradient)
            )
            below = slope + self.decay * weights + self.epsilon
            both = ops.logical_and(weights > 0, slope > 0)
            safe = ops.where(both, below, ops.ones_like(below))
            trust = ops.where(both, self.trust_coefficient * weights / safe, ops.ones_like(below))
            rate = rate * ops.cast(trust, variable.dtype)
            gradient = gradient + self.decay * variable
        step = self.momentum * velocity + rate * gradient
        self.assign(velocity, step)
        self.assign_sub(variable, step)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for saving."""
        config: dict[str, Any] = super().get_config()
        names = ("momentum", "trust_coefficient", "epsilon")
        own = {name: getattr(self, name) for name in names}
        return {**config, **own, "weight_decay": self.decay, "exclude": list(self.exclude)}
