"""Slots for the tensors of a checkpoint, in a model and its optimizer on this rank, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor, nn

from moefw.compose.optimizer import blocks_of
from moefw.core.records import Canonical
from moefw.runtime.naming import by_parameter, state_tensors
from moefw.runtime.parallel.boxes import boxes, of_blocks, whole_shape
from moefw.runtime.parallel.local_shards import local
from moefw.runtime.safetensors_dtypes import NAMES
from moefw.training.checkpoint.manifest import SavedTensor
from moefw.training.checkpoint.reading import Target

_RESTING = {"BF16", "F32"}
"""The dtypes in which memory policies store optimizer states. A run may resume with other policies."""


@frozen(eq=False)
class Slot:
    """What this rank stores of a tensor of a checkpoint, of shape ``whole``: tensors to fill, if it stores any of it.

    ``rests``: it is an optimizer state, whose saved dtype may differ.
    """

    whole: tuple[int, ...]
    dtype: torch.dtype
    targets: tuple[Target, ...]
    rests: bool = False

    def misfit(self, saved: SavedTensor) -> str:
        """How a saved tensor differs from this slot; empty if it fits."""
        if saved.shape != self.whole:
            return f"{saved.shape} there and {self.whole} here"
        own = NAMES.get(self.dtype, str(self.dtype))
        if saved.dtype != own and not (self.rests and {saved.dtype, own} <= _RESTING):
            return f"{saved.dtype} there and {own} here"
        return ""


def model_slots(model: nn.Module) -> dict[str, Slot]:
    """Slots of the parameters that train and of a model's state, by name."""
    slots: dict[str, Slot] = {}
    for parameter, pieces in _trained(model):
        slots |= _of_pieces("model", parameter.detach(), pieces)
    return slots | {f"state/{name}": _whole(tensor) for name, tensor in state_tensors(model).items()}


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
    for parameter, pieces in _trained(model):
        states = rooms.setdefault(parameter, dict(optimizer.state.get(parameter, {})))
        blocks = blocks_of(optimizer)
        for key in sorted(keys | states.keys()):
            if key not in states:
                of_pieces = [saved[name] for piece in pieces if (name := f"optimizer/{key}/{piece.name}") in saved]
                if not of_pieces:
                    continue
                like = parameter.detach()
                states[key] = torch.zeros_like(like) if of_pieces[0].shape else torch.zeros((), device=like.device)
            slots |= _of_pieces(f"optimizer/{key}", states[key], pieces, block=blocks.get(key, 1), rests=True)
    return slots, rooms


def _of_pieces(
    kind: str, held: Tensor, pieces: Sequence[Canonical], *, block: int = 1, rests: bool = False
) -> dict[str, Slot]:
    """Slots of a parameter, of a tensor of its shape, or of a scalar that belongs to it.

    ``block``: the number of columns of the parameter that share a value of ``held``.
    """
    if held.shape != of_blocks(pieces[0].parameter.shape, block):
        return {f"{kind}/{piece.name}": _whole(held, rests=rests) for piece in pieces}
    own_boxes = [box.of_blocks(block) for box in boxes(pieces)]
    targets = {box.name: (box.of(local(held)), box.corner) for box in own_boxes}
    return {
        f"{kind}/{piece.name}": Slot(
            whole=of_blocks(whole_shape(piece), block),
            dtype=held.dtype,
            targets=(targets[piece.name],) if piece.name in targets else (),
            rests=rests,
        )
        for piece in pieces
    }


def _whole(tensor: Tensor, *, rests: bool = False) -> Slot:
    shape = tuple(tensor.shape)
    return Slot(whole=shape, dtype=tensor.dtype, targets=((tensor, (0,) * len(shape)),), rests=rests)


def _trained(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[Canonical]]]:
    return ((parameter, pieces) for parameter, pieces in by_parameter(model) if parameter.requires_grad)
