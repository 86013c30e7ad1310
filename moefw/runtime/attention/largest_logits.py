"""The largest logit of each head: the product of queries and keys once more, block by block.

Attention kernels keep the log-sum-exp of logits, and not their maximum. Shapes: legend in
:mod:`moefw.runtime.attention.attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf, sqrt
from typing import Final, NamedTuple, final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Attention
from moefw.core.errors import ContractError
from moefw.core.records import QKClip
from moefw.runtime.accounting import done_again, standing_for
from moefw.runtime.attention.mask import Mask
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw_kernels.devices import takes_kernels

MOST_LOGITS: Final = 1 << 24
"""Largest number of logits that are computed at a time, unless one position of all heads has more."""
MOST_QUERIES: Final = 256
"""Largest number of queries of a head among them: keys behind the first of these are computed in vain."""


@final
class MeasuredCore(nn.Module):
    """Core of an attention that notes the largest logit of each head in training. Collective over cp.

    ``largest_H``, a buffer from :func:`measure_logits` on: of the heads of all ranks of tp, fp32, -inf until one is
    noted. A maximum is the same however the batch is split, and however often a region runs again. ``clip``: what they
    are measured for. ``layer``: the number of the layer.
    """

    largest_H: Tensor

    def __init__(
        self,
        core: Callable[..., Tensor],
        cuts: Mapping[int | None, SequenceCut],
        tp: TensorParallel,
        clip: QKClip,
        *,
        layer: int,
    ) -> None:
        super().__init__()
        self.clip = clip
        self.layer = layer
        self._core = core
        self._cuts = cuts
        self._tp = tp

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        sinks_H: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """``out_BHSe`` of the core, as it is."""
        if self.training:
            own_heads = self.largest_H.chunk(self._tp.size)[self._tp.index]
            with torch.no_grad(), done_again():
                largest = largest_logits(q, k, mask, self._cuts[mask.cp], scale=scale)
                own_heads.copy_(torch.maximum(own_heads, largest))
        return self._core(q, k, v, mask, sinks_H=sinks_H, scale=scale)


def measure_logits(attention: nn.Module, device: torch.device) -> None:
    """Give the core of an attention room for its largest logits. Raises ContractError if it cannot be measured."""
    name = type(attention).__name__
    cores = [module for module in attention.modules() if isinstance(module, MeasuredCore)]
    if len(cores) != 1:
        what = f"{name} offers its logits and has {len(cores)} cores to measure."
        raise ContractError(what, "Let it assign context.core(...) to an attribute, once.")
    (core,) = cores
    assert isinstance(attention, Attention)
    heads = [rows.heads for rows in attention.logit_rows().values()]
    if not heads:
        raise ContractError(f"{name} offers its logits and names no rows.", "Let logit_rows() say which make them.")
    core.register_buffer("largest_H", torch.full((max(heads),), -inf, device=device), persistent=False)


def largest_logits(q_BHSd: Tensor, k_BGSd: Tensor, mask: Mask, cut: SequenceCut, *, scale: float | None) -> Tensor:
    """Largest logit ``(H)`` of this rank's queries, fp32 or wider: q k, times the scale, of keys that the mask shows.

    Queries are of valid tokens. ``cut``: how ranks share the sequences. Their keys are gathered. -inf: no query.
    """
    scale = 1.0 / sqrt(q_BHSd.shape[-1]) if scale is None else scale
    k_BSw = cut.gather(k_BGSd.transpose(1, 2).flatten(2), mask.lengths)
    k_BGSd = k_BSw.unflatten(-1, (k_BGSd.shape[1], -1)).transpose(1, 2).contiguous()
    largest_H = q_BHSd.new_full(q_BHSd.shape[1:2], -inf, dtype=torch.promote_types(q_BHSd.dtype, torch.float32))
    if not q_BHSd.numel():
        return largest_H
    logits_of_a_query = q_BHSd.shape[0] * q_BHSd.shape[1] * k_BGSd.shape[2]
    block = min(MOST_QUERIES, max(1, MOST_LOGITS // logits_of_a_query))
    for run in _runs(mask, cut, q_BHSd.shape[2]):
        for queries in run.split(block):
            largest_H = torch.maximum(largest_H, _largest_of(queries, q_BHSd, k_BGSd, mask))
    return largest_H * scale


class _Run(NamedTuple):
    """Neighbouring queries of a sequence: from ``first`` on among this rank's, and in its row from ``place`` on."""

    first: int
    place: int
    length: int
    sequence: int
    """Where in its row their sequence begins."""

    def split(self, length: int) -> Iterator[_Run]:
        """Yield runs of at most ``length`` queries."""
        for begin in range(0, self.length, length):
            shorter = min(length, self.length - begin)
            yield _Run(self.first + begin, self.place + begin, shorter, self.sequence)


def _runs(mask: Mask, cut: SequenceCut, num_queries: int) -> Iterator[_Run]:
    """Yield this rank's runs of queries: of each sequence its pieces, which lie one behind another."""
    first = sequence = 0
    for length in mask.lengths or (num_queries * cut.size,):
        piece = length // cut.unit
        for number in dict.fromkeys(cut.pieces(cut.index)):
            yield _Run(first, sequence + number * piece, piece, sequence)
            first += piece
        sequence += length


def _largest_of(run: _Run, q_BHSd: Tensor, k_BGSd: Tensor, mask: Mask) -> Tensor:
    """Largest product ``(H)`` of the queries of a run with keys that they see."""
    batch, groups = k_BGSd.shape[:2]
    behind = run.place + run.length
    first = run.sequence if mask.window is None else max(run.sequence, run.place - mask.window + 1)
    # (B, H, S, d) -> (B G, H/G S, d): heads that share keys are rows of one product.
    q = q_BHSd[:, :, run.first : run.first + run.length].reshape(batch * groups, -1, q_BHSd.shape[-1])
    logits = _product(q, k_BGSd[:, :, first:behind].flatten(0, 1).mT)
    logits_BHSS = logits.view(batch, -1, run.length, behind - first)
    # Keys before the run are visible to all of it, unless there is a window or documents.
    is_plain = mask.window is None and (mask.documents_BS is None or mask.lengths is not None)
    masked = run.place if is_plain else first
    visible = _visible(run, masked, mask, q.device)
    logits_BHSS[..., masked - first :].masked_fill_(~visible, -inf)
    largest_BHS = logits_BHSS.amax(-1)
    if mask.valid_BS is not None:
        valid_BS = mask.valid_BS[:, run.first : run.first + run.length]
        largest_BHS = largest_BHS.masked_fill(~valid_BS.unsqueeze(1), -inf)
    return largest_BHS.amax((0, 2))


def _visible(run: _Run, first_key: int, mask: Mask, device: torch.device) -> Tensor:
    """Bool ``(B or 1, 1, queries, keys)``: whether each query of a run sees each key from ``first_key`` to its end."""
    behind = run.place + run.length
    documents_BS = None
    if mask.documents_BS is not None and mask.lengths is None:  # with lengths, a run is inside of one document
        documents_BS = mask.documents_BS[:, first_key:behind]
    return replace(mask, documents_BS=documents_BS).visible(run.length, behind - first_key, device)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Products of matrices in fp32 or wider. PyTorch has those of bf16 for CUDA only; elsewhere they are widened."""
    if takes_kernels(a) and a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(_widened(a), _widened(b))


def _widened(x: Tensor) -> Tensor:
    """``x`` in fp32 or wider, in which a CPU multiplies it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.dtype is wide:
        return x
    with standing_for(x, x.dtype):
        return x.to(wide)
