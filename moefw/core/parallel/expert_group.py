"""The ranks that share out the experts of a layer, and who holds what."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed import ProcessGroup


@frozen(kw_only=True, eq=False)
class ExpertGroup:
    """Ranks of the axes ep x etp, etp innermost: rank ``r`` holds share ``r // etp`` of the experts, part ``r % etp``.

    ``group`` is None where this rank is alone. ``nodes`` is the node of each rank.
    """

    group: ProcessGroup | None
    rank: int
    ep: int
    etp: int
    num_experts: int
    nodes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ep * self.etp

    @property
    def local_experts(self) -> int:
        """The number of experts that each rank holds, or holds a part of."""
        return self.num_experts // self.ep

    @property
    def first_expert(self) -> int:
        """The number of this rank's first expert."""
        return self.rank // self.etp * self.local_experts

    def owners(self, expert_ids_TK: Tensor) -> Tensor:
        """Return the ranks that hold the experts, ``(T, K * etp)`` int64; -1 for a dropped choice."""
        share_TK = expert_ids_TK.div(self.local_experts, rounding_mode="floor")
        if self.etp == 1:
            return share_TK
        parts = torch.arange(self.etp, device=share_TK.device)
        owner = share_TK.unsqueeze(-1) * self.etp + parts
        return owner.masked_fill((share_TK < 0).unsqueeze(-1), -1).flatten(1)

    def parts(self, expert_ids_TK: Tensor) -> Tensor:
        """Return the choices with each part of an expert numbered as an expert of its rank, ``(T, K * etp)`` int64.

        Rank ``r`` holds the parts ``r * local_experts`` and on; -1 stands for a dropped choice.
        """
        owner = self.owners(expert_ids_TK)
        within = expert_ids_TK.remainder(self.local_experts).repeat_interleave(self.etp, 1)
        return (owner * self.local_experts + within).masked_fill(owner < 0, -1)
