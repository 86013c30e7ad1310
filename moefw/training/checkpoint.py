"""Checkpoints: safetensors under canonical names, a JSON manifest with hashes, committed by one rename. No pickle.

Names do not depend on the layout, so a checkpoint loads into any layout of the same model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moefw.core.contracts import Canonical, Layout
from moefw.core.errors import CheckpointError
from moefw.core.naming import by_parameter, canonical_parameters, expert_parameters, joined, state_tensors, states
from moefw.core.parallel.pieces import all_of, whole
from moefw.training.agreement import everywhere
from moefw.training.folder import MANIFEST, TOKENIZER, checkpoint_dirs
from moefw.training.gradients import copied_over, split_axis
from moefw.training.meters import HOLDERS

FORMAT = 1


def save(
    run_dir: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    identity: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write ``checkpoints/step-N`` and drop all but the newest ``keep``. Collective; raises CheckpointError."""
    final = run_dir / "checkpoints" / f"step-{step}"
    scratch = final.with_name(final.name + ".tmp")
    leads = layout.rank == 0
    _together(lambda: _empty(scratch) if leads else None, scratch, layout)
    tensors = {name: value.contiguous() for name, value in _owned(model, optimizer, layout)}
    shards = _together(lambda: _write_shard(scratch, tensors, layout.rank), scratch, layout)
    manifest = {"format": FORMAT, "step": step, **identity, "shards": [shard for shard in shards if shard]}
    _together(lambda: _commit(scratch, manifest, final) if leads else None, scratch, layout)
    for _, old in checkpoint_dirs(run_dir)[:-keep] if leads else []:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _empty(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)


def _write_shard(scratch: Path, tensors: dict[str, Tensor], rank: int) -> dict[str, Any] | None:
    """Write a rank's tensors and return what the manifest says of them; None where it has none."""
    if not tensors:
        return None
    path = scratch / f"rank-{rank:05d}.safetensors"
    save_file(tensors, path)
    _sync(path)
    return {"file": path.name, "sha256": _hash(path), "tensors": sorted(tensors)}


def _commit(scratch: Path, manifest: Mapping[str, Any], final: Path) -> None:
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _sync(scratch / MANIFEST)
    shutil.rmtree(final, ignore_errors=True)
    scratch.rename(final)
    _sync(final.parent)


def _together(write: Callable[[], Any], scratch: Path, layout: Layout) -> list[Any]:
    """Let each rank write, and return what each answers. Raises CheckpointError on all where one of them fails."""
    answer, reason = None, None
    try:
        answer = write()
    except (OSError, SafetensorError) as error:
        reason = str(error)
    answers = everywhere([answer, reason], layout.host_group())
    reasons = [reason for _, reason in answers if reason is not None]
    if reasons:
        if layout.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(f"{scratch.stem} could not be saved: {reasons[0]}.", "Earlier checkpoints are untouched.")
    return [answer for answer, _ in answers]


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, tokenizer: str = ""
) -> dict[str, Any]:
    """Fill a model, its state and its optimizer, checking every hash first; return the manifest.

    ``tokenizer``: fingerprint of the one in use. Raises CheckpointError, with nothing changed, if the folder is damaged
    or holds another model, or one that was trained with another tokenizer.
    """
    manifest = _read_manifest(folder)
    _check_same_tokenizer(folder, manifest.get("tokenizer", ""), tokenizer)
    where: dict[str, Path] = {}
    for shard in manifest["shards"]:
        path = folder / shard["file"]
        if not path.is_file() or _hash(path) != shard["sha256"]:
            fix = f"Delete {folder}: the checkpoint before it is the last one then."
            raise CheckpointError(f"{path} is missing or damaged.", fix)
        where |= dict.fromkeys(shard["tensors"], path)
    wanted = {f"model/{piece.name}": _Slot(piece.parameter, piece) for piece in canonical_parameters(model)}
    wanted |= {f"state/{name}": _Slot(tensor) for name, tensor in state_tensors(model).items()}
    _check_same_model(folder, where, wanted)
    keys = {name.split("/")[1] for name in where if name.startswith("optimizer/")}
    if optimizer is not None:
        wanted |= _optimizer_slots(model, optimizer, where, keys)
    files = {path: safe_open(path, "pt") for path in set(where.values())}
    for slots in _by_target(wanted):
        with torch.no_grad(), all_of(slots[0][1].target) as values:
            for name, slot in slots:
                slot.fill(values, files[where[name]].get_tensor(name))
    return manifest


@dataclass(frozen=True, eq=False)
class _Slot:
    """A tensor to fill: the ``piece`` of a parameter, or of what is shaped like it; None: something of its own."""

    target: Tensor
    piece: Canonical | None = None

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the saved tensor."""
        if self.piece is None:
            return tuple(self.target.shape)
        shape = self.piece.of(torch.empty(self.target.shape, device="meta")).shape
        return self.piece.shard.whole(shape) if self.piece.shard else tuple(shape)

    def fill(self, values: Tensor, saved: Tensor) -> None:
        """Write the saved tensor to its place in ``values``, which are all of the target's."""
        if self.piece is None:
            values.copy_(saved)
        else:
            self.piece.of(values).copy_(self.piece.shard.of(saved) if self.piece.shard else saved)


def _by_target(wanted: Mapping[str, _Slot]) -> Iterable[list[tuple[str, _Slot]]]:
    """Return the slots with their names, those of one tensor together."""
    targets: dict[int, list[tuple[str, _Slot]]] = {}
    for name, slot in wanted.items():
        targets.setdefault(id(slot.target), []).append((name, slot))
    return targets.values()


def _owned(model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield what this rank writes, on the host: the ranks that hold copies of parameters take turns.

    One tensor at a time is whole on the device: states that rest elsewhere may find no room there together.
    """
    experts = expert_parameters(model)
    for turn, (parameter, pieces) in enumerate(by_parameter(model)):
        axes = copied_over("experts" if parameter in experts else "dense", split_axis(pieces))
        moments = {f"optimizer/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
        for kind, held in {"model": parameter.detach(), **moments}.items():
            value = whole(held.to(parameter.device))
            if layout.index(*axes) != turn % layout.size(*axes):
                continue
            for piece in pieces:
                tensor = piece.of(value) if value.shape == parameter.shape else value
                if piece.shard is not None:
                    tensor = joined(tensor, piece.shard, layout.group(piece.shard.axis))
                if piece.shard is None or piece.shard.index == 0:
                    yield f"{kind}/{piece.name}", tensor.to("cpu", copy=True)
    for side, tensors in states(model).items():
        if layout.index(*HOLDERS[side]) == 0:
            yield from ((f"state/{name}", tensor.to("cpu", copy=True)) for name, tensor in tensors.items())


def _optimizer_slots(
    model: nn.Module, optimizer: torch.optim.Optimizer, where: Mapping[str, Path], keys: set[str]
) -> dict[str, _Slot]:
    """Make room for the optimizer's tensors and return the pieces to fill, by name."""
    slots: dict[str, _Slot] = {}
    for piece in canonical_parameters(model):
        state = optimizer.state[piece.parameter]
        for key in sorted(keys):
            name = f"optimizer/{key}/{piece.name}"
            if name in where:
                with safe_open(where[name], "pt") as file:
                    shaped = bool(file.get_slice(name).get_shape())
                if key not in state:
                    like = piece.parameter.detach()
                    state[key] = torch.zeros_like(like) if shaped else torch.zeros((), device=like.device)
                slots[name] = _Slot(state[key], piece if shaped else None)
    return slots


def _check_same_model(folder: Path, where: Mapping[str, Path], wanted: Mapping[str, _Slot]) -> None:
    there = {name for name in where if not name.startswith("optimizer/")}
    local_experts = {name for name in there if ".experts." in name}
    missing, extra = sorted(wanted.keys() - there), sorted(there - wanted.keys() - local_experts)
    if missing or extra:
        kind, names = ("lacks", missing) if missing else ("holds also", extra)
        shown = ", ".join(name.split("/", 1)[1] for name in names[:3])
        what = f"{folder} is a checkpoint of another model: it {kind} {shown} and {max(0, len(names) - 3)} more."
        raise CheckpointError(what, "Use the spec that it was trained with (spec.yaml in the run's folder).")
    for name, slot in wanted.items():
        with safe_open(where[name], "pt") as file:
            shape = tuple(file.get_slice(name).get_shape())
        if shape != slot.whole:
            plain = name.split("/", 1)[1]
            what = f"{folder} is a checkpoint of another model: {plain} is {shape} there and {slot.whole} here."
            raise CheckpointError(what, "Use the spec that it was trained with (spec.yaml in the run's folder).")


def _check_same_tokenizer(folder: Path, saved: str, here: str) -> None:
    if saved and here and saved != here:
        kept = folder.parents[1] / TOKENIZER
        name = (
            kept if kept.is_file() else "bytes" if saved == "bytes" else "the tokenizer.json that it was trained with"
        )
        what = f"{folder} was trained with another tokenizer: to the model, the ids of this one are other text."
        raise CheckpointError(what, f"Use data.tokenizer={name}")


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        version, _ = manifest["format"], manifest["step"]
        _ = [(shard["file"], shard["sha256"], shard["tensors"]) for shard in manifest["shards"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{folder / MANIFEST} is not the list of a checkpoint: {type(error).__name__} {error}."
        raise CheckpointError(what, f"Delete {folder}: the checkpoint before it is the last one then.") from error
    if version != FORMAT:
        what = f"{folder} has checkpoint format {version}; this moefw reads {FORMAT}."
        raise CheckpointError(what, "Use the moefw version that wrote it.")
    return manifest


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
