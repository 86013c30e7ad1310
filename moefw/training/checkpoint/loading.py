"""Loading a checkpoint into a model in any layout: everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from moefw.core.data import TOKENIZER
from moefw.core.errors import CheckpointError
from moefw.runtime.communication.agreement import raise_together
from moefw.runtime.parallel.local_shards import all_of
from moefw.runtime.pipeline.stage import names_in_stages
from moefw.system.stamps import stamp
from moefw.training.checkpoint.base import require_same_base
from moefw.training.checkpoint.choice import way_out
from moefw.training.checkpoint.manifest import Base, Manifest, SavedTensor, read_manifest
from moefw.training.checkpoint.shards import opened, words
from moefw.training.checkpoint.slots import Slot, by_target, model_slots, optimizer_slots


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    tokenizer: str = "",
    base: Base | None = None,
    group: ProcessGroup | None = None,
) -> Manifest:
    """Check every hash, fill a model, its state and its optimizer, and return the manifest. Collective.

    Frozen parameters are not filled: the folder of the ``base`` in use has them. ``tokenizer``: fingerprint of the
    tokenizer in use. Raises CheckpointError on all ranks of ``group``, before any tensor is filled, if one of them sees
    a damaged folder, another model, another tokenizer or another base.
    """
    checked = None
    error = None
    names = names_in_stages(model_slots(model), model)
    try:
        checked = _checked(folder, model, optimizer, tokenizer, base, names)
    except CheckpointError as own_error:
        error = own_error
    raise_together(error, group)
    assert checked is not None
    manifest, files, slots = checked
    for together in by_target(slots):
        stamp("loading a checkpoint")
        with torch.no_grad(), all_of(together[0][1].target) as values:
            for name, slot in together:
                slot.fill(values, files[name].get_tensor(name))
    return manifest


def _checked(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tokenizer: str,
    base: Base | None,
    names: Set[str],
) -> tuple[Manifest, Mapping[str, Any], Mapping[str, Slot]]:
    """Manifest, and each tensor's open file and slot by name. Raises CheckpointError.

    ``names``: those of the slots of all stages of a pipeline.
    """
    with way_out(folder):
        manifest = read_manifest(folder)
        _check_same_tokenizer(folder, manifest.origin.tokenizer, tokenizer)
        require_same_base(folder, manifest.origin.base, base)
        files = opened(folder, manifest)
    saved = manifest.tensors
    slots = model_slots(model)
    _check_same_model(folder, saved, slots, names)
    if optimizer is not None and any(name.startswith("optimizer/") for name in saved):
        states, rooms = optimizer_slots(model, optimizer, saved)
        _check_tensors(folder, saved, states)
        slots |= states
        for parameter, held in rooms.items():
            optimizer.state[parameter].update(held)
    return manifest, files, slots


def _check_same_model(
    folder: Path, saved: Mapping[str, SavedTensor], slots: Mapping[str, Slot], names: Set[str]
) -> None:
    _check_tensors(folder, saved, slots)
    known = names | {name for name in saved if ".experts." in name}  # other ranks have other experts
    states = {name: f"model/{name.split('/', 2)[2]}" for name in saved if name.startswith("optimizer/")}
    extra = sorted(name for name in saved if states.get(name, name) not in known)
    if extra:
        raise _another(folder, f"it holds also {_listed(extra)}")


def _check_tensors(folder: Path, saved: Mapping[str, SavedTensor], slots: Mapping[str, Slot]) -> None:
    missing = sorted(slots.keys() - saved.keys())
    if missing:
        raise _another(folder, f"it lacks {_listed(missing)}")
    for name, slot in slots.items():
        misfit = slot.misfit(saved[name])
        if misfit:
            raise _another(folder, f"{words(name)} is {misfit}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(words, names[:3])) + more


def _another(folder: Path, what: str) -> CheckpointError:
    fix = "Use the spec that it was trained with (spec.yaml in the run's folder)."
    return CheckpointError(f"{folder} is a checkpoint of another model: {what}.", fix)


def _check_same_tokenizer(folder: Path, saved: str, here: str) -> None:
    if saved and here and saved != here:
        kept = folder.parent.parent / TOKENIZER
        if kept.is_file():
            name = str(kept)
        elif saved == "bytes":
            name = "bytes"
        else:
            name = "the tokenizer.json that it was trained with"
        what = f"{folder} was trained with another tokenizer: to the model, the ids of this one are other text."
        raise CheckpointError(what, f"Use data.tokenizer={name}")
