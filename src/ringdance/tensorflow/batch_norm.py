"""Batch normalization over the batches of all ranks, as a Keras layer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringdance.errors import ArgumentError
from ringdance.tensorflow._private import check_moments
from ringdance.tensorflow.operations import allreduce
from ringdance.training import session
from ringdance.training.exports import Sum

keras: Any = tf.keras  # Keras 3, or 2 with TF_USE_LEGACY_KERAS=1


@keras.utils.register_keras_serializable("ringdance")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras's ``BatchNormalization`` with training statistics computed over all ranks' batches.

    Batch sizes may differ between ranks: each batch counts by its number of elements. Gradients flow through
    the exchange. With one rank and in inference, this is the plain layer.

    Args:
        fused: Must be False, because the fused kernel sees only this rank's batch.
        **kwargs: Arguments of ``keras.layers.BatchNormalization``.

    Raises:
        ArgumentError: ``fused`` is True or ``None``.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ArgumentError("SyncBatchNormalization cannot be fused. Omit fused or pass fused=False.")
        check_moments(keras.layers.BatchNormalization)
        super().__init__(**kwargs)
        self.fused = False  # Keras 2 would choose on its own. Keras 3 has no fused kernel.

    def _moments(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return each channel's mean and variance over all ranks. Keras calls this in training."""
        mean, variance = super()._moments(inputs, *args, **options)
        mask = options["mask"] if "mask" in options else args[-1]  # By name in Keras 2, last in Keras 3.
        if session.engine().size == 1:
            return mean, variance
        if mask is None:
            count = tf.cast(tf.size(inputs) / tf.size(mean), mean.dtype)
        else:
            # Every position that the mask keeps holds this many elements of a channel: the product of the
            # other axes' lengths.
            positions = tf.cast(tf.reduce_sum(tf.cast(mask, tf.int32)), mean.dtype)
            per_position = tf.size(inputs) / tf.maximum(tf.size(mask) * tf.size(mean), 1)
            count = positions * tf.cast(per_position, mean.dtype)
        # An empty batch has no mean and counts as zero. In double precision, a difference of squares has all
        # digits of the variance that float32 can represent.
        mean64, variance64 = (tf.cast(tf.where(count > 0, stat, 0), tf.float64) for stat in (mean, variance))
        weight, center = tf.cast(count, tf.float64), tf.zeros_like(mean64)
        if inputs.dtype == tf.float64:  # float64 has more digits: use squared distances from the mean.
            weighted = tf.stop_gradient(tf.stack([mean64, tf.ones_like(mean64)]) * weight)
            sums = allreduce(weighted, op=Sum, name=f"sync_batch_norm.{self.name}.centre")
            center = sums[0] / sums[1]
        mean64 -= center
        shares = tf.stack([mean64, variance64 + mean64 * mean64, tf.ones_like(mean64)]) * weight
        total = allreduce(shares, op=Sum, name=f"sync_batch_norm.{self.name}")
        joint_mean = total[0] / total[2]
        # Rounding can make the difference negative if all inputs are equal.
        joint_variance = tf.maximum(total[1] / total[2] - joint_mean * joint_mean, 0)
        return tf.cast(joint_mean + center, mean.dtype), tf.cast(joint_variance, mean.dtype)
