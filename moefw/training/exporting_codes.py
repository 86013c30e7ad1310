"""The weights of an exported folder that become codes: copied where nothing has trained, else encoded, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import torch
from attrs import define, field
from torch import Tensor

from moefw.core.errors import CheckpointError, Problem
from moefw.models.huggingface.codings import Coding
from moefw.models.huggingface.origins import Origin
from moefw.models.huggingface.stored import Description, Nvfp4, coded_piece, write_piece
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.training.exporting_base import Base

MOST: Final = 3
"""The most tensors that a line lists."""


@define
class Movement:
    """How far weights have moved: the sum of their squares, and that of the squares of the differences."""

    weights: float = 0.0
    differences: float = 0.0

    def add(self, weight: Tensor, moved: Tensor) -> None:
        """Add a weight, fp32, and what it has become."""
        self.weights += torch.linalg.vector_norm(weight).item() ** 2
        self.differences += torch.linalg.vector_norm(moved - weight).item() ** 2

    @property
    def share(self) -> float:
        """Root mean square of the differences over that of the weights; 0 if these are."""
        return math.sqrt(self.differences / self.weights) if self.weights else 0.0


@define
class Moved:
    """How far rounding has moved the weights that are encoded, by tensor, and how far training had moved them."""

    by_rounding: dict[str, Movement] = field(factory=dict)
    by_training: Movement = field(factory=Movement)

    def told(self) -> Iterator[str]:
        """Yield it in lines, if any weight is encoded."""
        if not self.by_rounding:
            return
        movements = self.by_rounding.values()
        total = Movement(
            weights=sum(each.weights for each in movements), differences=sum(each.differences for each in movements)
        )
        most = max(self.by_rounding, key=lambda tensor: self.by_rounding[tensor].share)
        worst = f"the most, {most}, by {self.by_rounding[most].share:.2%}"
        yield f"rounding moves them by {total.share:.2%} (root mean square); {worst}"
        if self.by_training.weights:
            yield f"training has moved them by {self.by_training.share:.2%}"


@final
class CodedTensors:
    """The tensors of a folder that hold weights as codes.

    They are those that are codes in the base of the run, if it has the format; else those that the format is for.
    Weights have the names of a checkpoint.
    """

    def __init__(
        self, coding: Coding, origins: Mapping[str, Origin], shapes: Mapping[str, tuple[int, ...]], base: Base
    ) -> None:
        """``origins`` and ``shapes``: those of every weight.

        Raises CheckpointError with every tensor of a width that the format does not have.
        """
        self._coding = coding
        self._format = coding.stored.format
        self._origins = origins
        self._base = base
        self._as_in_base = base.format is self._format
        self._weights = {name for name, origin in origins.items() if self._becomes_codes(name, origin)}
        self._tensors = {origins[name].name for name in self._weights}
        self._copied: set[str] = set()
        self._apart: set[str] = set()
        """What servers join and is encoded in part, and copied in part."""
        self._moved = Moved()
        self._cut_short = {origins[name].name for name in self._weights if self._cuts_blocks(shapes[name])}
        if not coding.cuts_blocks_short and self._cut_short:
            raise CheckpointError([self._wrong_width(tensor) for tensor in sorted(self._cut_short)])

    def _becomes_codes(self, name: str, origin: Origin) -> bool:
        return self._base.is_coded(name) if self._as_in_base else self._coding.becomes_codes(origin.name)

    def _cuts_blocks(self, shape: tuple[int, ...]) -> bool:
        """Whether the last block of rows or columns is smaller than others."""
        sizes = zip(shape[-2:], (self._format.rows, self._format.columns), strict=True)
        return any(size % block and (size > block or not self._coding.cuts_blocks_short) for size, block in sizes)

    def _wrong_width(self, tensor: str) -> Problem:
        what = f"{tensor} is of a width that is no multiple of {self._format.columns},"
        return Problem(f"{what} and {self._format.name} has a scale for so many values.", "Use --dtype bf16 or fp8.")

    def __contains__(self, name: str) -> bool:
        """Whether a weight is held as codes."""
        return name in self._weights

    def described(self, values: Mapping[str, Description]) -> dict[str, Description]:
        """Tensors of the folder, given what they would be if all weights were held as values.

        What has not trained and is no code keeps the dtype of the base.
        """
        described: dict[str, Description] = {}
        for tensor, description in values.items():
            if tensor in self._tensors:
                described |= self._coding.stored.described(tensor, description[1])
            else:
                described[tensor] = description
        for name in self._base.shapes.keys() - self._weights:
            tensor = self._origins[name].name
            described[tensor] = (self._base.dtype(name), described[tensor][1])
        return described | {name: (scale.dtype, tuple(scale.shape)) for name, scale in self._input_scales()}

    def _input_scales(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the scales of rows that the base has beside its codes, by the names of their tensors."""
        for name in self._weights if self._as_in_base else ():
            scale = self._base.input_scale(name)
            if scale is not None:
                yield Nvfp4.name_of_input_scale(self._origins[name].name), scale

    def config(self, described: Mapping[str, Description]) -> Any:
        """``quantization_config`` of the folder."""
        if self._as_in_base and "quantization_config" in self._base.config:
            return self._base.config["quantization_config"]
        matrices = (name for name, (_, shape) in described.items() if name.endswith(".weight") and len(shape) == 2)
        modules = sorted(name.removesuffix(".weight") for name in matrices if name not in self._tensors)
        return self._coding.config([module for module in modules if not module.endswith("embed_tokens")])

    def write(self, weights: Callable[[str], Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Write all codes into the ``tensors`` of the folder. ``weights`` returns the values of one, given its name."""
        together: dict[str, list[str]] = {}
        for name in sorted(self._weights):
            if self._has_trained(name):
                together.setdefault(self._joined(name), []).append(name)
            else:
                write_piece(self._place(name, tensors), self._base.read_codes(name))
                self._copied.add(name)
        for names in together.values():
            self._encode({name: weights(name) for name in names}, tensors)
        for tensor, scale in self._input_scales():
            tensors[tensor].copy_(scale)
        self._apart = {self._joined(name) for name in self._copied} & together.keys()

    def _has_trained(self, name: str) -> bool:
        """Whether the codes of the base, if it has some, are no longer those of a weight."""
        return not self._as_in_base or name not in self._base.shapes or name in self._base.adapted

    def _joined(self, name: str) -> str:
        """What a weight is encoded with: the same for all that are encoded together, in most formats itself."""
        return self._coding.joined(self._origins[name].name) if self._coding.joins else name

    def _encode(self, values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Encode weights together, one below the other."""
        whole = torch.cat([*values.values()])
        codes = CodedWeight(self._format.encode(whole), self._format)
        first = 0
        for name, weight in values.items():
            rows = codes[first : first + len(weight)]
            assert isinstance(rows, CodedWeight)
            first += len(weight)
            write_piece(self._place(name, tensors), rows)
            of_tensor = self._moved.by_rounding.setdefault(self._origins[name].name, Movement())
            of_tensor.add(weight.float(), rows.values().float())
            if self._base.holds(name):
                self._moved.by_training.add(self._base.read(name).float(), weight.float())

    def _place(self, name: str, tensors: Mapping[str, Tensor]) -> CodedWeight:
        origin = self._origins[name]
        stored = self._coding.stored
        return coded_piece(stored, [tensors[part] for part in stored.names(origin.name)], origin)

    def told(self) -> Iterator[str]:
        """Yield in lines what has been copied and encoded, and how far that moved the weights."""
        form = self._format.name
        if self._copied:
            yield f"{len(self._copied)} weights have not trained: their {form} is copied"
        encoded = len(self._weights) - len(self._copied)
        if encoded:
            yield f"{encoded} weights are encoded in {form}, once"
        yield from self._moved.told()
        if self._cut_short:
            few = ", ".join(sorted(self._cut_short)[:MOST])
            more = f" and {len(self._cut_short) - MOST} more" if len(self._cut_short) > MOST else ""
            yield f"blocks are cut short in {few}{more}: transformers 5.24 decodes these wrongly"
        if self._apart:
            yield f"only a part of what servers join has trained: {len(self._apart)} have several global scales"
        if self._coding.stored is Nvfp4:
            yield "compressed-tensors 0.20 decodes all of it; transformers 5.24 loses a scale of experts"
