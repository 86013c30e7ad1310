"""Updates of whole matrices at their homes: parts travel there, and come back as parts of the update.

A bucket at a time: while one is computed, the parts of the next one are on their way, and the updates of the one
before. Values travel as fp32, in one tensor from each rank to each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from attrs import Factory, define, frozen
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.contracts import Layout, MatrixRule
from moefw.core.errors import ContractError, MoefwError, RunError
from moefw.runtime.communication.agreement import raise_together
from moefw.runtime.parallel.homes import Bucket, Extent, GroupPlan, Matrix

Parts = Mapping[str, Tensor]
"""What this rank stores of each matrix, fp32, by name: views with two dimensions, which are written."""
_FIX: Final = "Let MatrixRule.update() return a tensor of the shape and dtype that it is given."
_FIX_VALUES: Final = "Gradients were finite: look at MatrixRule.update() and at its options, or lower train.lr."


@frozen(eq=False)
class _Turn:
    """A bucket, and the group whose ranks exchange it; None: nothing of it travels."""

    bucket: Bucket
    group: ProcessGroup | None


@frozen(eq=False)
class _UnderWay:
    """An exchange under way. What is ``sent`` is held until it has left."""

    work: Any
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        """Values that arrived, in order of the ranks that sent them."""
        self.work.wait()
        return self.received


@define(eq=False)
class _Seen:
    """What this rank sees of its updates in a step: the largest value of each, and the first that is none at all."""

    step: int
    problem: MoefwError | None = None
    matrices: list[Matrix] = Factory(list)
    largest: list[Tensor] = Factory(list)


@final
class Homes:
    """Homes on this rank, and its exchanges with others. ``plugin``: the name of the optimizer, for errors.

    Opening them is collective over the ranks of each group.
    """

    def __init__(
        self, plans: Sequence[GroupPlan], layout: Layout, rule: MatrixRule, *, plugin: str, device: torch.device
    ) -> None:
        self.layout = layout
        self.device = device
        self.rule = rule
        self.plugin = plugin
        self._turns = [turn for plan in plans for turn in self._turns_of(plan)]

    def _turns_of(self, plan: GroupPlan) -> Iterator[_Turn]:
        """Yield the buckets of a group, in the order of all its ranks."""
        buckets = plan.buckets(plan.ranks.index(self.layout.rank), self.rule.bucket_bytes)
        group = self.layout.open(plan.ranks) if any(bucket.moves for bucket in buckets) else None
        for bucket in buckets:
            yield _Turn(bucket, group if bucket.moves else None)

    @torch.no_grad()
    def update(self, parts: Parts, *, step: int) -> None:
        """Replace directions by updates, in place. Collective over all ranks.

        ``step``: the number of the optimizer's step, for errors. Raises ContractError or RunError on all ranks if an
        update is of another shape or dtype, or not finite.
        """
        seen = _Seen(step)
        arriving = self._send_to_homes(self._turns[0], parts) if self._turns else None
        leaving: tuple[Bucket, _UnderWay] | None = None
        for turn, following in itertools.zip_longest(self._turns, self._turns[1:]):
            current = arriving
            if following is not None:  # before this bucket is computed, so that it travels meanwhile
                arriving = self._send_to_homes(following, parts)
            updates = self._computed(turn.bucket, parts, current, seen)
            _copy_all(_of_this_rank(turn.bucket, updates, parts))
            if leaving is not None:
                _store(*leaving, parts)
            sent = self._send_back(turn, updates, parts)
            leaving = None if sent is None else (turn.bucket, sent)
        if leaving is not None:
            _store(*leaving, parts)
        self._require_sound(seen)

    def _send_to_homes(self, turn: _Turn, parts: Parts) -> _UnderWay | None:
        """Start the exchange in which homes get the parts of a bucket that they do not store."""
        if turn.group is None:
            return None
        bucket = turn.bucket
        sent = {home: [parts[name] for name in names] for home, names in bucket.given.items()}
        received = {source: _elements(extent for _, extent in taken) for source, taken in bucket.taken.items()}
        return _exchange(sent, received, turn.group, self.device)

    def _send_back(self, turn: _Turn, updates: Sequence[Tensor], parts: Parts) -> _UnderWay | None:
        """Start the exchange in which those that store parts of a bucket get the same parts of its updates."""
        if turn.group is None:
            return None
        bucket = turn.bucket
        sent = {
            position: [updates[number][extent.slices] for number, extent in returned]
            for position, returned in bucket.returned.items()
        }
        received = {home: sum(parts[name].numel() for name in names) for home, names in bucket.awaited.items()}
        return _exchange(sent, received, turn.group, self.device)

    def _computed(self, bucket: Bucket, parts: Parts, arriving: _UnderWay | None, seen: _Seen) -> list[Tensor]:
        """Update of each matrix of a bucket whose home this rank is. Those of one shape are computed together."""
        received = _received(bucket, arriving)
        updates: list[Tensor] = []
        for shape, alike in itertools.groupby(bucket.computed, key=lambda matrix: matrix.shape):
            matrices = list(alike)
            first = len(updates)
            directions_Bnm = torch.empty(len(matrices), *shape, device=self.device)
            copies = []
            for number, matrix in enumerate(matrices):
                extent = matrix.spread.extents[bucket.position]
                if extent is not None:
                    copies.append((directions_Bnm[number][extent.slices], parts[matrix.name]))
                copies += [(directions_Bnm[number][extent.slices], part) for extent, part in received[first + number]]
            _copy_all(copies)
            updates += self._ruled(directions_Bnm, matrices, seen).unbind()
        return updates

    def _ruled(self, directions_Bnm: Tensor, matrices: Sequence[Matrix], seen: _Seen) -> Tensor:
        """Updates that the rule makes of directions; zeros if they are none, which the end of the step tells."""
        shape = directions_Bnm.shape
        updates_Bnm = self.rule.update(directions_Bnm)
        if updates_Bnm.shape != shape or updates_Bnm.dtype is not torch.float32:
            if seen.problem is None:
                got = f"{str(updates_Bnm.dtype).removeprefix('torch.')} {tuple(updates_Bnm.shape)}"
                what = f"an update {got} of directions float32 {tuple(shape)}"
                seen.problem = ContractError(self._message(what, matrices[0], seen), _FIX)
            return directions_Bnm.new_zeros(shape)
        seen.matrices += matrices
        seen.largest.append(torch.linalg.vector_norm(updates_Bnm, math.inf, dim=(1, 2)))
        return updates_Bnm

    def _require_sound(self, seen: _Seen) -> None:
        """Raise the error of the first rank whose updates are not sound, on all ranks. The host waits, once a step."""
        largest = torch.cat([*seen.largest, torch.zeros(1, device=self.device)])
        unsound = (~largest.isfinite()).any().float()
        if seen.problem is not None:
            unsound = torch.ones_like(unsound)
        plan = self.layout.plan
        everyone = self.layout.open(tuple(range(plan.world)))
        if everyone is not None:
            dist.all_reduce(unsound, dist.ReduceOp.MAX, group=everyone)
        if float(unsound) == 0.0:
            return
        raise_together(seen.problem or self._not_finite(seen, largest), self.layout.host_group())

    def _not_finite(self, seen: _Seen, largest: Tensor) -> RunError | None:
        """Error about the first update that is not finite; None if all are."""
        for matrix, value in zip(seen.matrices, largest.tolist(), strict=False):
            if not math.isfinite(value):
                return RunError(self._message(f"an update with a value {value}", matrix, seen), _FIX_VALUES)
        return None

    def _message(self, what: str, matrix: Matrix, seen: _Seen) -> str:
        place = f"rank {self.layout.rank}, step {seen.step} of the optimizer, matrix {matrix.name} {matrix.shape}"
        return f"{place}: the rule of {self.plugin} returned {what}."


def _elements(extents: Iterator[Extent]) -> int:
    return sum(extent.elements for extent in extents)


def _exchange(
    sent: Mapping[int, Sequence[Tensor]], received: Mapping[int, int], group: ProcessGroup, device: torch.device
) -> _UnderWay:
    """Start sending tensors by position, end to end, and receiving so many elements from each position."""
    positions = range(group.size())
    sent_sizes = [sum(tensor.numel() for tensor in sent.get(position, ())) for position in positions]
    received_sizes = [received.get(position, 0) for position in positions]
    in_order = [tensor.reshape(-1) for position in positions for tensor in sent.get(position, ())]
    flat = torch.cat(in_order) if in_order else torch.empty(0, device=device)
    buffer = torch.empty(sum(received_sizes), device=device)
    work = dist.all_to_all_single(buffer, flat, received_sizes, sent_sizes, group=group, async_op=True)
    return _UnderWay(work, flat, buffer)


def _received(bucket: Bucket, arriving: _UnderWay | None) -> list[list[tuple[Extent, Tensor]]]:
    """Parts that arrived, for each matrix of a bucket whose home this rank is."""
    parts: list[list[tuple[Extent, Tensor]]] = [[] for _ in bucket.computed]
    if arriving is None:
        return parts
    in_order = [taken for source in sorted(bucket.taken) for taken in bucket.taken[source]]
    pieces = arriving.wait().split([extent.elements for _, extent in in_order])
    for (number, extent), piece in zip(in_order, pieces, strict=True):
        parts[number].append((extent, piece.view(extent.sizes)))
    return parts


def _of_this_rank(bucket: Bucket, updates: Sequence[Tensor], parts: Parts) -> list[tuple[Tensor, Tensor]]:
    """Parts of the computed updates that this rank itself stores, each with the place where it stores them."""
    extents = [matrix.spread.extents[bucket.position] for matrix in bucket.computed]
    return [
        (parts[matrix.name], update[extent.slices])
        for matrix, update, extent in zip(bucket.computed, updates, extents, strict=True)
        if extent is not None
    ]


def _store(bucket: Bucket, returning: _UnderWay, parts: Parts) -> None:
    """Store the parts of updates that come back from homes."""
    names = [name for home in sorted(bucket.awaited) for name in bucket.awaited[home]]
    pieces = returning.wait().split([parts[name].numel() for name in names])
    _copy_all([(parts[name], piece.view(parts[name].shape)) for name, piece in zip(names, pieces, strict=True)])


def _copy_all(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if copies:
        into, values = zip(*copies, strict=True)
        torch._foreach_copy_(list(into), list(values))
