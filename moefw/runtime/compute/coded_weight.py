"""Frozen weights that are held as the codes and scales of their folder: a tensor subclass without values.

:meth:`moefw.runtime.compute.weights.WeightUse.operands` decodes one for each use and frees the values (ADR 39). Any
other operation that needs values is refused, so that nothing decodes a weight unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from moefw.core.errors import ContractError
from moefw.runtime.compute.code_formats import CodeFormat

_aten = torch.ops.aten


@final
class CodedWeight(Tensor):
    """A weight ``(..., O, I)``, to autograd bf16, that exists only as the ``parts`` of a format: codes and scales.

    It may be cut between whole blocks, and filled from another one. Raises ContractError for parts that do not belong
    together, as those of a cut through a block.
    """

    codes: Tensor
    scales: Tensor
    format: CodeFormat

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parts: tuple[Tensor, ...], format: CodeFormat) -> CodedWeight:
        """Wrap ``parts`` without copying them."""
        codes = parts[0]
        shape = (*codes.shape[:-1], codes.shape[-1] * format.codes_per_element)
        if any(tensor.shape != part.shape(shape) for part, tensor in zip(format.parts, parts, strict=True)):
            raise _cuts_a_block(shape, format)
        weight: CodedWeight = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bfloat16, device=codes.device, requires_grad=False
        )
        for part, tensor in zip(format.parts, parts, strict=True):
            setattr(weight, part.name, tensor)
        weight.format = format
        return weight

    def __init__(self, parts: tuple[Tensor, ...], format: CodeFormat) -> None:
        pass

    @staticmethod
    def empty(shape: Sequence[int], format: CodeFormat, device: torch.device) -> CodedWeight:
        """Weight whose codes and scales are not written yet."""
        if shape[-1] % format.codes_per_element:
            raise _cuts_a_block(shape, format)
        parts = [torch.empty(part.shape(shape), dtype=part.dtype, device=device) for part in format.parts]
        return CodedWeight(tuple(parts), format)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Codes and scales, in the order of the format's parts."""
        return tuple(getattr(self, part.name) for part in self.format.parts)

    def values(self) -> Tensor:
        """Values ``(..., O, I)``, bf16, made anew by each call."""
        return self.format.decode(*self.parts)

    @property
    def bytes_held(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for part in self.parts)

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape and format: there are no values to show."""
        return f"CodedWeight({tuple(self.shape)}, {self.format.name})"

    def __tensor_flatten__(self) -> tuple[list[str], CodeFormat]:
        """Names of the tensors that have memory, and the format."""
        return [part.name for part in self.format.parts], self.format

    @staticmethod
    def __tensor_unflatten__(
        tensors: Mapping[str, Tensor], format: CodeFormat, outer_size: Any, outer_stride: Any
    ) -> CodedWeight:
        """Weight of the tensors that ``__tensor_flatten__`` names."""
        return CodedWeight(tuple(tensors[part.name] for part in format.parts), format)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Cut, fill or return the weight. Raises ContractError for any operation that needs values."""
        operation = _OPERATIONS.get(func)
        if operation is None or not isinstance(args[0], CodedWeight):
            problem = f"{func} of a weight that is held as codes: there are no values."
            fix = "Let WeightUse or linear() multiply with it, or use train.frozen_weights: decoded."
            raise ContractError(problem, fix)
        return operation(*args, **(kwargs or {}))


def values_of(weight: Tensor) -> Tensor:
    """Values of a weight: the weight itself, unless it is held as codes, which are decoded."""
    return weight.values() if isinstance(weight, CodedWeight) else weight


def _cuts_a_block(shape: Sequence[int], format: CodeFormat) -> ContractError:
    problem = f"a part {tuple(shape)} of a weight in {format.name} is cut through a block that shares a scale"
    problem += f" ({format.rows} x {format.columns})."
    return ContractError(problem, "Cut it between blocks, or use train.frozen_weights: decoded.")


def _alias(weight: CodedWeight) -> CodedWeight:
    """Another tensor of the same codes and scales."""
    return CodedWeight(weight.parts, weight.format)


def _select(weight: CodedWeight, dim: int, index: int) -> CodedWeight:
    """One matrix of a stack."""
    if not 0 <= dim < weight.ndim - 2:
        raise _cuts_a_block(weight.shape, weight.format)
    return CodedWeight(tuple(part.select(dim, index) for part in weight.parts), weight.format)


def _slice(
    weight: CodedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> CodedWeight:
    """Range of matrices, rows or columns, of whole blocks."""
    dim %= weight.ndim
    size = weight.shape[dim]
    begin, stop, _ = slice(start, end).indices(size)
    cut = []
    for part, tensor in zip(weight.format.parts, weight.parts, strict=True):
        block = {weight.ndim - 2: part.rows, weight.ndim - 1: part.columns}.get(dim, 1)
        if block is None:  # an element belongs to a whole row, and so to any piece of it
            cut.append(tensor)
            continue
        ends_in_a_block = stop % block and stop != size
        if step != 1 or begin % block or ends_in_a_block:
            shape = (*weight.shape[:dim], stop - begin, *weight.shape[dim + 1 :])
            raise _cuts_a_block(shape, weight.format)
        first_block = begin // block
        num_blocks = -(-(stop - begin) // block)
        cut.append(tensor.narrow(dim, first_block, num_blocks))
    return CodedWeight(tuple(cut), weight.format)


def _split(weight: CodedWeight, size: int, dim: int = 0) -> list[CodedWeight]:
    """Parts of ``size`` along ``dim``, the last one perhaps smaller."""
    return [_slice(weight, dim, start, start + size) for start in range(0, weight.shape[dim], size)]


def _copy(weight: CodedWeight, source: Any, non_blocking: bool = False) -> CodedWeight:
    """``weight``, filled with the codes and scales of ``source``."""
    if not isinstance(source, CodedWeight) or source.format != weight.format or source.shape != weight.shape:
        problem = f"a weight {tuple(weight.shape)} in {weight.format.name} is filled from something else."
        raise ContractError(problem, "Fill it from the codes of its folder (Folder.read_codes).")
    for own, other in zip(weight.parts, source.parts, strict=True):
        own.copy_(other, non_blocking)
    return weight


def _zero(weight: CodedWeight) -> CodedWeight:
    """``weight``, whose codes and scales are zeros now."""
    for tensor in weight.parts:
        tensor.zero_()
    return weight


def _strided(weight: CodedWeight, size: Sequence[int], stride: Sequence[int], start: int | None = None) -> CodedWeight:
    """The weight in its own size and strides, in which FSDP2 requests what it has gathered."""
    if tuple(size) != weight.shape or tuple(stride) != weight.stride() or start:
        raise _cuts_a_block(size, weight.format)
    return _alias(weight)


_OPERATIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    _aten.alias.default: _alias,
    _aten.as_strided.default: _strided,
    _aten.detach.default: _alias,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.copy_.default: _copy,
    _aten.zero_.default: _zero,
}
"""Operations that need no values."""
