"""How the global batch divides: into micro-batches over dp, these over cp and tp."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moefw.compose.spec.sections import TrainSpec
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import Problem
from moefw.runtime.parallel.cp_blocks import pieces_of


def batch_problems(train: TrainSpec, layout: LayoutPlan, plan: Callable[[int], LayoutPlan | None]) -> Iterator[Problem]:
    """Yield the problems of a global batch that does not divide into micro-batches over dp, or these over cp and tp.

    ``plan``: the layout of another world, None if there is none; it is asked for worlds that keep the batch.
    """
    dp, cp, tp = (layout.sizes.get(axis, 1) for axis in ("dp", "cp", "tp"))
    pieces = pieces_of(cp)
    if train.seq_len % pieces:
        what = f"seq_len {train.seq_len} does not divide into {pieces} pieces, two for each rank of cp."
        yield Problem(what, f"Use a seq_len that {pieces} divides.")
    elif train.micro_batch * train.seq_len // cp % tp:
        over = f" / cp {cp}" if cp > 1 else ""
        what = f"micro_batch {train.micro_batch} x seq_len {train.seq_len}{over} tokens do not divide into {tp} parts, "
        yield Problem(f"{what}one a rank of tp.", f"Use a seq_len that {cp * tp} divides.")
    if train.packing != "none":
        yield from _pack_problems(train, pieces * tp)
        return
    unit = train.micro_batch * train.seq_len * dp
    if train.tokens_per_step % unit:
        what = (
            f"{train.tokens_per_step} tokens a step do not divide into micro-batches: "
            f"micro_batch {train.micro_batch} x seq_len {train.seq_len} x {dp} data-parallel ranks = {unit}."
        )
        near = max(1, round(train.tokens_per_step / unit)) * unit
        yield Problem(what, f"Use for example tokens_per_step: {near}.{_ways_to_keep(train, layout, plan)}")


def _ways_to_keep(train: TrainSpec, layout: LayoutPlan, plan: Callable[[int], LayoutPlan | None]) -> str:
    """Advice on other worlds, and another micro-batch, that divide the same batch; empty if there are none."""
    sequences, rest = divmod(train.tokens_per_step, train.seq_len)
    if rest:
        return ""
    ways = []
    micro_batches, rest = divmod(sequences, train.micro_batch)
    if not rest:

        def divides(world: int) -> bool:
            other = plan(world)
            return other is not None and micro_batches % other.sizes.get("dp", 1) == 0

        most = micro_batches * (layout.world // layout.sizes.get("dp", 1))  # with a micro-batch for each of its dp
        fewer = next(filter(divides, range(layout.world - 1, 0, -1)), None)
        more = next(filter(divides, range(layout.world + 1, most + 1)), None)
        worlds = [str(world) for world in (fewer, more) if world is not None]
        if worlds:
            ways.append(f"{' or '.join(worlds)} ranks")
    of_a_rank, rest = divmod(sequences, layout.sizes.get("dp", 1))
    if not rest:
        ways.append(f"micro_batch: {_largest_divisor(of_a_rank, below=train.micro_batch)}")
    return f" To keep the batch, use {', or '.join(ways)}." if ways else ""


def _largest_divisor(number: int, *, below: int) -> int:
    return next(divisor for divisor in range(below - 1, 0, -1) if number % divisor == 0)


def _pack_problems(train: TrainSpec, unit: int) -> Iterator[Problem]:
    """Yield the problems of packs. A pack that all ranks of cp share is a multiple of ``unit`` tokens."""
    room = train.micro_batch * train.seq_len
    if room % unit:
        what = f"a pack has room for micro_batch {train.micro_batch} x seq_len {train.seq_len} tokens, which do not "
        yield Problem(f"{what}divide into {unit} equal parts.", f"Use a seq_len that {unit} divides.")
    if train.tokens_per_step % train.seq_len:
        what = f"{train.tokens_per_step} tokens a step are not a whole number of the longest sequence, {train.seq_len}."
        near = max(1, round(train.tokens_per_step / train.seq_len)) * train.seq_len
        yield Problem(what, f"Use for example tokens_per_step: {near}.")
    if train.record_routes or train.replay_routes:
        what = "routes are recorded and replayed of sequences of one length, and packing makes others."
        yield Problem(what, "Use packing: none, or leave out record_routes and replay_routes.")
