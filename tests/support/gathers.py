"""What ranks send each other when FSDP gathers a unit, and how often it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.utils._python_dispatch import TorchDispatchMode


class Gathers(TorchDispatchMode):
    """Counts the bytes that a rank contributes to all-gathers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            assert "gather" in func.name(), func
            self.nbytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


@contextmanager
def gathers_counted() -> Iterator[Counter[str]]:
    """Count how often each unit is gathered in this block, by its name in the model; that of the root is empty."""
    counts: Counter[str] = Counter()
    unshard = fsdp.FSDPParamGroup.unshard
    gather = vars(fsdp)["foreach_all_gather"]
    names: list[str] = []

    def named(group: Any, *args: Any, **kwargs: Any) -> None:
        names.append(group._module_fqn or "")
        try:
            unshard(group, *args, **kwargs)
        finally:
            names.pop()

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[names[-1]] += 1
        return gather(*args, **kwargs)

    with (
        mock.patch.object(fsdp.FSDPParamGroup, "unshard", named),
        mock.patch.object(fsdp, "foreach_all_gather", counted),
    ):
        yield counts
