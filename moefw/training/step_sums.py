"""Results of a step before its update: sums over micro-batches and ranks, and norms of the gradient.

A :class:`Tally` adds up what micro-batches make on this rank. Reduced, it becomes :class:`ReducedSums`, which are those
of all ranks, and once the host has read these, :class:`HostSums`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, final

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
LOSS: Final = "loss"
LOSSES: Final = "losses"
STATS: Final = "stats"
AUX_LOSSES: Final = "aux_losses"
VOTES: Final = "votes"
LARGEST_LOGIT: Final = "largest logit"
VALID_TOKENS: Final = "valid tokens"
Key = tuple[str, int, str]
"""A kind of sum, of those above, the layer and the name."""


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
    """Sums of this rank over the micro-batches of a step, on its device: losses, tokens, and its layers', in fp64.

    ``routes``: the expert ids of each micro-batch by layer; None: they are not kept. ``replay``: the replay that makes
    these sums, which a stamp of the wait for them names; empty: passes with stamps of their own do.
    """

    def __init__(self, device: torch.device, *, keep_routes: bool = False) -> None:
        self.routes: list[dict[int, Tensor]] | None = [] if keep_routes else None
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)
        """The sum of the losses of tokens, and the number of these tokens."""
        self.losses: dict[str, Tensor] = {}
        self.layers: dict[int, LayerTally] = {}
        self.replay = ""

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
        *,
        valid_tokens: Tensor | None = None,
        votes: Tensor | None = None,
        largest_logits: Mapping[int, Tensor] | None = None,
    ) -> ReducedSums:
        """Sum over all ranks that hold different tokens, in place, in one all-reduce.

        Return the sums with those of the other stages of a pipeline, on their way to the host. ``valid_tokens``: the
        number of valid tokens of all ranks, which is copied with them. ``votes``: numbers of this rank, fp64, which are
        summed over all ranks with the rest; given in all steps, or in none: a sum of many ranks rounds by its place in
        the all-reduce. ``largest_logits``: that of each layer of this rank, fp64, the same on all ranks that have the
        layer.
        """
        named = self._named()
        if votes is not None:
            named[VOTES, 0, ""] = votes
        group = layout.group(*STAGE)
        if group is not None:
            all_reduce_flat(list(named.values()), group)
        named |= {(LARGEST_LOGIT, layer, ""): largest for layer, largest in (largest_logits or {}).items()}
        of_all_stages = dict(_of_all_stages(named, layout.group("pp")))
        if valid_tokens is not None:
            of_all_stages[VALID_TOKENS, 0, ""] = valid_tokens
        return ReducedSums(of_all_stages, self.replay)

    def _named(self) -> dict[Key, Tensor]:
        """All sums, those of layers with the layer's number."""
        named: dict[Key, Tensor] = {(LOSS, 0, ""): self.loss}
        named |= {(LOSSES, 0, name): value for name, value in self.losses.items()}
        for number, layer in sorted(self.layers.items()):
            named |= {(STATS, number, name): value for name, value in layer.stats.items()}
            named |= {(AUX_LOSSES, number, name): value for name, value in layer.aux_losses.items()}
        return named


@final
class ReducedSums:
    """Sums over all ranks and all stages of a pipeline, on their way to the host. ``replay``: see :class:`Tally`."""

    def __init__(self, named: Mapping[Key, Tensor], replay: str) -> None:
        self.replay = replay
        self._keys = [*named]
        self._copy = HostCopy([*named.values()])

    @property
    def reports_overflow(self) -> bool:
        """Whether something reports rows that exceed a budget."""
        return any(name in OVERFLOWS for _, _, name in self._keys)

    def overflowed(self) -> bool:
        """Whether rows exceeded a budget. Waits for the copy."""
        return any(map(self.on_host.counts.get, OVERFLOWS))

    @cached_property
    def on_host(self) -> HostSums:
        """The sums in host memory. Waits for the copy."""
        found: dict[str, dict[tuple[int, str], Tensor]] = defaultdict(dict)
        for (kind, number, name), value in zip(self._keys, self._copy.read(), strict=True):
            found[kind][number, name] = value
        layers: dict[int, LayerTally] = {}
        for (number, name), value in found[STATS].items():
            layers.setdefault(number, LayerTally()).stats[name] = value
        for (number, name), value in found[AUX_LOSSES].items():
            layers.setdefault(number, LayerTally()).aux_losses[name] = value
        (loss,) = found[LOSS].values()
        loss_sum, tokens = loss.tolist()
        return HostSums(
            loss_sum=loss_sum,
            tokens=tokens,
            losses={name: value.item() for (_, name), value in found[LOSSES].items()},
            layers=layers,
            valid_tokens=sum(round(value.item()) for value in found[VALID_TOKENS].values()),
            largest_logit=max((value.item() for value in found[LARGEST_LOGIT].values()), default=None),
            votes=[round(vote) for value in found[VOTES].values() for vote in value.tolist()],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class HostSums:
    """Sums of a step in host memory.

    ``tokens``: those of the global batch with a loss; ``valid_tokens``: with a loss or not. ``largest_logit``: of all
    layers whose attentions are measured; None: there are none. ``votes``: what ranks tell of work beside the step,
    summed over them (:class:`moefw.training.engine.Beside`); empty: they tell nothing.
    """

    loss_sum: float
    tokens: float
    losses: Mapping[str, float]
    layers: Mapping[int, LayerTally]
    valid_tokens: int
    largest_logit: float | None
    votes: Sequence[int]

    @property
    def loss(self) -> float:
        """The mean loss over tokens, in nats."""
        return self.loss_sum / max(self.tokens, 1)

    @cached_property
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
    """The sums of this rank's layers, over all ranks that share them."""
    sums: ReducedSums
    first: ReducedSums
    """The sums before the step was run again without budgets, or ``sums``."""
    norms: Tensor
    """Of the whole gradient, and of each part of the model: see :meth:`Gradients.norms`."""

    @property
    def host_sums(self) -> HostSums:
        """The sums in host memory."""
        return self.sums.on_host

    @property
    def counts(self) -> dict[str, float]:
        """The scalar statistics of the first run by name, summed over layers."""
        return self.first.on_host.counts

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
        return self.host_sums.loss

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite, the same on every rank."""
        return all(map(math.isfinite, (self.host_sums.loss_sum, self.host_sums.tokens, self.grad_norm)))
