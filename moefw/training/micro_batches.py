"""Forward and backward of the micro-batches of one step, as the engine calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn

from moefw.core.records import PASSES, Action, Pair
from moefw.core.stages import Batch
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.runtime.pipeline.player import Player
from moefw.runtime.pipeline.stage import Pipelined
from moefw.system.stamps import stamp
from moefw.training.step_sums import Tally


class Clock(Protocol):
    """Measures the time of named sections."""

    def __call__(self, section: str, *passes: Action) -> AbstractContextManager[None]:
        """Measure the section that follows. ``passes``: the pass that runs in it and, second, its partner in a pair."""


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
    reduce_once: bool = False,
    delay_wgrads: bool = False,
    when_finished: WhenFinished | None = None,
) -> Run:
    """How a model trains: its pipeline, or one micro-batch behind the other.

    ``keep_routes``: see :class:`Tally`. ``reduce_once``: FSDP reduces gradients once, not after each backward.
    ``delay_wgrads``, ``when_finished``: see :class:`moefw.runtime.pipeline.player.Player`.
    """
    plain = in_order(model, keep_routes=keep_routes, reduce_once=reduce_once)
    if not isinstance(model, Pipelined):
        return plain
    played = in_stages(
        model,
        keep_routes=keep_routes,
        reduce_once=reduce_once,
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


def in_stages(
    model: Any,
    *,
    keep_routes: bool = False,
    reduce_once: bool = False,
    delay_wgrads: bool = False,
    when_finished: WhenFinished | None = None,
) -> Run:
    """Run of this rank's stages of a ``Pipelined``, in the order of the pipeline's schedule."""

    def run(batches: Sequence[Batch], clock: Clock) -> Tally:
        tally = Tally(batches[0].ids_BS.device, keep_routes=keep_routes)

        def told(action: Action) -> str:
            where = f"of micro-batch {action.micro_batch + 1} of {len(batches)}"
            return f"{PASSES[action.kind]} {where} in stage {action.stage} of {len(model.link.stages)}"

        @contextmanager
        def around(action: Action, beside: Action | None) -> Iterator[None]:
            partners = () if beside is None else (beside,)
            with clock(PASSES[action.kind], action, *partners):
                stamp(told(action) if beside is None else f"{told(action)}, beside the {told(beside)}")
                yield

        def finished(parameters: Sequence[nn.Parameter]) -> None:
            assert when_finished is not None
            with clock("gradients"):
                when_finished(parameters)

        once = reduce_once and len(batches) > 1
        player = Player(
            model,
            batches,
            delay_wgrads=delay_wgrads,
            when_finished=None if when_finished is None else finished,
        )
        with _gathered(model), _adding_up(model, unsharded=once) as reduce_next:
            for entry, output in player.play(around):
                if output is not None:
                    tally.add(output, entry.passes[0].micro_batch)
                if entry.passes[-1].kind != "F" and not once:
                    with clock(PASSES[entry.passes[-1].kind]):
                        _reduce_pass(model)
            if once:
                with clock(PASSES["W"]):
                    stamp("reduction of gradients")
                    reduce_next()
                    _reduce_pass(model)
        return tally

    return run


def _gathered(model: Any) -> AbstractContextManager[None]:
    """Context in which stages of a model run. Only models that FSDP shards import it."""
    if not _is_sharded(model):
        return nullcontext()
    from moefw.runtime.parallel.sharding import gathered

    return gathered(model)


def _reduce_pass(model: Any) -> None:
    """Reduce the gradients that the backward of a pass has left."""
    if _is_sharded(model):
        from moefw.runtime.parallel.sharding import reduce_pass

        reduce_pass(model)


@contextmanager
def _adding_up(model: Any, *, unsharded: bool) -> Iterator[Callable[[], None]]:
    """Enter the block of a step's micro-batches. Yield what lets the next backward reduce ``unsharded`` gradients."""
    if not (unsharded and _is_sharded(model)):
        with shared_by_micro_batches(model.parameters()):
            yield lambda: None
        return
    from moefw.runtime.parallel.unsharded_gradients import added_up_unsharded

    with (
        added_up_unsharded(model) as (gathered, reduce_next),
        shared_by_micro_batches(model.parameters(), gathered=gathered),
    ):
        yield reduce_next


def _is_sharded(model: Any) -> bool:
    return hasattr(model, "unshard")


def in_order(model: nn.Module, *, keep_routes: bool = False, reduce_once: bool = False) -> Run:
    """Run of each micro-batch forward and backward before the next."""

    def run(batches: Sequence[Batch], clock: Clock) -> Tally:
        tally = Tally(batches[0].ids_BS.device, keep_routes=keep_routes)
        with _adding_up(model, unsharded=reduce_once and len(batches) > 1) as reduce_next:
            for number, batch in enumerate(batches):
                if number == len(batches) - 1:
                    reduce_next()
                with clock("forward", Action("F", 0, number)):
                    output = model(batch)
                with clock("backward", Action("B", 0, number)):
                    (output.objective * batch.loss_scale).backward()
                tally.add(output, number)
                del output
        return tally

    return run
