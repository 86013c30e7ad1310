"""Forward and backward of the micro-batches of one step, as the engine calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import nn

from moefw.core.records import PASSES, Action, Pair
from moefw.core.stages import Batch
from moefw.runtime.pipeline.player import Player
from moefw.runtime.pipeline.stage import Pipelined
from moefw.system.stamps import stamp
from moefw.training.clock import Clock
from moefw.training.step_parameters import step_parameters
from moefw.training.step_sums import Tally


class Run(Protocol):
    """Accumulates the gradients of micro-batches."""

    def __call__(self, batches: Sequence[Batch], clock: Clock) -> Tally:
        """Run forward and backward of all batches. Return the sums of this rank, added in the order of the batches."""


WhenFinished = Callable[[Sequence[nn.Parameter]], None]
"""Called with parameters whose gradients no later pass of the step changes."""


def run_of(
    model: nn.Module,
    *,
    keep_routes: bool = False,
    main_gradients: torch.dtype = torch.float32,
    delay_wgrads: bool = False,
    when_finished: WhenFinished | None = None,
) -> Run:
    """How a model trains: its pipeline, or one micro-batch behind the other.

    ``keep_routes``: see :class:`Tally`. ``main_gradients``: see :func:`step_parameters`. ``delay_wgrads``,
    ``when_finished``: see :class:`moefw.runtime.pipeline.player.Player`.
    """
    plain = in_order(model, keep_routes=keep_routes, main_gradients=main_gradients)
    if not isinstance(model, Pipelined):
        return plain
    played = by_schedule(
        model,
        keep_routes=keep_routes,
        main_gradients=main_gradients,
        delay_wgrads=delay_wgrads,
        when_finished=when_finished,
    )
    if delay_wgrads or when_finished is not None or not model.link.is_whole:
        return played
    link = model.link

    def run(batches: Sequence[Batch], clock: Clock) -> Tally:
        has_pairs = any(isinstance(step, Pair) for step in link.steps(len(batches)))
        return played(batches, clock) if has_pairs else plain(batches, clock)

    return run


def in_order(model: nn.Module, *, keep_routes: bool = False, main_gradients: torch.dtype = torch.float32) -> Run:
    """Run of each micro-batch forward and backward before the next."""
    parameters = step_parameters(model, main_gradients=main_gradients)

    def run(batches: Sequence[Batch], clock: Clock) -> Tally:
        tally = Tally(batches[0].ids_BS.device, keep_routes=keep_routes)
        with parameters.in_step(len(batches)) as reductions:
            for number, batch in enumerate(batches):
                if number == len(batches) - 1:
                    reductions.before_last_backward()
                with clock("forward", Action("F", 0, number)):
                    output = model(batch)
                with clock("backward", Action("B", 0, number)):
                    (output.objective * batch.loss_scale).backward()
                tally.add(output, number)
                del output
        return tally

    return run


def by_schedule(
    model: Any,
    *,
    keep_routes: bool = False,
    main_gradients: torch.dtype = torch.float32,
    delay_wgrads: bool = False,
    when_finished: WhenFinished | None = None,
) -> Run:
    """Run of this rank's stages of a ``Pipelined``, in the order of the pipeline's schedule."""
    parameters = step_parameters(model, main_gradients=main_gradients)

    def run(batches: Sequence[Batch], clock: Clock) -> Tally:
        tally = Tally(batches[0].ids_BS.device, keep_routes=keep_routes)
        sections = _Sections(clock, num_batches=len(batches), num_stages=len(model.link.stages))
        player = Player(
            model,
            batches,
            delay_wgrads=delay_wgrads,
            when_finished=None if when_finished is None else sections.of_gradients(when_finished),
        )
        with parameters.in_played_step(len(batches)) as reductions:
            for entry, output in player.play(sections.of_pass):
                if output is not None:
                    tally.add(output, entry.passes[0].micro_batch)
                reductions.after_entry(entry, clock)
            reductions.after_all(clock)
        return tally

    return run


@final
class _Sections:
    """Sections of the clock in a step that a player runs. That of a pass also stamps which one it is."""

    def __init__(self, clock: Clock, *, num_batches: int, num_stages: int) -> None:
        self._clock = clock
        self._num_batches = num_batches
        self._num_stages = num_stages

    @contextmanager
    def of_pass(self, action: Action, partner: Action | None) -> Iterator[None]:
        """Section of a pass, or of phases of it while its ``partner`` in a pair is held."""
        passes = [action] if partner is None else [action, partner]
        with self._clock(PASSES[action.kind], *passes):
            stamp(", beside the ".join(map(self._described, passes)))
            yield

    def of_gradients(self, when_finished: WhenFinished) -> WhenFinished:
        """``when_finished``, each call in a section of its own."""

        def finished(parameters: Sequence[nn.Parameter]) -> None:
            with self._clock("gradients"):
                when_finished(parameters)

        return finished

    def _described(self, action: Action) -> str:
        where = f"of micro-batch {action.micro_batch + 1} of {self._num_batches}"
        return f"{PASSES[action.kind]} {where} in stage {action.stage} of {self._num_stages}"
