"""Forward and backward of the micro-batches of one step, as the engine calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from moefw.core.records import PASSES, Action, GemmPass, Pair, Zero
from moefw.core.stages import Batch
from moefw.runtime.compute.weights import TRAINING, Accumulator, shared_by_micro_batches
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
    main_gradients: torch.dtype = torch.float32,
    delay_wgrads: bool = False,
    when_finished: WhenFinished | None = None,
) -> Run:
    """How a model trains: its pipeline, or one micro-batch behind the other.

    ``keep_routes``: see :class:`Tally`. ``main_gradients``: see :func:`passes_share`. ``delay_wgrads``,
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


def by_schedule(
    model: Any,
    *,
    keep_routes: bool = False,
    main_gradients: torch.dtype = torch.float32,
    delay_wgrads: bool = False,
    when_finished: WhenFinished | None = None,
) -> Run:
    """Run of this rank's stages of a ``Pipelined``, in the order of the pipeline's schedule."""
    zeros = _zeros_of(model)
    root_zero: set[Zero] = _zeros_of(model, root_alone=True)

    def run(batches: Sequence[Batch], clock: Clock) -> Tally:
        tally = Tally(batches[0].ids_BS.device, keep_routes=keep_routes)

        def described(action: Action) -> str:
            where = f"of micro-batch {action.micro_batch + 1} of {len(batches)}"
            return f"{PASSES[action.kind]} {where} in stage {action.stage} of {len(model.link.stages)}"

        @contextmanager
        def around(action: Action, beside: Action | None) -> Iterator[None]:
            partners = () if beside is None else (beside,)
            with clock(PASSES[action.kind], action, *partners):
                stamp(described(action) if beside is None else f"{described(action)}, beside the {described(beside)}")
                yield

        def finished(parameters: Sequence[nn.Parameter]) -> None:
            assert when_finished is not None
            with clock("gradients"):
                when_finished(parameters)

        once = 1 in zeros and len(batches) > 1
        # Nothing here may look through the modules of a model: it runs for each pass.
        each = bool(zeros - {1} if once else zeros)
        player = Player(
            model,
            batches,
            delay_wgrads=delay_wgrads,
            when_finished=None if when_finished is None else finished,
        )
        with _gathered(model), passes_share(model, added_up_in=main_gradients if once else None) as reduce_next:
            for entry, output in player.play(around):
                if output is not None:
                    tally.add(output, entry.passes[0].micro_batch)
                if entry.passes[-1].kind != "F" and each:
                    with clock(PASSES[entry.passes[-1].kind]):
                        _reduce_pass(model, with_root=not (once and 1 in root_zero))
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


def _reduce_pass(model: Any, *, with_root: bool = True) -> None:
    """Reduce the gradients that the backward of a pass has left, of a model that FSDP shards."""
    from moefw.runtime.parallel.sharding import reduce_pass

    reduce_pass(model, with_root=with_root)


@contextmanager
def passes_share(
    model: nn.Module, passes: Sequence[GemmPass] = TRAINING, *, added_up_in: torch.dtype | None = None
) -> Iterator[Callable[[], None]]:
    """Enter a block of passes that share operands of weights, and the gathered weights of ZeRO 1 and 2.

    ``passes``: those for which operands are made. ``added_up_in``: the dtype in which micro-batches add up the
    gradients of ZeRO 1 whole; None: they do not.

    Yield what lets the next backward reduce these. Weights must not change in the block.
    """
    if not _is_sharded(model):
        with shared_by_micro_batches(model.parameters(), passes):
            yield lambda: None
        return
    from moefw.runtime.parallel.unsharded_gradients import added_up_unsharded
    from moefw.runtime.parallel.zero import kept, sharded_parameters

    with ExitStack() as stack:
        stack.enter_context(kept(model))
        # What a rank sends of a weight that is gathered once need not be kept for another time.
        gathered_once = sharded_parameters(model, 1, 2)
        shared = [parameter for parameter in model.parameters() if parameter not in gathered_once]
        gathered: Mapping[nn.Parameter, Accumulator] = {}
        reduce_next: Callable[[], None] = _nothing
        if added_up_in is not None:
            gathered, reduce_next = stack.enter_context(added_up_unsharded(model, added_up_in))
        stack.enter_context(shared_by_micro_batches(shared, passes, gathered=gathered))
        yield reduce_next


def _nothing() -> None:
    """Nothing to do."""


def _is_sharded(model: nn.Module) -> bool:
    """Whether FSDP shards parameters of a model, without the second that importing it takes."""
    return any(hasattr(module, "unshard") for module in model.modules())


def _zeros_of(model: nn.Module, *, root_alone: bool = False) -> set[Zero]:
    """Stages of ZeRO of the units of a model, or of the unit around them; empty if there are none."""
    if not _is_sharded(model):
        return set()
    from moefw.runtime.parallel.zero import units, zero_of

    return {zero_of(unit) for unit in units(model) if unit is model or not root_alone}


def in_order(model: nn.Module, *, keep_routes: bool = False, main_gradients: torch.dtype = torch.float32) -> Run:
    """Run of each micro-batch forward and backward before the next."""

    def run(batches: Sequence[Batch], clock: Clock) -> Tally:
        tally = Tally(batches[0].ids_BS.device, keep_routes=keep_routes)
        added_up_in = main_gradients if len(batches) > 1 else None
        with passes_share(model, added_up_in=added_up_in) as reduce_next:
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
