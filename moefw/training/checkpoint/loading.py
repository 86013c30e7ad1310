"""Loading a checkpoint into a model in any layout: each rank reads the chunks that hold what it stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TypeVar

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moefw.core.data import TOKENIZER
from moefw.core.errors import CheckpointError, Problem
from moefw.runtime.communication.agreement import everywhere, raise_together
from moefw.runtime.naming import by_parameter
from moefw.runtime.pipeline.stage import names_in_stages
from moefw.training.checkpoint.base import require_same_base
from moefw.training.checkpoint.choice import way_out
from moefw.training.checkpoint.differences import (
    Differences,
    misfit_of_forms,
    misfit_of_optimizer,
    misfit_of_weights,
    of_any_expert,
    states_of_optimizer,
    states_of_parts,
)
from moefw.training.checkpoint.manifest import Base, SavedTensor
from moefw.training.checkpoint.optimizer_keys import keys_kept
from moefw.training.checkpoint.reading import AnyManifest, Reader, opened
from moefw.training.checkpoint.slots import Slot, model_slots, optimizer_slots

T = TypeVar("T")


@frozen(kw_only=True)
class Loaded:
    """A checkpoint that has been loaded: its manifest, and the states that were not carried on from it."""

    manifest: AnyManifest
    differences: Differences


@frozen(kw_only=True, eq=False)
class _Checked:
    """A checkpoint that fits this rank. ``slots``: those to fill, by name.

    ``optimizer_slots``: those of the optimizer's states, ``rooms``: all states of each parameter. ``fresh``: states of
    this rank's parts that are not filled. ``another_optimizer``: the states in the checkpoint are not those of the
    optimizer here.
    """

    reader: Reader
    slots: Mapping[str, Slot]
    optimizer_slots: Mapping[str, Slot]
    rooms: Mapping[nn.Parameter, Mapping[str, Tensor]]
    fresh: frozenset[str]
    dropped: frozenset[str]
    another_optimizer: bool


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    tokenizer: str = "",
    base: Base | None = None,
    fresh_optimizer: bool = False,
    group: ProcessGroup | None = None,
) -> Loaded:
    """Fill a model, its state and its optimizer. Collective.

    Frozen parameters are not filled: the folder of the ``base`` in use has them. States of parts that the checkpoint
    lacks stay as they are. ``tokenizer``: fingerprint of the tokenizer in use. ``fresh_optimizer``: the states of
    another optimizer are dropped. Raises CheckpointError on all ranks of ``group`` if one of them sees a damaged
    folder, another model, another tokenizer, another base, or another optimizer otherwise. What the manifest and the
    indexes tell is checked before any tensor is filled. A chunk is checked as it is read, so that where one is damaged,
    other tensors may be filled: the model must not be used then.
    """
    known = names_in_stages(map(of_any_expert, model_slots(model)), model)
    checked, error = _attempt(
        lambda: _checked(folder, model, optimizer, tokenizer, base, known, fresh_optimizer=fresh_optimizer)
    )
    raise_together(error, group)
    assert checked is not None
    differences = _differences(checked, group)
    slots = dict(checked.slots)
    if not differences.fresh_optimizer:
        slots |= checked.optimizer_slots
    _, error = _attempt(lambda: _fill(checked.reader, slots))
    raise_together(error, group)
    if optimizer is not None and not differences.fresh_optimizer:
        for parameter, held in checked.rooms.items():
            optimizer.state[parameter].update(held)
    return Loaded(manifest=checked.reader.manifest, differences=differences)


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
    known: Set[str],
    *,
    fresh_optimizer: bool,
) -> _Checked:
    """What of a checkpoint goes where on this rank. Raises CheckpointError.

    ``known``: the names of the slots of all stages of a pipeline, of any expert.
    """
    with way_out(folder):
        reader = opened(folder)
    origin = reader.manifest.origin
    _check_same_tokenizer(folder, origin.tokenizer, tokenizer)
    require_same_base(folder, origin.base, base)
    saved = reader.tensors
    slots = model_slots(model)
    problems = []
    if misfit := misfit_of_weights(saved, slots, known):
        fix = "Use the spec that it was trained with (spec.yaml in the run's folder)."
        problems.append(Problem(f"{folder} is a checkpoint of another model: {misfit}.", fix))
    fresh, dropped = states_of_parts(saved, slots, known)
    states: Mapping[str, Slot] = {}
    rooms: Mapping[nn.Parameter, Mapping[str, Tensor]] = {}
    misfit = ""
    # A folder that was imported or upcycled is a checkpoint of step 0, which no optimizer has made.
    if optimizer is not None and (reader.manifest.step > 0 or states_of_optimizer(saved)):
        states, rooms, misfit = _states_to_fill(saved, model, optimizer, compare_forms=not problems)
        if misfit and not fresh_optimizer:
            fix = (
                "Use the optimizer, and the memory policies of its states, that it was trained with (train.optimizer "
                "and memory in spec.yaml of the run's folder), or train on from its weights, with fresh states of this "
                "one: train.fresh_optimizer=true."
            )
            problems.append(Problem(f"{folder} is a checkpoint of another optimizer: {misfit}.", fix))
    if problems:
        raise CheckpointError(problems)
    return _Checked(
        reader=reader,
        slots={name: slot for name, slot in slots.items() if name not in fresh},
        optimizer_slots=states,
        rooms=rooms,
        fresh=frozenset(fresh),
        dropped=frozenset(dropped),
        another_optimizer=bool(misfit),
    )


def _states_to_fill(
    saved: Mapping[str, SavedTensor], model: nn.Module, optimizer: torch.optim.Optimizer, *, compare_forms: bool
) -> tuple[Mapping[str, Slot], Mapping[nn.Parameter, Mapping[str, Tensor]], str]:
    """Slots of an optimizer's states, the states of each parameter, and how the saved ones differ from them in words.

    There is nothing to fill if they do. ``compare_forms``: also shapes and dtypes, as those of the weights are right.
    """
    kept = keys_kept(optimizer)
    of_weights = {
        piece.name: kept[parameter]
        for parameter, pieces in by_parameter(model)
        if parameter in kept
        for piece in pieces
    }
    misfit = misfit_of_optimizer(saved, of_weights)
    if misfit:
        return {}, {}, misfit
    slots, rooms = optimizer_slots(model, optimizer, saved)
    if compare_forms and (misfit := misfit_of_forms(saved, slots)):
        return {}, {}, misfit
    return slots, rooms, ""


def _differences(checked: _Checked, group: ProcessGroup | None) -> Differences:
    """Differences between a checkpoint and what all ranks have. Collective.

    Every rank begins with fresh states of its optimizer if one has to.
    """
    saved = checked.reader.tensors
    answers = everywhere([sorted(checked.fresh), checked.another_optimizer], group)
    fresh = {name for names, _ in answers for name in names}
    of_another_form = fresh & saved.keys()
    fresh_optimizer = any(another for _, another in answers)
    dropped = checked.dropped | of_another_form
    if fresh_optimizer:
        dropped |= {name for name in saved if name.startswith("optimizer/")}
    return Differences(fresh=fresh, dropped=dropped, fresh_optimizer=fresh_optimizer)


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
