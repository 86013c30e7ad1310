"""Weights of MoE blocks of ``transformers``: into layers of ours, and from these into a folder as blocks have them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from moefw.compose.library import Layer
from moefw.core.errors import CheckpointError, ContractError, Problem, SpecError, os_reason
from moefw.models.huggingface.blocks import Block, view_of
from moefw.models.huggingface.stored import Description
from moefw.runtime.communication.agreement import raise_together
from moefw.runtime.naming import by_parameter
from moefw.runtime.parallel.holders import holdings
from moefw.runtime.parallel.local_shards import all_of, whole


@torch.no_grad()
def take_over(layer: Layer, block: Block) -> None:
    """Copy the weights of a block, of the experts that this rank holds. What the block has none of is zero.

    What does not train in the block does not in the layer.
    """
    tensors = block.tensors
    for parameter, pieces in by_parameter(layer.moe):
        with all_of(parameter) as values:
            for piece in pieces:
                weight = view_of(piece.name, tensors)
                if weight is None:
                    piece.of(values).zero_()
                else:
                    piece.of(values).copy_(weight if piece.shard is None else piece.shard.of(weight))
        if block.is_frozen(piece.name for piece in pieces):
            parameter.requires_grad_(False)


@frozen(eq=False)
class Place:
    """A layer in the place of a block: the block's name in its model, and the tensors that it had by its own names."""

    layer: Layer
    name: str
    tensors: Mapping[str, Description]

    @classmethod
    def of(cls, layer: Layer, block: Block) -> Place:
        """Place of a block that ``layer`` gets."""
        return cls(layer, block.name, {name: (one.dtype, tuple(one.shape)) for name, one in block.tensors.items()})

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different experts, or parts of each."""
        return self.layer.layout.size("ep", "etp") > 1

    @torch.no_grad()
    def given_back(self) -> dict[str, Tensor]:
        """Weights by their names in the model, on the CPU, in the block's shapes and dtypes.

        Collective where the layer is split: rank 0 has them then, and others have what is of no use.
        """
        layout = self.layer.layout
        tensors = {name: torch.zeros(shape) for name, (_, shape) in self.tensors.items()}
        for holding in holdings(self.layer.moe):
            values = whole(holding.parameter)
            if self.is_split and not holding.writes(layout):
                continue  # another rank adds the same values
            for piece in holding.pieces:
                view = view_of(piece.name, tensors)
                if view is not None:
                    (view if piece.shard is None else piece.shard.of(view)).copy_(piece.of(values))
        if self.is_split:
            for tensor in tensors.values():
                dist.reduce(tensor, 0, group=layout.host_group())
        return {f"{self.name}.{name}": tensor.to(self.tensors[name][0]) for name, tensor in tensors.items()}


class Saving:
    """``save_pretrained`` of a model with our layers, in the layout that it had with its blocks.

    ``differing``: why a model of ``transformers`` would not compute what the layers do. The model's own method is
    replaced by one that saves the same, or raises what is to be called instead.
    """

    def __init__(self, model: Any, places: Sequence[Place], differing: Sequence[Problem]) -> None:
        self._model = model
        self._places = places
        self._differing = differing
        self._of_transformers = model.save_pretrained
        model.save_pretrained = self._on_one_rank

    def together(self, path: str | Path, **options: Any) -> None:
        """Save. Collective: rank 0 writes. See :meth:`moefw.ReplacedBlocks.save_pretrained`."""
        self._require_same()
        layout = self._places[0].layer.layout
        problem = None
        try:
            self._of_transformers(path, is_main_process=layout.rank == 0, state_dict=self._state_dict(), **options)
        except OSError as error:
            what = f"{path} cannot be written on rank {layout.rank}: {os_reason(error)}."
            problem = CheckpointError(what, "Name a folder that rank 0 can write.")
        raise_together(problem, layout.host_group())

    def _on_one_rank(self, *arguments: Any, **options: Any) -> None:
        """Save a model of which this rank has all experts. Takes what the method of ``transformers`` takes."""
        given = inspect.signature(self._of_transformers).bind(*arguments, **options)
        if any(place.is_split for place in self._places):
            _refuse(
                "ranks hold different experts", "Call save_pretrained(path) of what replace_moe() returned, on each."
            )
        if given.arguments.get("state_dict") is not None:
            _refuse("a state_dict= has layers in the place of blocks", "Leave it out: the model has its weights.")
        if given.arguments.get("distributed_checkpoint"):
            _refuse("a distributed_checkpoint= has layers in the place of blocks", "Leave it out.")
        self._require_same()
        given.arguments["state_dict"] = self._state_dict()
        self._of_transformers(*given.args, **given.kwargs)

    def _require_same(self) -> None:
        """Raise SpecError if the folder would be that of a model that computes something else."""
        if self._differing:
            raise SpecError(self._differing)

    def _state_dict(self) -> dict[str, Tensor]:
        """The model's state with weights of blocks in the place of layers. Collective where layers are split."""
        inside = tuple(f"{place.name}." for place in self._places)
        own = {name: tensor for name, tensor in self._model.state_dict().items() if not name.startswith(inside)}
        for place in self._places:
            own |= place.given_back()
        return own


def _refuse(why: str, fix: str) -> Never:
    raise ContractError(f"save_pretrained() of a model whose MoE blocks are replaced: {why}.", fix)
