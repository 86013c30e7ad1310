"""One training step: micro-batches forward and backward, gradients summed, parameters and router state advanced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefw.core.contracts import Layout
from moefw.core.errors import RunError
from moefw.core.naming import routers
from moefw.core.stages import Batch, LayerStats
from moefw.training.gradients import clip, global_norm, split_by_mesh, sum_gradients

TOKEN_AXES = ("dp", "cp", "tp")
"""Axes along which ranks hold different tokens."""


class Clock(Protocol):
    """Something that measures named sections."""

    def __call__(self, section: str) -> AbstractContextManager[None]:
        """Measure the section that follows."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did, the same on every rank.

    ``loss`` is the global mean over tokens in nats, without auxiliary terms; ``load_LE`` the share of tokens of each
    expert in each MoE layer, 1.0 = fair.
    """

    loss: float
    aux_losses: dict[str, float]
    grad_norm: float
    load_LE: list[list[float]]

    @property
    def load_max_over_mean(self) -> float:
        """The busiest expert of any layer against the fair share."""
        return max((max(load) for load in self.load_LE), default=1.0)


class Tally:
    """Sums over micro-batches and ranks: losses, tokens, and each layer's statistics, in fp64."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)
        self.layers: dict[int, LayerStats] = {}

    def add(self, loss_sum: Tensor, num_tokens: Tensor, layers: dict[int, LayerStats]) -> None:
        """Add one micro-batch."""
        self.loss += torch.stack([loss_sum.detach().double(), num_tokens.double()])
        for layer, new in layers.items():
            old = self.layers.get(layer)
            stats = {k: v.detach().double() + (old.stats[k] if old else 0.0) for k, v in new.stats.items()}
            aux = {k: v.double() + (old.aux_losses[k] if old else 0.0) for k, v in new.aux_losses.items()}
            self.layers[layer] = LayerStats(stats=stats, aux_losses=aux)

    def reduce(self, layout: Layout) -> None:
        """Add up over all ranks that hold different tokens, in one exchange."""
        group = layout.group(*TOKEN_AXES)
        if group is None:
            return
        tensors = [self.loss]
        for layer in self.layers.values():
            tensors += [*layer.stats.values(), *layer.aux_losses.values()]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))


class Engine:
    """Advances a model. The order of everything that it does depends on nothing but its inputs."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout, *, clip_norm: float | None
    ) -> None:
        self.model, self.optimizer, self.layout, self.clip_norm = model, optimizer, layout, clip_norm
        self.dense, self.experts = split_by_mesh(model)
        self.routers = routers(model)

    def step(self, batches: Sequence[Batch], lr: float, clock: Clock) -> StepResult:
        """Train on one global batch, of which ``batches`` are this rank's micro-batches.

        Raises RunError if the gradient is not finite; nothing has been changed then.
        """
        device = batches[0].ids_BS.device
        tally = Tally(device)
        scale = self._loss_scale(batches)
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            with clock("forward"):
                output = self.model(replace(batch, loss_scale=scale))
            with clock("backward"):
                (output.loss_sum * scale).backward()
            tally.add(output.loss_sum, output.num_tokens, output.layers)
        with clock("gradients"):
            sum_gradients(self.dense, self.experts, self.layout)
            norm = global_norm(self.dense, self.experts, self.layout)
            if not torch.isfinite(norm):
                raise RunError(f"the gradient's norm is {norm.item()}.", "Lower train.lr, or look at the data.")
            tally.reduce(self.layout)
        with clock("optimizer"):
            if self.clip_norm is not None:
                clip([*self.dense, *self.experts], norm, self.clip_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            for router, layer in zip(self.routers.values(), tally.layers.values(), strict=True):
                router.update(layer.stats)
        return _result(tally, norm)

    def _loss_scale(self, batches: Sequence[Batch]) -> Tensor:
        """Return 1 / (valid tokens of the global batch), fp32."""
        counts = [batch.ids_BS.numel() if batch.mask_BS is None else int(batch.mask_BS.sum()) for batch in batches]
        tokens = torch.tensor(sum(counts), dtype=torch.float64, device=batches[0].ids_BS.device)
        group = self.layout.group(*TOKEN_AXES)
        if group is not None:
            dist.all_reduce(tokens, group=group)
        return (1.0 / tokens.clamp_min(1)).float()


def _result(tally: Tally, norm: Tensor) -> StepResult:
    loss_sum, tokens = tally.loss.tolist()
    aux: dict[str, float] = {}
    for layer in tally.layers.values():
        for name, value in layer.aux_losses.items():
            aux[name] = aux.get(name, 0.0) + value.item() / max(tokens, 1)
    loads: list[Any] = [layer.stats["tokens_per_expert"] for layer in tally.layers.values()]
    shares = [(load / load.mean().clamp_min(1e-9)).tolist() for load in loads]
    return StepResult(loss=loss_sum / max(tokens, 1), aux_losses=aux, grad_norm=norm.item(), load_LE=shares)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], layout: Layout) -> float:
    """Return the mean loss over the valid tokens of all ranks, in nats. Every rank passes equally many batches."""
    was_training = model.training
    model.eval()
    tally = Tally(next(model.parameters()).device)
    for batch in batches:
        output = model(batch)
        tally.add(output.loss_sum, output.num_tokens, {})
    tally.reduce(layout)
    model.train(was_training)
    loss_sum, tokens = tally.loss.tolist()
    return float(loss_sum / max(tokens, 1))
