"""Checkpoints of a model of two tensors, and functions that change their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fake_steps import fake_assembly
from moefw.core.errors import CheckpointError
from moefw.runtime.parallel.opened_layout import OpenedLayout
from moefw.testing.training import SMALL
from moefw.training import checkpoint
from moefw.training.checkpoint import files, saving
from moefw.training.checkpoint.parts import Part
from moefw.training.checkpoint.reading import opened, read_manifest

SHARD = files.file_of(0)
INDEX = files.index_of(SHARD)


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


def refused(folder: Path, *, filled: bool = False) -> str:
    """Return the message with which a checkpoint is refused, and check that loading changes nothing.

    ``filled``: a tensor is damaged, and others may be filled; only the optimizer has no new state.
    """
    model, optimizer = tiny(2.0)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(folder, model, optimizer)
    after = everything(model, optimizer)
    assert before.keys() == after.keys()
    assert filled or all(before[name].equal(after[name]) for name in before)
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


def forge_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index of the first file, and its hash in the manifest."""
    path = folder / INDEX
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    forge(folder, lambda manifest: manifest["files"].update({SHARD: digest}))


def saved(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, whoever wrote them."""
    reader = opened(folder)
    return {name: reader.read(name) for name in reader.tensors}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint, under hashes that are right. One file has them all then."""
    manifest = read_manifest(folder)
    tensors = saved(folder)
    change(tensors)
    for path in folder.iterdir():
        path.unlink()
    parts = [
        Part(name=name, values=values, corner=(0,) * values.dim(), whole=tuple(values.shape))
        for name, values in tensors.items()
    ]
    report = saving.report(files.write(folder / SHARD, parts, lambda said: None), parts)
    (folder / "manifest.json").write_bytes(saving.manifest_of(manifest.step, manifest.origin, [report]).sealed())


def put(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Replace a tensor of a checkpoint, under hashes that are right; None removes it."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    rewrite(folder, change)


def spoil(folder: Path, name: str, value: float = torch.nan) -> None:
    """Put ``value`` into a tensor of a checkpoint, under hashes that are right."""
    rewrite(folder, lambda tensors: tensors[name].view(-1)[0].fill_(value))
