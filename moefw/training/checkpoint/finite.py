"""Check that all values of a checkpoint are finite, as no run could continue from a non-finite one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from moefw.core.contracts import Layout
from moefw.core.errors import RunError
from moefw.core.records import Canonical
from moefw.runtime.naming import by_parameter, state_tensors
from moefw.runtime.parallel.pieces import is_shared_out, local, stored
from moefw.training.agreement import everywhere
from moefw.training.checkpoint.shards import is_finite, words
from moefw.training.folder import checkpoint_dirs


def require_finite(
    run_dir: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout
) -> None:
    """Raise RunError on every rank if one of them would save a non-finite value. Collective."""
    found = everywhere(_first_bad(model, optimizer), layout.host_group())
    bad = [(rank, name) for rank, name in enumerate(found) if name is not None]
    if bad:
        rank, name = bad[0]
        others = f" (and on ranks {[rank for rank, _ in bad[1:]]})" if len(bad) > 1 else ""
        what = f"step {step} is not saved: {words(name)} is not finite on rank {rank}{others}."
        earlier = checkpoint_dirs(run_dir)
        raise RunError(what, "Go back with --resume=last-good." if earlier else "There is no earlier checkpoint.")


def _first_bad(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of the first tensor on this rank, of its own copies and shards, that holds NaN or infinity."""
    for parameter, pieces in by_parameter(model):
        states = {f"optimizer/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
        for kind, held in {"model": parameter.detach(), **states}.items():
            if not is_finite(local(held)):
                return f"{kind}/{_bad_piece(held, pieces)}"
    return next((f"state/{name}" for name, held in state_tensors(model).items() if not is_finite(held)), None)


def _bad_piece(held: Tensor, pieces: Sequence[Canonical]) -> str:
    """Return the name of the non-finite piece of a parameter, or of a tensor of its shape."""
    values = held
    if is_shared_out(held):
        values = torch.zeros(held.shape, dtype=held.dtype, device=local(held).device)
        stored(held, values).copy_(local(held))
    named = (piece.name for piece in pieces if values.dim() and not is_finite(piece.of(values)))
    return next(named, pieces[0].name)
