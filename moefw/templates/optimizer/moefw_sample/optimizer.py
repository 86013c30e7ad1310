"""The optimizer of ``sample``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


class SampleOptimizer(torch.optim.Optimizer):
    """Subtracts a running sum of gradients, times the learning rate. The sum is fp32, as the parameters are."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, beta: float) -> None:
        super().__init__(list(parameters), {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update the parameters that have a gradient. The learning rate is that of this step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(group["beta"]).add_(parameter.grad)
                parameter.add_(state["momentum"] * -group["lr"])
