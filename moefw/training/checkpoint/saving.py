"""Saving a checkpoint: every rank writes parts of what it stores, under names that do not depend on the layout.

Nothing is saved that is not finite: no run could continue from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moefw.compose.optimizer import blocks_of
from moefw.core.contracts import Layout
from moefw.core.errors import RunError, os_reason
from moefw.core.records import Canonical
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.finite import is_finite
from moefw.runtime.naming import by_parameter, state_tensors
from moefw.runtime.parallel.boxes import boxes
from moefw.runtime.parallel.local_shards import is_held_as_codes, local
from moefw.runtime.safetensors_dtypes import NAMES
from moefw.system.stamps import stamp
from moefw.training.checkpoint.choice import way_back
from moefw.training.checkpoint.commit import begin, commit, delete, prune
from moefw.training.checkpoint.files import SavedFile, file_of, write
from moefw.training.checkpoint.json_data import item
from moefw.training.checkpoint.manifest import (
    Manifest,
    Origin,
    SavedTensor,
    require_files,
    require_names,
    tensor_from,
    words,
)
from moefw.training.checkpoint.parts import Part, parts_of
from moefw.training.errors import NotWrittenError
from moefw.training.folder import checkpoint_dirs
from moefw.training.full_disk import remedy


def save(
    run_dir: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    origin: Origin,
    *,
    keep: int,
    keep_every: int = 0,
) -> Path:
    """Write ``checkpoints/step-N``, and drop all but the newest ``keep`` and those of each ``keep_every``-th step.

    Collective. Raises RunError on every rank if a value is not finite on one, and NotWrittenError if one cannot write.
    Nothing is committed then.
    """
    stamp("saving a checkpoint")
    require_finite(run_dir, step, _first_bad(model, optimizer), layout)
    scratch = scratch_of(run_dir, step)
    begin_together(scratch, layout)
    parts = parts_of(model, optimizer, layout)
    write_parts = partial(_written, scratch, layout.rank, parts)
    return commit_together(write_parts, scratch, step, origin, layout, keep=keep, keep_every=keep_every)


def scratch_of(run_dir: Path, step: int) -> Path:
    """Folder in which all ranks write the checkpoint of a step, until it is committed."""
    return run_dir / "checkpoints" / f"step-{step}.tmp"


def begin_together(scratch: Path, layout: Layout) -> None:
    """Make the folder that a checkpoint is written in. Collective. Raises NotWrittenError on all ranks if it cannot."""
    _together(lambda: begin(scratch) if layout.rank == 0 else None, scratch, layout)


def commit_together(
    write_parts: Callable[[], dict[str, Any] | None],
    scratch: Path,
    step: int,
    origin: Origin,
    layout: Layout,
    *,
    keep: int,
    keep_every: int,
    delete: Callable[[Path], None] = delete,
) -> Path:
    """Let each rank write what :func:`report` then tells of it, commit the folder as a checkpoint, and drop others.

    Collective. Raises NotWrittenError on all ranks if one cannot write. Nothing is committed then.
    """
    leads = layout.rank == 0
    final = scratch.with_suffix("")
    reports = _together(write_parts, scratch, layout)
    _together(lambda: _commit(scratch, step, origin, reports, final) if leads else None, scratch, layout)
    if leads:
        prune(final.parent.parent, keep=keep, keep_every=keep_every, delete=delete)
    return final


def _written(scratch: Path, rank: int, parts: Sequence[Part]) -> dict[str, Any] | None:
    """Write a rank's parts and return its report; None if it has none."""
    return report(write(scratch / file_of(rank), parts, stamp), parts) if parts else None


def _commit(scratch: Path, step: int, origin: Origin, reports: Sequence[Any], final: Path) -> None:
    commit(scratch, manifest_of(step, origin, reports).sealed(), final)


def report(saved: SavedFile, parts: Sequence[Part]) -> dict[str, Any]:
    """What rank 0 needs of a rank to make the manifest, as JSON data."""
    tensors = {part.name: {"dtype": NAMES[part.values.dtype], "shape": [*part.whole]} for part in parts}
    return {"file": saved.file, "index": saved.digest, "tensors": tensors}


def manifest_of(step: int, origin: Origin, reports: Sequence[Any]) -> Manifest:
    """Manifest of what ranks report; None: a rank has written nothing. Raises ValueError if a report is invalid."""
    tensors: dict[str, SavedTensor] = {}
    for answer in filter(None, reports):
        for name, data in item(answer, "tensors", dict).items():
            tensor = tensor_from(data)
            if tensors.setdefault(name, tensor) != tensor:
                raise ValueError(f"ranks write {words(name)} as {tensors[name]} and as {tensor}")
    files = {item(answer, "file", str): item(answer, "index", str) for answer in filter(None, reports)}
    require_names(tensors)
    require_files(files)
    return Manifest(step=step, origin=origin, tensors=tensors, files=files)


def _together(write: Callable[[], Any], scratch: Path, layout: Layout) -> list[Any]:
    """Call ``write`` on each rank and return all results. Raises NotWrittenError on all ranks if one fails."""
    answer = None
    failure = None
    try:
        answer = write()
    except OSError as error:
        failure = [f"{error.filename or scratch} cannot be written: {os_reason(error)}", remedy(error)]
    except ValueError as error:
        failure = [str(error), "Mend that"]
    answers = everywhere([answer, failure], layout.host_group())
    failures = [(rank, failure) for rank, (_, failure) in enumerate(answers) if failure is not None]
    if failures:
        if layout.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        rank, (reason, mend) = failures[0]
        what = f"{scratch.stem} could not be saved: {reason} (on rank {rank})."
        saved = checkpoint_dirs(scratch.parent.parent)
        if saved:
            fix = f"Earlier checkpoints are untouched. {mend} and continue from step {saved[-1][0]} with --resume."
            raise NotWrittenError(what, fix)
        raise NotWrittenError(what, f"There is no earlier checkpoint. {mend} and train again.")
    return [answer for answer, _ in answers]


def require_finite(run_dir: Path, step: int, bad: str | None, layout: Layout) -> None:
    """Raise RunError on every rank if one of them would save a value that is not finite. Collective.

    ``bad``: the name of the first tensor with such a value on this rank; None: it has none.
    """
    answers = everywhere(bad, layout.host_group())
    bad_ranks = [(rank, name) for rank, name in enumerate(answers) if name is not None]
    if bad_ranks:
        rank, name = bad_ranks[0]
        others = f" (and on ranks {[rank for rank, _ in bad_ranks[1:]]})" if len(bad_ranks) > 1 else ""
        what = f"step {step} is not saved: {words(name)} is not finite on rank {rank}{others}."
        raise RunError(what, way_back(run_dir, layout.host_group()))


def _first_bad(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Name of the first tensor on this rank, of its own copies and shards, that holds NaN or infinity."""
    blocks = blocks_of(optimizer)
    for parameter, pieces in by_parameter(model):
        if is_held_as_codes(parameter):
            continue  # not saved; its values were looked at when they were read
        if not is_finite(local(parameter.detach())):
            return f"model/{_bad_piece(parameter.detach(), pieces)}"
        for key, held in optimizer.state.get(parameter, {}).items():
            if not is_finite(local(held)):
                return f"optimizer/{key}/{_bad_piece(held, pieces, blocks.get(key, 1))}"
    return next((f"state/{name}" for name, held in state_tensors(model).items() if not is_finite(held)), None)


def _bad_piece(held: Tensor, pieces: Sequence[Canonical], block: int = 1) -> str:
    """Name of the non-finite piece of a parameter, or of a tensor of its shape but for ``block`` columns a value."""
    own = local(held)
    named = (box.name for box in boxes(pieces) if held.dim() and not is_finite(box.of_blocks(block).of(own)))
    return next(named, pieces[0].name)
