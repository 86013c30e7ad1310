"""Checkpoints of a model of two tensors, and functions that change their files."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fake_steps import fake_assembly
from moefw.core.errors import CheckpointError
from moefw.models.huggingface.writing import Written
from moefw.runtime.parallel.opened_layout import OpenedLayout
from moefw.testing.training import SMALL
from moefw.training import checkpoint

SHARD = "rank-00000.safetensors"


class Tiny(nn.Module):
    """Two parameters of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(2, 3))
        self.norm = nn.Parameter(torch.zeros(3))


def tiny(value: float = 0.0) -> tuple[Tiny, torch.optim.Optimizer]:
    """Return the model and its optimizer; after an update towards ``value`` unless that is 0."""
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if value:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    return model, optimizer


def layout_alone() -> OpenedLayout:
    """Return the layout of one rank."""
    return OpenedLayout(fake_assembly(dict(SMALL), 1).layout, "cpu")


def save(run_dir: Path, *steps: int, keep: int = 9, value: float = 1.0) -> list[Path]:
    """Save checkpoints of a run on one rank and return their folders."""
    layout = layout_alone()
    return [checkpoint.save(run_dir, step, *tiny(value), layout, checkpoint.Origin(), keep=keep) for step in steps]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of all that a checkpoint fills."""
    states = {
        f"{number}.{key}": value
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }
    return {name: value.detach().clone() for name, value in {**dict(model.named_parameters()), **states}.items()}


def refused(folder: Path) -> str:
    """Return the message with which a checkpoint is refused, and check that loading changes nothing."""
    model, optimizer = tiny(2.0)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(folder, model, optimizer)
    after = everything(model, optimizer)
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    (line,) = str(error.value).splitlines()
    assert "Delete" not in line
    return line


def sealed(content: dict[str, Any]) -> bytes:
    """Return a manifest of this content with its valid hash, as the format defines it."""

    def canonical(data: object) -> bytes:
        return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()

    rest = {key: value for key, value in content.items() if key != "sha256"}
    return canonical({**rest, "sha256": hashlib.sha256(canonical(rest)).hexdigest()})


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and its hash."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_bytes(sealed(content))


def forge_shard(folder: Path, data: bytes) -> None:
    """Replace the bytes of the first shard, and its hash in the manifest."""
    (folder / SHARD).write_bytes(data)

    def change(content: dict[str, Any]) -> None:
        content["shards"][0]["sha256"] = hashlib.sha256(data).hexdigest()

    forge(folder, change)


def spoil(folder: Path, name: str, value: float = torch.nan) -> None:
    """Put ``value`` into a tensor of a checkpoint, under a hash that is right."""
    written = Written.opened(folder)
    written.tensors[name].view(-1)[0] = value
    written.flush()
    forge_shard(folder, (folder / SHARD).read_bytes())


def with_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a safetensors file with another header."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]
