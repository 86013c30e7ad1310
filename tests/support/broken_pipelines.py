"""Pipeline schedules that break their contract in one way each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch.distributed as dist
from attrs import evolve, frozen

import moefw
from declared import NamedAfterItsClass
from moefw.core.plugin import PipelinePlugin
from moefw.core.records import Entry, Order
from moefw.plugins.pipelines.merged import Merged

Lists = list[list[moefw.Action]]


@frozen
class Sound(NamedAfterItsClass, PipelinePlugin):
    """All forwards, then all backwards, in parts: right in every way. Those below change it."""

    def order(self, ranks: int, micro_batches: int) -> Sequence[Sequence[moefw.Action]]:
        kinds = [(kind, number) for kinds in ("F", "IW") for number in range(micro_batches) for kind in kinds]
        return self.changed([[moefw.Action(kind, rank, number) for kind, number in kinds] for rank in range(ranks)])

    def changed(self, order: Lists) -> Lists:
        return order


@frozen
class CountsItsRanksItself(Sound):
    def order(self, micro_batches: int) -> Sequence[Sequence[moefw.Action]]:  # type: ignore[override]
        return super().order(2, micro_batches)


@frozen
class CallsForItsChunks(Sound):
    def chunks(self) -> int:  # type: ignore[override]
        return 1


@frozen
class MisspellsItsOffer(Sound):
    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(rows=("raged",))


@frozen
class SoundPairs(NamedAfterItsClass, Merged):
    """A forward beside the backward of inputs of the micro-batch before, then its weight gradients: right, too."""

    def order(self, ranks: int, micro_batches: int) -> Order:
        order: list[Entry] = []
        for (entry,) in zip(*super().order(ranks, micro_batches), strict=True):
            if isinstance(entry, moefw.Pair):
                backward = evolve(entry.backward, kind="I")
                order += [evolve(entry, backward=backward), evolve(backward, kind="W")]
            elif entry.kind == "B":
                order += [evolve(entry, kind="I"), evolve(entry, kind="W")]
            else:
                order.append(entry)
        return [order]


@frozen
class HidesItsPairs(NamedAfterItsClass, Merged):
    @property
    def merges(self) -> bool:
        return False


@frozen
class HasNoPairs(Sound):
    @property
    def merges(self) -> bool:
        return True


@frozen
class PairsTwoPartsOfABackward(HasNoPairs):
    def order(self, ranks: int, micro_batches: int) -> Order:
        order = []
        for rank in range(ranks):
            numbers = range(micro_batches)
            forwards = [moefw.Action("F", rank, number) for number in numbers]
            pairs = [moefw.Pair(moefw.Action("I", rank, number), moefw.Action("W", rank, number)) for number in numbers]
            order.append([*forwards, *pairs])
        return order


@frozen
class PairsWhatNeedsEachOther(NamedAfterItsClass, Merged):
    def order(self, ranks: int, micro_batches: int) -> Order:
        first = moefw.Pair(moefw.Action("F", 0, 0), moefw.Action("B", 0, 0))
        return [[first, *rest] for _, *rest in super().order(ranks, micro_batches)]


@frozen
class HasTooFewLists(Sound):
    def changed(self, order: Lists) -> Lists:
        return order[:1]


@frozen
class RunsTwice(Sound):
    def changed(self, order: Lists) -> Lists:
        return [[actions[0], *actions] for actions in order]


@frozen
class MixesUpRanks(Sound):
    def changed(self, order: Lists) -> Lists:
        return order[::-1]


@frozen
class RunsAMicroBatchTooMany(Sound):
    def order(self, ranks: int, micro_batches: int) -> Sequence[Sequence[moefw.Action]]:
        return super().order(ranks, micro_batches + 1)


@frozen
class RunsAStageTooMany(Sound):
    def changed(self, order: Lists) -> Lists:
        return [[*order[0], moefw.Action("F", len(order), 0)], *order[1:]]


@frozen
class PutsStagesOnOneRank(Sound):
    def rank_of(self, stage: int, ranks: int) -> int:
        return 0


@frozen
class CountsRanksFromOne(Sound):
    def rank_of(self, stage: int, ranks: int) -> int:
        return stage + 1


@frozen
class ForgetsWeights(Sound):
    def changed(self, order: Lists) -> Lists:
        return [[one for one in actions if one.kind != "W"] for actions in order]


@frozen
class BackwardFirst(Sound):
    """Rank 0 waits for a backward before it sends what that depends on."""

    def changed(self, order: Lists) -> Lists:
        first = order[0]
        backward = next(at for at, one in enumerate(first) if one.kind == "I")
        return [[first[backward], *first[:backward], *first[backward + 1 :]], *order[1:]]


@frozen
class Moody(Sound):
    asked: ClassVar[Iterator[bool]] = itertools.cycle([True, False, False])

    def changed(self, order: Lists) -> Lists:
        return (
            [sorted(actions, key=lambda one: "FIW".index(one.kind)) for actions in order] if next(self.asked) else order
        )


@frozen
class RefusesOddNumbers(Sound):
    """Refuses what it can do."""

    def check_batches(self, ranks: int, micro_batches: int) -> Iterator[moefw.Problem]:
        if micro_batches % 2:
            yield moefw.Problem(f"{micro_batches} is odd.", f"Use {micro_batches + 1}.")


@frozen
class RefusesAll(Sound):
    def check_batches(self, ranks: int, micro_batches: int) -> Iterator[moefw.Problem]:
        yield moefw.Problem("no.", "Never.")


@frozen
class AcceptsWhatItRaisesFor(Sound):
    def order(self, ranks: int, micro_batches: int) -> Sequence[Sequence[moefw.Action]]:
        if micro_batches < ranks:
            raise ValueError("too few")
        return super().order(ranks, micro_batches)


@frozen
class AcceptsWhatItLeavesOut(Sound):
    def order(self, ranks: int, micro_batches: int) -> Sequence[Sequence[moefw.Action]]:
        return super().order(ranks, micro_batches // ranks * ranks or micro_batches)


@frozen
class RefusesWithoutAFix(AcceptsWhatItRaisesFor):
    def check_batches(self, ranks: int, micro_batches: int) -> Iterator[moefw.Problem]:
        if micro_batches < ranks:
            yield moefw.Problem(f"{micro_batches} are too few.")


@frozen
class AsksItsRank(Sound):
    """Every rank begins with another micro-batch, so what it awaits is not what the others send."""

    def changed(self, order: Lists) -> Lists:
        first = dist.get_rank() if dist.is_initialized() else 0
        return [sorted(actions, key=lambda one: ("FIW".index(one.kind), one.micro_batch < first)) for actions in order]


@frozen
class SkipsWeights(Sound):
    """Leaves out the weight gradients of a micro-batch in a run."""

    def changed(self, order: Lists) -> Lists:
        in_a_run = dist.is_initialized()
        return [[one for one in actions if one.kind != "W" or one.micro_batch or not in_a_run] for actions in order]


@frozen
class SkipsAMicroBatch(Sound):
    """Leaves out a micro-batch in a run."""

    def changed(self, order: Lists) -> Lists:
        in_a_run = dist.is_initialized()
        return [[one for one in actions if one.micro_batch or not in_a_run] for actions in order]


@frozen
class LosesCountOfMany(Sound):
    """Runs the second half of many micro-batches twice, and the first one not at all."""

    def changed(self, order: Lists) -> Lists:
        many = max(one.micro_batch for actions in order for one in actions) + 1
        half = many // 2 if many > 32 else 0
        return [[evolve(one, micro_batch=max(one.micro_batch, half)) for one in actions] for actions in order]
