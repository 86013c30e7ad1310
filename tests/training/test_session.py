"""A rank joins its world with a backend that its GPUs support, and leaves without waiting for others if it fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist

from moefw.compose.build import Shared
from moefw.training import session


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["a"], "nccl"),
        (["a", "b", "c", "d"], "nccl"),
        (["a", "a"], "gloo"),
        (["a", "b", "b", "c"], "gloo"),
    ],
)
def test_ranks_talk_over_nccl_where_none_shares_its_gpu(
    gpus: list[str], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any device number under which each rank sees its GPU."""
    seen = iter(gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=next(seen)))
    store, device = dist.HashStore(), torch.device("cuda", 0)
    with ThreadPoolExecutor(len(gpus)) as ranks:
        chosen = [ranks.submit(session._backend, device, store, len(gpus)) for _ in gpus]
        assert [each.result(60) for each in chosen] == [backend] * len(gpus)


def test_cpus_talk_over_gloo() -> None:
    assert session._backend(torch.device("cpu"), dist.HashStore(), 8) == "gloo"


@pytest.mark.parametrize(("backend", "told"), [("nccl", torch.device("cuda", 3)), ("gloo", None)])
def test_nccl_is_told_its_gpu(backend: str, told: torch.device | None, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = create_autospec(dist.init_process_group)
    monkeypatch.setattr(dist, "init_process_group", joined)
    session._join(backend, torch.device("cuda", 3), store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(1))
    assert joined.call_args.args == (backend,)
    assert joined.call_args.kwargs["device_id"] == told


class Held:
    def __init__(self, log: list[str], name: str, *, together: bool = False, fails: bool = False) -> None:
        self.log, self.name, self.closes_together, self.fails = log, name, together, fails

    def close(self) -> None:
        self.log.append(self.name)
        if self.fails:
            raise OSError(self.name)


def holding(log: list[str]) -> Shared:
    shared = Shared()
    held = [Held(log, "first"), Held(log, "buffer", together=True), Held(log, "broken", fails=True), Held(log, "last")]
    for each in held:
        shared.get(each.name, lambda each=each: each)  # type: ignore[misc]
    return shared


def test_everything_is_closed_in_reverse_order_whichever_fails() -> None:
    log: list[str] = []
    shared = holding(log)
    with pytest.raises(OSError, match="broken"):
        shared.close()
    assert log == ["last", "broken", "buffer", "first"]
    shared.close()
    assert len(log) == 4


def test_a_rank_that_fails_waits_for_no_other() -> None:
    log: list[str] = []
    with pytest.raises(OSError, match="broken"):
        holding(log).close(together=False)
    assert log == ["last", "broken", "first"]
