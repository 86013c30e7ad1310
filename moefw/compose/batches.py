"""How the global batch divides: into micro-batches over dp, these over cp and tp."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from moefw.compose.spec.sections import TrainSpec
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import Problem
from moefw.runtime.parallel.cp_blocks import pieces_of

_FAR: Final = 2**12
"""Largest distance from a number at which another one is looked for, to suggest it: sizes may have any magnitude."""


def batch_problems(train: TrainSpec, layout: LayoutPlan, plan: Callable[[int], LayoutPlan | None]) -> Iterator[Problem]:
    """Yield the problems of a global batch that does not divide into micro-batches over dp, or these over cp and tp.

    ``plan``: the layout of another world, None if there is none; it is asked for worlds that keep the batch.
    """
    dp, cp, tp = (layout.size(axis) for axis in ("dp", "cp", "tp"))
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
        worlds = [str(world) for world in _nearest_worlds(micro_batches, layout, plan) if world is not None]
        if worlds:
            ways.append(f"{' or '.join(worlds)} ranks")
    of_a_rank, rest = divmod(sequences, layout.size("dp"))
    smaller = None if rest else _first_divisor(of_a_rank, _below(train.micro_batch))
    if smaller is not None:
        ways.append(f"micro_batch: {smaller}")
    return f" To keep the batch, use {', or '.join(ways)}." if ways else ""


def _nearest_worlds(
    micro_batches: int, layout: LayoutPlan, plan: Callable[[int], LayoutPlan | None]
) -> tuple[int | None, int | None]:
    """Nearest smaller and larger worlds over whose dp so many micro-batches divide; None where none is near."""
    dp = layout.size("dp")
    ranks_of_one = layout.world // dp

    def nearest(sizes_of_dp: Iterable[int]) -> int | None:
        for size in sizes_of_dp:
            if micro_batches % size == 0:
                other = plan(size * ranks_of_one)
                if other is not None and other.size("dp") == size:
                    return size * ranks_of_one
        return None

    return nearest(_below(dp)), nearest(range(dp + 1, min(micro_batches, dp + _FAR) + 1))


def _below(number: int) -> range:
    """Positive numbers near and below a number, the largest one first."""
    return range(number - 1, max(0, number - 1 - _FAR), -1)


def _first_divisor(number: int, candidates: Iterable[int]) -> int | None:
    return next((candidate for candidate in candidates if number % candidate == 0), None)


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
