"""Loading a checkpoint into a model in any layout: each rank reads the chunks that hold what it stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moefw.core.data import TOKENIZER
from moefw.core.errors import CheckpointError
from moefw.runtime.communication.agreement import raise_together
from moefw.runtime.pipeline.stage import names_in_stages
from moefw.training.checkpoint.base import require_same_base
from moefw.training.checkpoint.choice import way_out
from moefw.training.checkpoint.manifest import Base, SavedTensor, words
from moefw.training.checkpoint.reading import AnyManifest, Reader, opened
from moefw.training.checkpoint.slots import Slot, model_slots, optimizer_slots

T = TypeVar("T")


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    tokenizer: str = "",
    base: Base | None = None,
    group: ProcessGroup | None = None,
) -> AnyManifest:
    """Fill a model, its state and its optimizer, and return the manifest. Collective.

    Frozen parameters are not filled: the folder of the ``base`` in use has them. ``tokenizer``: fingerprint of the
    tokenizer in use. Raises CheckpointError on all ranks of ``group`` if one of them sees a damaged folder, another
    model, another tokenizer or another base. What the manifest and the indexes tell is checked before any tensor is
    filled. A chunk is checked as it is read, so that where one is damaged, other tensors may be filled: the model must
    not be used then.
    """
    names = names_in_stages(model_slots(model), model)
    checked, error = _attempt(lambda: _checked(folder, model, optimizer, tokenizer, base, names))
    raise_together(error, group)
    assert checked is not None
    reader, slots, rooms = checked
    _, error = _attempt(lambda: _fill(reader, slots))
    raise_together(error, group)
    if optimizer is not None:
        for parameter, held in rooms.items():
            optimizer.state[parameter].update(held)
    return reader.manifest


def _attempt(act: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
    """Result, or the CheckpointError that was raised."""
    try:
        return act(), None
    except CheckpointError as error:
        return None, error


@torch.no_grad()
def _fill(reader: Reader, slots: Mapping[str, Slot]) -> None:
    with way_out(reader.folder):
        reader.fill({name: slot.targets for name, slot in slots.items()})


def _checked(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tokenizer: str,
    base: Base | None,
    names: Set[str],
) -> tuple[Reader, Mapping[str, Slot], Mapping[nn.Parameter, dict[str, Tensor]]]:
    """The checkpoint, the slot of each tensor by name, and the states of each parameter. Raises CheckpointError.

    ``names``: those of the slots of all stages of a pipeline.
    """
    with way_out(folder):
        reader = opened(folder)
    origin = reader.manifest.origin
    _check_same_tokenizer(folder, origin.tokenizer, tokenizer)
    require_same_base(folder, origin.base, base)
    saved = reader.tensors
    slots = model_slots(model)
    rooms: dict[nn.Parameter, dict[str, Tensor]] = {}
    _check_same_model(folder, saved, slots, names)
    if optimizer is not None and any(name.startswith("optimizer/") for name in saved):
        states, rooms = optimizer_slots(model, optimizer, saved)
        _check_tensors(folder, saved, states)
        slots |= states
    return reader, slots, rooms


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
