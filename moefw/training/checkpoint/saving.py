"""Saving a checkpoint: every rank writes a share of the tensors, under names that do not depend on the layout.

Nothing is saved that is not finite: no run could continue from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from moefw.core.contracts import Layout
from moefw.core.errors import RunError
from moefw.core.records import Canonical
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.finite import is_finite
from moefw.runtime.naming import by_parameter, state_tensors, states
from moefw.runtime.parallel.boxes import boxes
from moefw.runtime.parallel.holders import holdings, writes_state
from moefw.runtime.parallel.local_shards import is_held_as_codes, local
from moefw.system.stamps import stamp
from moefw.training.checkpoint.choice import way_back
from moefw.training.checkpoint.commit import begin, commit, prune, sync
from moefw.training.checkpoint.manifest import Manifest, Origin, shard_from
from moefw.training.checkpoint.shards import described, words
from moefw.training.errors import NotWrittenError
from moefw.training.folder import checkpoint_dirs


def save(
    run_dir: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    origin: Origin,
    *,
    keep: int,
) -> Path:
    """Write ``checkpoints/step-N`` and drop all but the newest ``keep``. Collective.

    Raises RunError on every rank if a value is not finite on one, and NotWrittenError if one cannot write. Nothing is
    committed then.
    """
    stamp("saving a checkpoint")
    require_finite(run_dir, step, model, optimizer, layout)
    final = run_dir / "checkpoints" / f"step-{step}"
    scratch = final.with_name(f"{final.name}.tmp")
    leads = layout.rank == 0
    _together(lambda: begin(scratch) if leads else None, scratch, layout)
    tensors = {name: value.contiguous() for name, value in owned(model, optimizer, layout)}
    shards = _together(lambda: _write_shard(scratch, tensors, layout.rank), scratch, layout)
    _together(lambda: commit(scratch, _manifest(step, origin, shards), final) if leads else None, scratch, layout)
    if leads:
        prune(run_dir, keep=keep)
    return final


def owned(model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that this rank writes, on the host. The ranks that hold copies of parameters take turns.

    Frozen parameters are not written: their folder has them.
    Only one tensor at a time is gathered on the device, as it may not have memory for all offloaded states together.
    """
    trained = (holding for holding in holdings(model) if holding.parameter.requires_grad)
    for turn, holding in enumerate(trained):
        stamp("gathering a checkpoint")
        parameter = holding.parameter
        moments = {f"optimizer/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
        for kind, value in {"model": parameter.detach(), **moments}.items():
            for name, tensor in holding.written(value.to(parameter.device), layout, turn):
                yield f"{kind}/{name}", tensor.to("cpu", copy=True)
    for side, tensors in states(model).items():
        if writes_state(side, layout):
            yield from ((f"state/{name}", tensor.to("cpu", copy=True)) for name, tensor in tensors.items())


def _write_shard(scratch: Path, tensors: dict[str, Tensor], rank: int) -> dict[str, Any] | None:
    """Write a rank's tensors and return their manifest entry; None if it has no tensors."""
    if not tensors:
        return None
    path = scratch / f"rank-{rank:05d}.safetensors"
    stamp("writing a checkpoint's shard")
    save_file(tensors, path)
    stamp("syncing a checkpoint's shard")
    sync(path)
    stamp("hashing a checkpoint's shard")
    return described(path).to_data()


def _manifest(step: int, origin: Origin, shards: Sequence[object]) -> bytes:
    """Manifest of the shards that ranks report. Raises ValueError if a report is invalid."""
    return Manifest(step=step, origin=origin, shards=tuple(shard_from(shard) for shard in shards if shard)).sealed()


def _together(write: Callable[[], Any], scratch: Path, layout: Layout) -> list[Any]:
    """Call ``write`` on each rank and return all results. Raises NotWrittenError on all ranks if one fails."""
    answer = None
    reason = None
    try:
        answer = write()
    except (OSError, SafetensorError, ValueError) as error:
        reason = str(error)
    answers = everywhere([answer, reason], layout.host_group())
    reasons = [(rank, reason) for rank, (_, reason) in enumerate(answers) if reason is not None]
    if reasons:
        if layout.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        rank, reason = reasons[0]
        what = f"{scratch.stem} could not be saved: {reason} (on rank {rank})."
        if checkpoint_dirs(scratch.parent.parent):
            raise NotWrittenError(what, "Earlier checkpoints are untouched: mend that and continue with --resume.")
        raise NotWrittenError(what, "There is no earlier checkpoint: mend that and train again.")
    return [answer for answer, _ in answers]


def require_finite(
    run_dir: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout
) -> None:
    """Raise RunError on every rank if one of them would save a non-finite value. Collective."""
    first_bad = everywhere(_first_bad(model, optimizer), layout.host_group())
    bad = [(rank, name) for rank, name in enumerate(first_bad) if name is not None]
    if bad:
        rank, name = bad[0]
        others = f" (and on ranks {[rank for rank, _ in bad[1:]]})" if len(bad) > 1 else ""
        what = f"step {step} is not saved: {words(name)} is not finite on rank {rank}{others}."
        raise RunError(what, way_back(run_dir, layout.host_group()))


def _first_bad(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Name of the first tensor on this rank, of its own copies and shards, that holds NaN or infinity."""
    for parameter, pieces in by_parameter(model):
        if is_held_as_codes(parameter):
            continue  # not saved; its values were looked at when they were read
        states = {f"optimizer/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
        for kind, held in {"model": parameter.detach(), **states}.items():
            if not is_finite(local(held)):
                return f"{kind}/{_bad_piece(held, pieces)}"
    return next((f"state/{name}" for name, held in state_tensors(model).items() if not is_finite(held)), None)


def _bad_piece(held: Tensor, pieces: Sequence[Canonical]) -> str:
    """Name of the non-finite piece of a parameter, or of a tensor of its shape."""
    own = local(held)
    named = (box.name for box in boxes(pieces) if held.dim() and not is_finite(box.of(own)))
    return next(named, pieces[0].name)
