"""One training step: micro-batches forward and backward, gradients summed, parameters and state advanced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from moefw.compose.router_steps import stays
from moefw.compose.spec.sections import TrainSpec
from moefw.core.contracts import Layout
from moefw.core.stages import Batch
from moefw.runtime.graphs import CudaGraphs, Graphs
from moefw.runtime.layer import MoELayer
from moefw.runtime.parallel.gradients import Gradients
from moefw.runtime.parallel.parts import PARTS
from moefw.system.stamps import stamp
from moefw.training.amax_meters import Meters
from moefw.training.clock import Clock
from moefw.training.faults.bad_step import SKIPPED_STEPS, BadSteps, Policy
from moefw.training.graphed_run import GraphedRun, OnFailure
from moefw.training.logits import Logits
from moefw.training.micro_batches import Run, in_order, run_of
from moefw.training.step_parameters import step_parameters
from moefw.training.step_sums import Attempt, ReducedSums, Tally
from moefw_kernels.devices import on_device


@frozen
class Votes:
    """On how many ranks the work beside steps is ``done``, and on how many it ``failed``."""

    done: int = 0
    failed: int = 0

    def decided(self, world: int) -> bool:
        """Whether all ranks are done, or one has failed."""
        return self.failed > 0 or self.done == world


class Beside(Protocol):
    """Work that goes on beside steps, such as a save: it reads weights and states, and ranks agree when it is done."""

    def votes(self) -> tuple[float, float]:
        """1.0 and 0.0 if this rank's share is done, 0.0 and 1.0 if it failed, else zeros."""

    def wait_until_read(self) -> None:
        """Return once weights and states have been read, so that they may change."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step, the same on every rank.

    ``loss`` is the global mean in nats over tokens with a loss, without auxiliary terms. ``load_LE`` is the share of
    tokens of each expert in each of the MoE ``layers``, 1.0 = fair, ``router_entropy_L`` the mean entropy of a token's
    scores over ln E, None where a router tells none. ``counts`` holds other counts, summed over layers: dropped
    choices, rows that overflowed a budget and rows that a memory policy had no space for (the step was run again then),
    and whether the step was bad. ``note`` is a line about a bad step, empty for other steps. ``routes``: the expert ids
    of this rank's tokens by layer, for each of its micro-batches, if the engine keeps them. ``tokens`` counts valid
    ones, with a loss or not. ``grad_norms`` are those of the parts of the model, whose squares add up to that of
    ``grad_norm``. ``largest_logit``: of all attentions, before the update; None: it is not measured. ``votes``: of the
    ranks on the work beside steps, as it was before the update.
    """

    loss: float
    tokens: int
    aux_losses: dict[str, float]
    counts: dict[str, float]
    grad_norm: float
    grad_norms: dict[str, float]
    layers: tuple[int, ...]
    load_LE: list[list[float]]
    router_entropy_L: list[float | None]
    largest_logit: float | None = None
    note: str = ""
    votes: Votes = Votes()
    routes: Sequence[Mapping[int, Tensor]] = ()

    @property
    def load_max_over_mean(self) -> float:
        """Load of the busiest expert of any layer, relative to the fair share."""
        return max((max(load) for load in self.load_LE), default=1.0)


class Engine:
    """Runs training steps. The order of its operations depends only on its inputs."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        *,
        clip_norm: float | None,
        on_bad_step: Policy = "stop",
        keep_routes: bool = False,
        run: Run | None = None,
        main_gradients: str = "float32",
        delay_wgrads: bool = False,
        graphs: Graphs | None = None,
        on_failed_capture: OnFailure = "stop",
        beside: Beside | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.layout = layout
        self.clip_norm = clip_norm
        self.beside = beside
        dtype: torch.dtype = getattr(torch, main_gradients)
        self.gradients = Gradients(model, layout, dtype)
        self.run: Run
        """Accumulates the gradients of a step."""
        self.watched_run: Run
        """The same, call by call: hooks on modules and tensors run in it."""
        if graphs is not None:
            self.watched_run = in_order(model, main_gradients=dtype)
            self.run = GraphedRun(self.watched_run, model.parameters(), graphs, tell=tell, on_failure=on_failed_capture)
        else:
            self.run = run or run_of(
                model,
                keep_routes=keep_routes,
                main_gradients=dtype,
                delay_wgrads=delay_wgrads,
                when_finished=self.gradients.start if self.gradients.start_early else None,
            )
            self.watched_run = self.run
        self.meters = Meters(model, layout)
        self.logits = Logits(model, layout)
        self.routers: dict[int, Any] = {
            layer.number: layer.router for layer in model.modules() if isinstance(layer, MoELayer)
        }
        self.bad_steps = BadSteps(model, optimizer, layout, on_bad_step)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        train: TrainSpec,
        beside: Beside | None = None,
        tell: Callable[[str], None] = print,
    ) -> Engine:
        """Engine that a spec's section ``train`` describes. ``beside``: work that goes on beside its steps."""
        return cls(
            model,
            optimizer,
            layout,
            clip_norm=train.clip_norm,
            on_bad_step=train.on_bad_step,
            keep_routes=train.record_routes,
            main_gradients=train.main_gradients,
            delay_wgrads=train.delay_wgrads,
            graphs=CudaGraphs() if train.graphs == "step" else None,
            on_failed_capture=train.on_failed_capture,
            beside=beside,
            tell=tell,
        )

    def step(self, batches: Sequence[Batch], lr: float, clock: Clock, *, number: int = 0) -> StepResult:
        """Train on one global batch. ``batches`` are this rank's micro-batches; ``number`` is the step in messages.

        Raises RunError if loss or gradient is not finite and ``on_bad_step`` cannot help. No state changes then, nor in
        a skipped step.
        """
        scaled = self._scaled(batches)
        made = self._attempt(scaled, clock, self.run)
        with _waiting(made.sums, clock):
            finite = made.finite
        if finite:
            self._update(made, lr, clock)
            return _result(made)
        again = partial(self._attempt, scaled, clock, self.watched_run)
        verdict = self.bad_steps.judge(number, made, again, num_batches=len(batches))
        if verdict.metric != SKIPPED_STEPS:
            self._update(verdict.attempt, lr, clock)
        result = _result(verdict.attempt)
        return replace(result, counts={**result.counts, verdict.metric: 1.0}, note=verdict.note)

    def rehearse(self, batches: Sequence[Batch], clock: Clock) -> StepResult:
        """Run a step up to its update, and drop its gradients. No later step has another bit because of it.

        It is a step that is not updated, as one that is skipped or run again, and so rests on what those rest on: a
        pass reads states and writes none, draws are made from the keys of tokens, and each step begins by clearing
        gradients and what meters have seen.
        """
        result = _result(self._attempt(self._scaled(batches), clock, self.run))  # waits for the device
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _attempt(self, batches: Sequence[Batch], clock: Clock, run: Run) -> Attempt:
        """Run the step up to its update, and run it again without budgets if one overflowed."""
        tally, sums = self._accumulate(batches, clock, run)
        first = sums
        if sums.reports_overflow and _overflowed(sums, clock):
            tally, sums = self._accumulate([replace(batch, dropless=True) for batch in batches], clock, run)
        with clock("gradients"):
            self.gradients.add_up()
            return Attempt(tally=tally, sums=sums, first=first, norms=self.gradients.norms())

    def _update(self, made: Attempt, lr: float, clock: Clock) -> None:
        """Advance parameters, optimizer, routers and meters. Nothing else writes weights or states."""
        if self.beside is not None:
            self.beside.wait_until_read()
        with clock("optimizer"):
            if self.clip_norm is not None:
                self.gradients.clip(made.norms[0], self.clip_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group.get("lr_factor", 1.0)
            self.optimizer.step()
            self.logits.clip()
            for number, layer in made.tally.layers.items():  # of this rank
                if not stays(self.routers[number]):
                    self.routers[number].update(layer.stats)
            self.meters.update()

    def _accumulate(self, batches: Sequence[Batch], clock: Clock, run: Run) -> tuple[Tally, ReducedSums]:
        """Run all micro-batches forward and backward. Return the sums of this rank's layers, and those of all."""
        self.gradients.settle()
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients.begin()
        self.meters.start()
        self.logits.start()
        tally = run(batches, clock)
        with clock("gradients"):
            aux_scale = batches[0].aux_scale
            assert aux_scale is not None, "a batch in training has its scales"
            votes = None
            if self.beside is not None:
                votes = on_device(torch.tensor(self.beside.votes(), dtype=torch.float64), tally.loss.device)
            valid_tokens = 1.0 / aux_scale
            sums = tally.reduce(
                self.layout,
                valid_tokens=valid_tokens,
                votes=votes,
                largest_logits=self.logits.reduced(),
            )
        return tally, sums

    def _scaled(self, batches: Sequence[Batch]) -> list[Batch]:
        """Batches with their scales, which the tokens of the global batch give. The host does not wait for them."""
        counts_2 = torch.zeros(2, dtype=torch.float64, device=batches[0].ids_BS.device)
        for batch in batches:
            # Ranks that share a batch count their part of it each.
            counts_2 += _counts(batch) / (batch.cp or self.layout.size("cp"))
        group = self.layout.group("dp", "cp")
        if group is not None:
            dist.all_reduce(counts_2, group=group)
        trained, valid = counts_2.round().clamp_min(1).unbind()
        scale = (1.0 / trained).float()
        # A source masks losses on all ranks and in all micro-batches of a step, or nowhere.
        share = None if batches[0].loss_mask_BS is None else (trained / valid).float()
        return [replace(batch, loss_scale=scale, trained_share=share) for batch in batches]


@contextmanager
def _waiting(sums: ReducedSums, clock: Clock) -> Iterator[None]:
    """Section in which the host waits for sums, of a device that runs behind."""
    with clock("results"):
        if sums.replay:
            # A replay returns at once: one that never ends would else be told as its sums.
            stamp(f"results of the {sums.replay}")
        yield


def _overflowed(sums: ReducedSums, clock: Clock) -> bool:
    with _waiting(sums, clock):
        return sums.overflowed()


def _counts(batch: Batch) -> Tensor:
    """Numbers of tokens with a loss and of valid tokens, ``(2)`` fp64 on the device."""
    if batch.mask_BS is None and batch.loss_mask_BS is None:
        return torch.full((2,), batch.ids_BS.numel(), dtype=torch.float64, device=batch.ids_BS.device)
    valid_BS = torch.ones_like(batch.ids_BS, dtype=torch.bool) if batch.mask_BS is None else batch.mask_BS
    trained_BS = valid_BS if batch.loss_mask_BS is None else valid_BS & batch.loss_mask_BS
    return torch.stack([trained_BS.sum(dtype=torch.float64), valid_BS.sum(dtype=torch.float64)])


def _result(made: Attempt) -> StepResult:
    sums = made.host_sums
    layers = sums.layers.values()
    tokens = max(sums.tokens, 1)
    aux = {name: value / tokens for name, value in sums.losses.items()}
    for layer in layers:
        for name, value in layer.aux_losses.items():
            aux[name] = aux.get(name, 0.0) + value.item() / tokens
    loads: list[Any] = [layer.stats["tokens_per_expert"] for layer in layers]
    shares = [(load / load.mean().clamp_min(1e-9)).tolist() for load in loads]
    return StepResult(
        loss=made.loss,
        tokens=sums.valid_tokens,
        aux_losses=aux,
        counts=made.counts,
        grad_norm=made.grad_norm,
        grad_norms=dict(zip(PARTS, made.grad_norms[1:], strict=True)),
        layers=tuple(sums.layers),
        load_LE=shares,
        router_entropy_L=[layer.router_entropy for layer in layers],
        largest_logit=sums.largest_logit,
        votes=Votes(*sums.votes),
        routes=made.tally.routes or (),
    )


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], layout: Layout) -> float:
    """Mean loss in nats over the tokens with a loss of all ranks. Every rank passes the same number of batches."""
    was_training = model.training
    model.eval()
    tally = Tally(next(model.parameters()).device)
    with step_parameters(model).in_forward():
        for number, batch in enumerate(batches, 1):
            stamp(f"evaluation batch {number} of {len(batches)}")
            # No name: what a layer returns would stay until the next batch is done.
            tally.add(replace(model(replace(batch, dropless=True)), layers={}, losses={}), number)
    sums = tally.reduce(layout)
    model.train(was_training)
    return sums.on_host.loss
