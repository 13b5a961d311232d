"""Synchronized batch normalization across all ranks, as a Keras layer."""

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

    Batch sizes may differ between ranks, because each batch is weighted by its number of elements. Gradients
    flow through the exchange. With one rank or during inference, the layer works like ``BatchNormalization``.

    Args:
        fused: Must be False, because the fused kernel uses only this rank's batch.
        **kwargs: Arguments of ``keras.layers.BatchNormalization``.

    Raises:
        ArgumentError: ``fused`` is True or ``None``.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ArgumentError("SyncBatchNormalization does not support the fused kernel. Pass fused=False.")
        check_moments(keras.layers.BatchNormalization)
        super().__init__(**kwargs)
        self.fused = False  # Otherwise Keras 2 may use the fused kernel. Keras 3 has none.

    def _moments(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return each channel's mean and variance over all ranks. Keras calls this method during training."""
        mean, variance = super()._moments(inputs, *args, **options)
        mask = options["mask"] if "mask" in options else args[-1]  # Keras 2 passes it by keyword.
        if session.engine().size == 1:
            return mean, variance
        if mask is None:
            count = tf.cast(tf.size(inputs) / tf.size(mean), mean.dtype)
        else:
            # Number of unmasked positions, times the number of elements per channel at each position, which
            # is the product of the lengths of the other axes.
            positions = tf.cast(tf.reduce_sum(tf.cast(mask, tf.int32)), mean.dtype)
            per_position = tf.size(inputs) / tf.maximum(tf.size(mask) * tf.size(mean), 1)
            count = positions * tf.cast(per_position, mean.dtype)
        # An empty batch has no mean, so use zero. In float64, the difference of squares yields the variance
        # to full float32 precision.
        mean64, variance64 = (tf.cast(tf.where(count > 0, stat, 0), tf.float64) for stat in (mean, variance))
        weight, center = tf.cast(count, tf.float64), tf.zeros_like(mean64)
        if inputs.dtype == tf.float64:  # For more precision, use squared deviations from the mean.
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
