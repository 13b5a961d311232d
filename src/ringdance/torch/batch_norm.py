"""Synchronized batch normalization across all ranks, on CPU and GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringdance.errors import ArgumentError
from ringdance.torch import operations as ops
from ringdance.torch._private import BatchNorm, compiler_disable
from ringdance.training import session
from ringdance.training.exports import Sum


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


class _Normalise(torch.autograd.Function):
    """Normalizes each channel by its mean and variance over all ranks.

    Each rank contributes the count, sum and sum of squares of its batch. Batches may differ in size or be
    empty.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        axes = [axis for axis in range(input.dim()) if axis != 1]
        channels = input.shape[1]
        wide = input if input.dtype is torch.float64 else input.float()
        count = wide.numel() // channels
        if count:
            variance, mean = torch.var_mean(wide, axes, correction=0)
        else:
            variance = mean = wide.new_zeros(channels)
        # Computed in float64, the difference of squares gives the variance to the full precision of float32.
        mean, variance, centre = mean.double(), variance.double(), mean.new_zeros(channels).double()
        if input.dtype is torch.float64:  # For more precision, use squared deviations from the mean.
            own = torch.cat([mean.new_ones(1), mean]) * count
            every = ops.allreduce(own, name="sync_batch_norm.centre", op=Sum)
            centre = every[1:] / every[0]
        apart = mean - centre
        own = torch.cat([mean.new_ones(1), apart, variance + apart * apart]) * count
        every = ops.allreduce(own, name="sync_batch_norm.statistics", op=Sum)
        total = every[0]
        joined, square = (every[1:] / total).view(2, channels)
        spread = (square - joined * joined).clamp(min=0)
        mean, variance = (joined + centre).to(wide.dtype), spread.to(wide.dtype)
        scale = torch.rsqrt(variance + eps)
        normal = (wide - _per_channel(mean, input)) * _per_channel(scale, input)
        output = normal
        if weight is not None:
            output = output * _per_channel(weight, input)
        if bias is not None:
            output = output + _per_channel(bias, input)
        ctx.save_for_backward(normal, scale, weight)
        ctx.total = float(total)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    @compiler_disable
    def backward(ctx: Any, *gradients: Any) -> Any:
        normal, scale, weight = ctx.saved_tensors
        incoming = gradients[0]
        axes = [axis for axis in range(incoming.dim()) if axis != 1]
        wide = incoming.to(normal.dtype)
        of_bias, of_weight = wide.sum(axes), (wide * normal).sum(axes)
        sums = torch.stack([of_bias, of_weight])
        sums = ops.allreduce(sums, name="sync_batch_norm.gradients", op=Sum) / ctx.total
        of_input = None
        if ctx.needs_input_grad[0]:
            inner = wide - _per_channel(sums[0], incoming) - normal * _per_channel(sums[1], incoming)
            factor = scale if weight is None else scale * weight
            of_input = (inner * _per_channel(factor, incoming)).to(incoming.dtype)
        return of_input, *(
            gradient.to(weight.dtype) if wanted and weight is not None else None
            for gradient, wanted in zip((of_weight, of_bias), ctx.needs_input_grad[1:3], strict=True)
        ), None


class SyncBatchNorm(BatchNorm):  # type: ignore[misc]
    """Batch normalization with statistics computed over the batches of all ranks.

    Replaces ``BatchNorm1d``, ``2d`` and ``3d`` for input of shape (N, C), (N, C, L), ... with up to five
    dimensions. N may differ between ranks. With one rank, or in evaluation mode with running statistics, it
    works like plain batch norm. The gradients of weight and bias cover only this rank's elements.
    DistributedOptimizer averages them.

    Args:
        num_features: Number of channels C.
        eps: Value added to the variance.
        momentum: Weight of new statistics in the running statistics, or ``None`` for a cumulative average.
        affine: If True, weight and bias are trained.
        track_running_stats: If True, running statistics are kept.

    Raises:
        ArgumentError: The input has fewer than two dimensions.
    """

    def __init__(  # The same arguments as in Horovod.
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replace each batch norm layer in ``module``, including torch's ``SyncBatchNorm``, with this class.

        Parameters and buffers stay the same objects. Returns ``module``, or its replacement if ``module`` is
        itself a batch norm layer.
        """
        result = module
        if isinstance(module, (BatchNorm, torch.nn.SyncBatchNorm)) and not isinstance(module, cls):
            result = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
            )
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                setattr(result, name, getattr(module, name))
            result.training = module.training
        for name, child in module.named_children():
            result.add_module(name, cls.convert_sync_batchnorm(child))
        return result

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentError(
                f"SyncBatchNorm needs input with at least 2 dimensions, but got shape {tuple(input.shape)}."
            )

    @compiler_disable
    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, with the same shape and dtype."""
        self._check_input_dim(input)
        own = self.training or self.running_mean is None
        if not own or session.engine().size == 1:
            return super().forward(input)
        apply: Any = _Normalise.apply
        output, mean, variance, total = apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._track(mean, variance, float(total))
        return output

    def _track(self, mean: Tensor, variance: Tensor, total: float) -> None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (total / max(total - 1.0, 1.0))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)
