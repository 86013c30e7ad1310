"""Slots for the tensors of a checkpoint, in a model and its optimizer on this rank, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moefw.core.records import Canonical
from moefw.runtime.naming import canonical_parameters, state_tensors
from moefw.training.checkpoint.manifest import SavedTensor
from moefw.training.checkpoint.shards import DTYPES

_RESTING = {"BF16", "F32"}
"""The dtypes in which memory policies store optimizer states. A run may resume with other policies."""


@dataclass(frozen=True, eq=False)
class Slot:
    """A tensor to fill: the ``piece`` of a parameter, or of a tensor of its shape; None: the whole target.

    ``rests``: it is an optimizer state, whose saved dtype may differ.
    """

    target: Tensor
    piece: Canonical | None = None
    rests: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the saved tensor."""
        if self.piece is None:
            return tuple(self.target.shape)
        shape = self.piece.of(torch.empty(self.target.shape, device="meta")).shape
        return self.piece.shard.whole(shape) if self.piece.shard else tuple(shape)

    def misfit(self, saved: SavedTensor) -> str:
        """How a saved tensor differs from this slot; empty if it fits."""
        if saved.shape != self.shape:
            return f"{saved.shape} there and {self.shape} here"
        own = DTYPES.get(self.target.dtype, str(self.target.dtype))
        if saved.dtype != own and not (self.rests and {saved.dtype, own} <= _RESTING):
            return f"{saved.dtype} there and {own} here"
        return ""

    def fill(self, values: Tensor, saved: Tensor) -> None:
        """Write the saved tensor to its place in ``values``, the gathered target."""
        if self.piece is None:
            values.copy_(saved)
        else:
            self.piece.of(values).copy_(self.piece.shard.of(saved) if self.piece.shard else saved)


def model_slots(model: nn.Module) -> dict[str, Slot]:
    """Slots of the parameters that train and of a model's state, by name."""
    slots = {f"model/{piece.name}": Slot(piece.parameter, piece) for piece in _trained(model)}
    return slots | {f"state/{name}": Slot(tensor) for name, tensor in state_tensors(model).items()}


def optimizer_slots(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, SavedTensor]
) -> tuple[dict[str, Slot], dict[nn.Parameter, dict[str, Tensor]]]:
    """Slots of an optimizer's states by name, and all states of each parameter.

    States that it does not have yet, as before its first step, are allocated for the saved ones. The optimizer is not
    changed.
    """
    slots: dict[str, Slot] = {}
    rooms: dict[nn.Parameter, dict[str, Tensor]] = {}
    keys = {name.split("/")[1] for name in saved if name.startswith("optimizer/")}
    for piece in _trained(model):
        states = rooms.setdefault(piece.parameter, dict(optimizer.state.get(piece.parameter, {})))
        for key in sorted(keys | states.keys()):
            name = f"optimizer/{key}/{piece.name}"
            if key not in states:
                if name not in saved:
                    continue
                like = piece.parameter.detach()
                states[key] = torch.zeros_like(like) if saved[name].shape else torch.zeros((), device=like.device)
            slots[name] = Slot(states[key], piece if states[key].dim() else None, rests=True)
    return slots, rooms


def _trained(model: nn.Module) -> Iterable[Canonical]:
    return (piece for piece in canonical_parameters(model) if piece.parameter.requires_grad)


def by_target(slots: Mapping[str, Slot]) -> Iterable[list[tuple[str, Slot]]]:
    """Slots with their names, grouped by target tensor."""
    targets: dict[int, list[tuple[str, Slot]]] = {}
    for name, slot in slots.items():
        targets.setdefault(id(slot.target), []).append((name, slot))
    return targets.values()
