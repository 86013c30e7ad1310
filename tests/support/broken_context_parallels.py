"""Context parallelisms that break the contract, each in one way, and the check that sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moefw
from declared import declarations
from moefw.runtime.attention.mask import Mask
from moefw.runtime.communication.gather import gather
from moefw.runtime.communication.movement import finish
from moefw.runtime.parallel.sequence_cut import SequenceCut


class Gathering(moefw.ContextAttention):
    """Every rank attends with whole sequences, and again in backward: right in every way."""

    offered: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, context: moefw.BuildContext) -> None:
        self.cut = SequenceCut(context.layout)

    def __call__(
        self, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSe: Tensor, mask: Mask, *, attend: Any, **options: Any
    ) -> Tensor:
        def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            whole = (self.whole(x, mask.lengths) for x in (q, k, v))
            out, _ = attend(*whole, mask, sinks_H=sinks, scale=options["scale"])
            return self.own(out, mask.lengths)

        return self.again(run, q_BHSd, k_BGSd, v_BGSe, options["sinks_H"])

    def again(self, run: Any, *tensors: Any) -> Tensor:
        out: Tensor = checkpoint(run, *tensors, use_reentrant=False)
        return out

    def whole(self, own: Tensor, lengths: Any) -> Tensor:
        (by_rank,) = finish(gather([own.movedim(2, 0)], self.cut.group))
        return self.cut.whole(by_rank, 0, lengths).movedim(0, 2)

    def own(self, whole: Tensor, lengths: Any) -> Tensor:
        return self.cut.own(whole, 2, lengths)


class KnowsNoSinks(Gathering):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, attend: Any, scale: Any = None) -> Tensor:
        return super().__call__(q, k, v, mask, attend=attend, scale=scale, sinks_H=None)


class MisspellsItsOffer(Gathering):
    offered: ClassVar[Mapping[str, Any]] = {"replays": ("allways",)}


class SeesTwoSequencesInAPack(Gathering):
    """Queries of the third sequence see keys of the second."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, attend: Any, **options: Any) -> Tensor:
        return super().__call__(q, k, v, mask, attend=self.attend_by(attend), **options)

    def attend_by(self, attend: Any) -> Any:
        def attend_with_two(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> Any:
            if mask.lengths is not None and mask.documents_BS is not None:
                first, *rest = mask.lengths
                lengths = (first, sum(rest))
                mask = replace(mask, documents_BS=mask.documents_BS.clamp_max(1), lengths=lengths)
            return attend(q, k, v, mask, **options)

        return attend_with_two


class CutsPacksAsOneSequence(Gathering):
    def whole(self, own: Tensor, lengths: Any) -> Tensor:
        return super().whole(own, None)

    def own(self, whole: Tensor, lengths: Any) -> Tensor:
        return super().own(whole, None)


class SeesItsOwnKeysAlone(Gathering):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, attend: Any, **options: Any) -> Tensor:
        out: Tensor = attend(q, k, v, Mask(window=mask.window), **options)[0]
        return out


class LosesGradientsOfOthers(Gathering):
    def whole(self, own: Tensor, lengths: Any) -> Tensor:
        whole = super().whole(own.detach(), lengths)
        pieces = [*whole.chunk(self.cut.unit, 2)]
        for mine, number in zip(own.chunk(2, 2), self.cut.pieces(self.cut.index), strict=True):
            pieces[number] = mine
        return torch.cat(pieces, 2)


class Remembers(Gathering):
    def again(self, run: Any, *tensors: Any) -> Tensor:
        self.last = tensors[1]
        out: Tensor = checkpoint(lambda q, k, v, sinks: run(q, self.last, v, sinks), *tensors, use_reentrant=False)
        return out


class RemembersTheMask(Gathering):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, attend: Any, **options: Any) -> Tensor:
        self.mask = mask
        return super().__call__(q, k, v, mask, attend=self.attend_by(attend), **options)

    def attend_by(self, attend: Any) -> Any:
        """Attends with the mask of the latest call, in backward too."""
        return lambda q, k, v, mask, **options: attend(q, k, v, self.mask, **options)


class CutsAmongEvenNumbersAlone(Gathering):
    def own(self, whole: Tensor, lengths: Any) -> Tensor:
        own = super().own(whole, lengths)
        return own.flip(2) if self.cut.size % 2 else own


class SavesAllKeys(Gathering):
    def again(self, run: Any, *tensors: Any) -> Tensor:
        out: Tensor = run(*tensors)
        return out


@frozen
class GatheringPlugin(moefw.ContextParallelPlugin):
    """A context parallelism under test."""

    made: ClassVar[type[Gathering]] = Gathering

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(**self.made.offered)

    def build(self, context: moefw.BuildContext) -> moefw.ContextAttention:
        return self.made(context)


PLUGINS = declarations(GatheringPlugin, Gathering)
"""The plugin of each."""
