"""Refusals of offload: a missing folder, a full disk or memory, and invalid specs."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moefw
from memory_cases import model_case, offload, recompute
from moefw.plugins.memory.offload.buffers import UnnamedFiles, host_memory
from moefw.plugins.memory.offload.policy import OffloadPolicy
from moefw.plugins.memory.offload.pool import Pool
from moefw.plugins.memory.offload.streams import PlainTransfers
from moefw.testing.suites.runs import global_batch, open_model

CPU = torch.device("cpu")


KILLED = """
import sys, torch
from moefw.plugins.memory.offload.policy import OffloadPolicy
from moefw.plugins.memory.offload.pool import open_pool
pool = open_pool(torch.device("cpu"), sys.argv[1])
region = OffloadPolicy(pool, min_bytes=0, fraction=1.0).wrap("region", torch.sin)
kept = []
while True:
    kept = kept[-8:] + [region(torch.ones(1 << 18, requires_grad=True))]
    print(pool.num_buffers, flush=True)
"""


def test_a_killed_run_leaves_no_file(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(12):
        assert process.stdout.readline()
    open_files = Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert str(tmp_path) in open_files
    assert list(tmp_path.iterdir()) == []


def refused(memory: Sequence[Mapping[str, Any]], **parts: Any) -> str:
    with pytest.raises(moefw.PlanError) as caught:
        open_model(model_case(1, memory, **parts))
    return str(caught.value)


def test_a_folder_that_is_missing_or_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("nowhere", "No such file or directory"), ("file", "Not a directory")):
        said = refused([offload("experts", to="nvme", path=str(tmp_path / name))])
        assert f"cannot write to path {str(tmp_path / name)!r}: {why}" in said
        assert said.endswith("Make the folder, or name another one, on every machine of the run.")


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(**_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    said = refused([offload("experts", to="nvme", path=str(tmp_path))])
    assert "Permission denied. Give this user the right to write there, or name another one" in said


def test_a_full_disk_is_told_when_a_buffer_is_made(tmp_path: Path) -> None:
    files = UnnamedFiles(tmp_path)
    pool = Pool(files, PlainTransfers(CPU))
    region = OffloadPolicy(pool, min_bytes=0, fraction=1.0).wrap("region", torch.sin)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(moefw.RunError) as caught:
            region(torch.ones(1 << 20, requires_grad=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = str(caught.value)
    assert f"no room for {1 << 22} more bytes in path {str(tmp_path)!r}: File too large." in said
    assert said.endswith("Free some, name a larger disk, or offload less (fraction, regions).")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_raises_out_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, assembly, layout, shared = open_model(model_case(1, [offload("layer", to="nvme", path=str(tmp_path))]))
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(moefw.RunError, match="No space left on device"):
        model(replace(global_batch(assembly, layout, 0)[0], loss_scale=torch.tensor(1.0)))
    shared.close()


@pytest.mark.parametrize(("pinned", "kind"), [(False, "host memory"), (True, "page-locked host memory")])
def test_host_memory_that_cannot_be_had_is_told(pinned: bool, kind: str) -> None:
    words = rf"{1 << 62} bytes of {kind} for activations .* Offload less \(fraction, regions\), or use to: nvme"
    with pytest.raises(moefw.RunError, match=words):
        host_memory(pinned=pinned)(1 << 62)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ([offload("experts", to="nvme")], "nothing says where. Set path to a folder"),
        ([offload("experts", path="somewhere")], "with to: host there are none. Leave path out"),
        ([offload("experts", to="disk")], "'disk'"),
        ([offload("experts", fraction=1.5)], "fraction"),
        ([offload("experts", min_bytes=-1)], "min_bytes"),
        ([offload("experts"), recompute("experts")], "both treat region 'experts'"),
        ([offload("optimizer")], "offload treats what forward saves, and the optimizer's states are not."),
        ([offload("expert")], "Did you mean 'experts'?"),
        ([offload("moe_act")], "grouped offers moe_act=recompute"),
    ],
)
def test_what_cannot_be_is_refused(memory: Sequence[Mapping[str, Any]], says: str) -> None:
    with pytest.raises(moefw.MoefwError) as caught:
        model_case(1, memory).assemble()
    assert says in str(caught.value)
