"""Results of a step before its update: sums over micro-batches and ranks, and norms of the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.contracts import Layout
from moefw.core.stages import LayerStats, Output
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.memory.static_rows import UNSAVED
from moefw.runtime.parallel.gradients import all_reduce_flat
from moefw.runtime.parallel.holders import STAGE
from moefw.runtime.pipeline.stage import Passed
from moefw.runtime.router_entropy import ROUTER_ENTROPY
from moefw_kernels.devices import HostCopy

OVERFLOWS: Final = ("overflow", UNSAVED)
"""Statistics of rows for which a step is run again without budgets."""
Key = tuple[str, int, str]
"""A kind of sum, the layer and the name."""


@dataclass(slots=True, eq=False)
class LayerTally:
    """Sums of one layer's statistics and auxiliary losses, in fp64."""

    stats: dict[str, Tensor] = field(default_factory=dict)
    aux_losses: dict[str, Tensor] = field(default_factory=dict)

    @property
    def router_entropy(self) -> float | None:
        """Mean entropy of the scores of a token over ln E, from 0 to 1; None if the router tells none."""
        if ROUTER_ENTROPY not in self.stats:
            return None
        total, tokens = self.stats[ROUTER_ENTROPY].tolist()
        largest = math.log(len(self.stats["tokens_per_expert"]))
        return total / tokens / largest if tokens and largest else None

    def copied(self) -> LayerTally:
        """These sums in memory of their own."""
        stats = {name: value.clone() for name, value in self.stats.items()}
        aux_losses = {name: value.clone() for name, value in self.aux_losses.items()}
        return LayerTally(stats=stats, aux_losses=aux_losses)

    def add(self, new: LayerStats) -> None:
        """Add the values of one forward."""
        for total, values in ((self.stats, new.stats), (self.aux_losses, new.aux_losses)):
            for name, value in values.items():
                if name in total:
                    total[name].add_(value.detach())
                else:
                    total[name] = value.detach().to(torch.float64, copy=True)  # it changes in place


class Tally:
    """Sums over micro-batches and ranks: losses, tokens, and each layer's statistics, in fp64.

    ``routes``: the expert ids of each micro-batch by layer, on this rank; None: they are not kept. ``layers`` are this
    rank's; those on the host are those of all stages of a pipeline.
    """

    def __init__(self, device: torch.device, *, keep_routes: bool = False) -> None:
        self.routes: list[dict[int, Tensor]] | None = [] if keep_routes else None
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)
        self.losses: dict[str, Tensor] = {}
        self.layers: dict[int, LayerTally] = {}
        self.valid_tokens = 0
        """Those of the global batch, with a loss or not, once the sums are on the host."""
        self.largest_logits: dict[int, Tensor] = {}
        """That of each layer, of those whose attentions are measured, once the sums are on the host."""
        self.replay = ""
        """The replay that makes these sums, which a stamp of the wait for them names; empty: passes with own stamps."""
        self.votes: Tensor | None = None
        """What ranks tell of work beside the step, summed over them: see :class:`moefw.training.engine.Beside`."""

    def copied(self) -> Tally:
        """These sums in memory of their own."""
        copy = Tally(self.loss.device)
        copy.loss = self.loss.clone()
        copy.losses = {name: value.clone() for name, value in self.losses.items()}
        copy.layers = {number: layer.copied() for number, layer in self.layers.items()}
        return copy

    def add(self, output: Output | Passed, number: int) -> None:
        """Add what a stage, or the whole model, makes of micro-batch ``number``."""
        if isinstance(output, Output):
            self.loss += torch.stack([output.loss_sum.detach().double(), output.num_tokens.double()])
            for name, loss in output.losses.items():
                self.losses[name] = self.losses.get(name, 0.0) + loss.detach().double()
        for layer, new in output.layers.items():
            self.layers.setdefault(layer, LayerTally()).add(new)
        if self.routes is not None:
            self.routes += [{} for _ in range(number + 1 - len(self.routes))]
            self.routes[number] |= {layer: new.expert_ids_TK for layer, new in output.layers.items()}

    def reduce(
        self,
        layout: Layout,
        valid_tokens: Tensor | None = None,
        votes: Tensor | None = None,
        largest_logits: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Sum over all ranks that hold different tokens, in one all-reduce, and start to copy the sums to the host.

        ``valid_tokens``: the number of valid tokens of all ranks, which is copied with them. ``votes``: numbers of this
        rank, fp64, which are summed over all ranks with the rest; given in all steps, or in none: a sum of many ranks
        rounds by its place in the all-reduce. ``largest_logits``: that of each layer of this rank, fp64, the same on
        all ranks that have the layer.
        """
        self.votes = votes
        group = layout.group(*STAGE)
        named = self._named()
        if group is not None:
            all_reduce_flat(list(named.values()), group)
        named |= {("largest logit", layer, ""): largest for layer, largest in (largest_logits or {}).items()}
        self._reduced = _of_all_stages(named, layout.group("pp"))
        if valid_tokens is not None:
            self._reduced = {**self._reduced, ("valid tokens", 0, ""): valid_tokens}
        self._copy = HostCopy([*self._reduced.values()])

    def _named(self) -> dict[Key, Tensor]:
        """All sums, those of layers with the layer's number."""
        named: dict[Key, Tensor] = {("loss", 0, ""): self.loss}
        if self.votes is not None:
            named["votes", 0, ""] = self.votes
        named |= {("losses", 0, name): value for name, value in self.losses.items()}
        for number, layer in sorted(self.layers.items()):
            for kind, values in (("stats", layer.stats), ("aux_losses", layer.aux_losses)):
                named |= {(kind, number, name): value for name, value in values.items()}
        return named

    def on_host(self) -> Tally:
        """Sums in host memory, once they are reduced: those of all stages of a pipeline."""
        on_host = Tally(torch.device("cpu"))
        for (kind, number, name), value in zip(self._reduced, self._copy.read(), strict=True):
            if kind == "loss":
                on_host.loss = value
            elif kind == "valid tokens":
                on_host.valid_tokens = round(value.item())
            elif kind == "votes":
                on_host.votes = value
            elif kind == "largest logit":
                on_host.largest_logits[number] = value
            elif kind == "losses":
                on_host.losses[name] = value
            else:
                getattr(on_host.layers.setdefault(number, LayerTally()), kind)[name] = value
        return on_host

    @property
    def reports_overflow(self) -> bool:
        """Whether something reports rows that exceed a budget."""
        return any(name in OVERFLOWS for _, _, name in self._reduced)

    def overflowed(self) -> bool:
        """Whether rows exceeded a budget. Waits for the host's copy."""
        return any(map(self.on_host().counts().get, OVERFLOWS))

    def counts(self) -> dict[str, float]:
        """Scalar statistics by name, summed over layers."""
        totals: dict[str, float] = {}
        for layer in self.layers.values():
            for name, value in layer.stats.items():
                if not value.dim():
                    totals[name] = totals.get(name, 0.0) + value.item()
        return totals


def _of_all_stages(named: Mapping[Key, Tensor], group: ProcessGroup | None) -> Mapping[Key, Tensor]:
    """Sums of all stages of a pipeline, in order of layers. Collective over pp."""
    if group is None:
        return named
    # Stages have sums of their own layers only. A sum that a stage does not have is zero there, so that one all-reduce
    # over the same keys in the same order brings all of them to every rank.
    by_stage = everywhere([[*key, *value.shape] for key, value in named.items()], group)
    shapes = {(kind, int(layer), str(name)): tuple(shape) for own in by_stage for kind, layer, name, *shape in own}
    like = next(iter(named.values()))
    sums = {key: named.get(key, like.new_zeros(shape)) for key, shape in sorted(shapes.items(), key=_by_layer)}
    all_reduce_flat(list(sums.values()), group)
    return sums


def _by_layer(entry: tuple[Key, object]) -> tuple[int, Key]:
    return entry[0][1], entry[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Attempt:
    """A step up to its update: its sums, and the norms of the gradient that it leaves on the parameters."""

    tally: Tally
    first: Tally
    """The sums before the step was run again without budgets, or ``tally``."""
    norms: Tensor
    """Of the whole gradient, and of each part of the model: see :meth:`Gradients.norms`."""

    @cached_property
    def host_sums(self) -> Tally:
        """The sums in host memory."""
        return self.tally.on_host()

    @property
    def counts(self) -> dict[str, float]:
        """The scalar statistics of the first run by name, summed over layers."""
        return (self.host_sums if self.first is self.tally else self.first.on_host()).counts()

    @cached_property
    def grad_norms(self) -> list[float]:
        """The norms in host memory."""
        return [float(norm) for norm in self.norms.tolist()]

    @property
    def grad_norm(self) -> float:
        """The norm of the whole gradient, in host memory."""
        return self.grad_norms[0]

    @property
    def loss(self) -> float:
        """The global mean loss over tokens, in nats."""
        loss_sum, tokens = self.host_sums.loss.tolist()
        return float(loss_sum / max(tokens, 1))

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite, the same on every rank."""
        return all(map(math.isfinite, (*self.host_sums.loss.tolist(), self.grad_norm)))
