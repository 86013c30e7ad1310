"""The largest logit of each head is that of dense scores: windows, documents, padding, sequences that ranks share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dense_attention import AttentionCase
from moefw.compose.build import open_layout
from moefw.runtime.attention import largest_logits as measured
from moefw.runtime.attention.mask import Mask
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool

CASES = {
    "heads of their own": AttentionCase(groups=4, keys=16, queries=16),
    "shared keys": AttentionCase(keys=16, queries=16),
    "a scale, no values": AttentionCase(keys=16, queries=16, scale=0.3, width=6, value_width=3),
    "a window": AttentionCase(keys=16, queries=16, window=3),
    "documents": AttentionCase(keys=16, queries=16, documents=True),
    "documents and a window": AttentionCase(keys=16, queries=16, documents=True, window=5),
    "one token": AttentionCase(keys=1, queries=1),
}
PACKS = {"a pack": None, "a pack with a window": 3}
PADDED = ("padding", "a pack with padding")
LENGTHS = (4, 8, 4)


def of_case(name: str) -> tuple[Tensor, Tensor, Mask, float | None]:
    """Return queries, keys, a mask and a scale."""
    case = CASES.get(name, AttentionCase(batch=1, keys=16, queries=16))
    (q, k, _), mask = case.drawn()
    if name in PACKS or name == "a pack with padding":
        documents_BS = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).unsqueeze(0)
        mask = Mask(window=PACKS.get(name), documents_BS=documents_BS, lengths=LENGTHS)
    if name in PADDED:
        mask = replace(mask, valid_BS=(torch.arange(16) % 8 < 2).expand(len(q), -1))
    return q.detach(), k.detach(), mask, case.scale


def dense(q: Tensor, k: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Return the largest visible score ``(H)`` of each head, of all scores in fp64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask.visible(q.shape[2], k.shape[2], q.device), -torch.inf)
    if mask.valid_BS is not None:
        scores = scores.masked_fill(~mask.valid_BS[:, None, :, None], -torch.inf)
    return scores.amax((0, 2, 3))


@pytest.mark.parametrize("most", [measured.MOST_LOGITS, 100])
@pytest.mark.parametrize("name", [*CASES, *PACKS, *PADDED])
def test_largest_logits_are_those_of_all_scores(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    monkeypatch.setattr(measured, "MOST_LOGITS", most)
    q, k, mask, scale = of_case(name)
    alone = SequenceCut(open_layout(LayerCase().resolve(), "cpu"))
    found = measured.largest_logits(q, k, mask, alone, scale=scale)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), dense(q, k, mask, scale), rtol=1e-6, atol=0)


def test_logits_of_bf16_are_not_rounded() -> None:
    q, k, mask, scale = of_case("shared keys")
    q, k = q.bfloat16(), k.bfloat16()
    alone = SequenceCut(open_layout(LayerCase().resolve(), "cpu"))
    found = measured.largest_logits(q, k, mask, alone, scale=scale)
    torch.testing.assert_close(found.double(), dense(q, k, mask, scale), rtol=1e-6, atol=0)


def test_a_gpu_multiplies_bf16_and_sums_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is given, without a wider copy. PyTorch has this product for CUDA only."""
    given: list[torch.dtype] = []

    def bmm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        given.extend([a.dtype, b.dtype])
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(measured, "takes_kernels", lambda x: True)
    monkeypatch.setattr(torch, "bmm", bmm)
    q, k, mask, scale = of_case("a window")
    q, k = q.bfloat16(), k.bfloat16()
    alone = SequenceCut(open_layout(LayerCase().resolve(), "cpu"))
    found = measured.largest_logits(q, k, mask, alone, scale=scale)
    torch.testing.assert_close(found.double(), dense(q, k, mask, scale), rtol=1e-6, atol=0)
    assert set(given) == {torch.bfloat16}


def test_no_queries_have_no_logit() -> None:
    alone = SequenceCut(open_layout(LayerCase().resolve(), "cpu"))
    nothing = torch.empty(0, 4, 5, 8)
    assert (measured.largest_logits(nothing, nothing, Mask(), alone, scale=None) == -torch.inf).all()


def of_ranks(name: str) -> Tensor:
    """Return the largest logits of this rank's queries, and of both ranks', ``(2, H)``."""
    q, k, mask, scale = of_case(name)
    cp = {"parallel": {"dense": {"cp": 2}}, "train": {"tokens_per_step": 16, "micro_batch": 1, "seq_len": 16}}
    cut = SequenceCut(open_layout(LayerCase(tokens=(1, 1), parts=cp).resolve(), "cpu"))
    q, k = (cut.own(each, 2, mask.lengths) for each in (q, k))
    valid_BS = None if mask.valid_BS is None else cut.own(mask.valid_BS, 1, mask.lengths)
    own = measured.largest_logits(q, k, replace(mask, cp=2, valid_BS=valid_BS), cut, scale=scale)
    of_both = own.clone()
    dist.all_reduce(of_both, dist.ReduceOp.MAX)
    return torch.stack([own, of_both])


@pytest.mark.parametrize("name", ["shared keys", "a window", "documents and a window", *PACKS, *PADDED])
def test_ranks_that_share_sequences_see_the_keys_of_all(pool: RankPool, name: str) -> None:
    ranks = pool.run(of_ranks, 2, name)
    wanted = dense(*of_case(name))
    for own, of_both in ranks:
        torch.testing.assert_close(of_both.double(), wanted, rtol=1e-6, atol=0)
        assert (own <= of_both).all()
    assert not torch.equal(ranks[0][0], ranks[1][0]), "each rank has queries of its own"
