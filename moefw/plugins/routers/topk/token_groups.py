"""The ranks that split the tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch.distributed import ProcessGroup

TokenGroups = Mapping[int | None, ProcessGroup | None]
"""The group of the ranks by ``Batch.cp``. None: a rank has whole micro-batches."""

ALONE: Final[TokenGroups] = {None: None}
