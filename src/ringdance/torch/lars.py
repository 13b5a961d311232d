"""LARS: momentum SGD with a rate for each layer, for very large batches; and groups of parameters.

You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", arXiv 1708.03888.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringdance.errors import ArgumentError


class LARS(torch.optim.Optimizer):
    """Momentum SGD whose rate follows, layer by layer, the norms of weights and gradients.

    For each parameter with more than one dimension::

        trust = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)    1 where a norm is 0
        v = momentum * v + lr * trust * (g + weight_decay * w)
        w = w - v

    Biases, scales and offsets of normalization have one dimension: there trust is 1 and nothing decays.

    Args:
        params: parameters or groups, as for any optimizer of torch.
        lr: learning rate.
        momentum: factor of the last step.
        weight_decay: L2; within the trust ratio, as in the paper.
        trust_coefficient: the paper's eta.
        eps: added to the denominator of the trust ratio.

    Raises:
        ArgumentError: a negative argument.
    """

    def __init__(
        self, params: Any, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0,
        trust_coefficient: float = 0.001, eps: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient, "eps": eps,
        }  # fmt: skip
        for name, value in defaults.items():
            if value < 0:
                raise ArgumentError(f"LARS: {name}={value}: give 0 or more.")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            used = [one for one in group["params"] if one.grad is not None]
            for layer in (True, False):
                chosen = [one for one in used if (one.ndim > 1) is layer]
                if chosen:
                    self._update(chosen, group, layer)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any], layer: bool) -> None:
        """Update parameters by a few calls for all of them, without waiting for a GPU."""
        gradients: Any = [one.grad for one in parameters]
        rate, decay = group["lr"], group["weight_decay"]
        velocities = []
        for one in parameters:
            state = self.state[one]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(one)
            velocities.append(state["momentum_buffer"])
        torch._foreach_mul_(velocities, group["momentum"])
        if layer:  # without temporary copies of all gradients
            rates = self._trust(parameters, gradients, group) * rate
            torch._foreach_addcmul_(velocities, gradients, list(rates.unbind()))
            if decay:
                torch._foreach_addcmul_(velocities, parameters, list((rates * decay).unbind()))
        else:
            torch._foreach_add_(velocities, gradients, alpha=rate)
        torch._foreach_sub_(parameters, velocities)

    def _trust(self, parameters: list[Tensor], gradients: Any, group: dict[str, Any]) -> Tensor:
        # In float32: squares of float16 overflow.
        weights, slopes = (
            torch.stack(torch._foreach_norm(some, 2, torch.float32)) for some in (parameters, gradients)
        )
        below = slopes + group["weight_decay"] * weights + group["eps"]
        ratio = group["trust_coefficient"] * weights / below
        ratio = torch.where((weights > 0) & (slopes > 0), ratio, torch.ones_like(ratio))
        return ratio.to(parameters[0].dtype)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: weights that decay; biases and normalization, which do not.

    Args:
        model: its trainable parameters with one dimension do not decay.
        weight_decay: of the others.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    return [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
    ]
