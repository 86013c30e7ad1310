"""Which keys a query sees."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from moefw.core.stages import Batch, tensor_dataclass


@tensor_dataclass
class Mask:
    """A causal mask, whose queries are the last ``queries`` of ``keys`` positions. Each of them sees its own key."""

    window: int | None = None
    """A query sees only the last ``window`` positions, its own included: key j is visible to query i if i - j < window
    (arXiv 2004.05150). At least 1. None: all positions before it."""
    documents_BS: Tensor | None = None
    """Of an integer dtype: the number of each key's document. A query sees only keys of its own. None: one document."""
    lengths: tuple[int, ...] | None = None
    """The lengths of the documents of the one row, if the host knows them; they are computed one by one then."""
    cp: int | None = None
    """See :class:`moefw.Batch`."""
    valid_BS: Tensor | None = None
    """bool: which queries of this rank are of valid tokens. Those of padding see keys, too, and nobody uses what comes
    of them. None: all."""

    @classmethod
    def of(cls, batch: Batch, window: int | None = None) -> Self:
        """Mask of the sequences of a batch."""
        valid_BS = batch.mask_BS
        if batch.lengths is not None and len(batch.lengths) == 1:
            return cls(window=window, cp=batch.cp, valid_BS=valid_BS)  # one document: nothing to tell apart
        documents_BS = batch.documents_BS
        return cls(window=window, documents_BS=documents_BS, lengths=batch.lengths, cp=batch.cp, valid_BS=valid_BS)

    def is_plain(self, queries: int, keys: int) -> bool:
        """Whether a kernel's causal mask over as many queries as keys is this mask."""
        sees_all_before = self.window is None or self.window >= keys
        return sees_all_before and self.documents_BS is None and queries == keys

    def visible(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Bool tensor (1, 1, queries, keys), or (B, 1, queries, keys) with documents; True where visible."""
        first = keys - queries  # the position of the first query
        key_S = torch.arange(keys, device=device)
        distance = key_S.narrow(0, first, queries).unsqueeze(1) - key_S
        visible = distance >= 0
        if self.window is not None:
            visible = visible & (distance < self.window)
        visible = visible.expand(1, 1, queries, keys)
        if self.documents_BS is None:
            return visible
        of_keys = self.documents_BS.unsqueeze(1).unsqueeze(1)  # (B, 1, 1, keys)
        of_queries = of_keys.mT.narrow(2, first, queries)  # (B, 1, queries, 1)
        return visible & (of_queries == of_keys)
