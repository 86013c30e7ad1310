"""Frozen codes that ranks share: FSDP2's extension for tensor subclasses.

:class:`CodedShare` is what a rank stores of a :class:`moefw.runtime.compute.coded_weight.CodedWeight`, which is the
parameter of a module while it is gathered. To FSDP, codes and scales are bytes: each rank has an equal part of the rows
of either, even if that cuts a block, because nothing is decoded before it is whole again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moefw.core.errors import ContractError
from moefw.runtime.compute.code_formats import CodeFormat
from moefw.runtime.compute.coded_weight import CodedWeight

_aten = torch.ops.aten


@frozen
class Sharing:
    """How ``count`` ranks share a weight of ``shape`` in a format: in equal parts, the last of which may be padded."""

    format: CodeFormat
    shape: torch.Size
    count: int

    @property
    def shapes_of_share(self) -> Sequence[tuple[int, int]]:
        """Rows, of all matrices of a stack, and columns that a rank stores of each part of the format."""
        shapes = [part.shape(self.shape) for part in self.format.parts]
        return [(-(-prod(shape[:-1]) // self.count), shape[-1]) for shape in shapes]

    @property
    def bytes_of_share(self) -> int:
        """Bytes that a rank stores."""
        parts = zip(self.format.parts, self.shapes_of_share, strict=True)
        return sum(part.dtype.itemsize * prod(shape) for part, shape in parts)

    def whole(self, gathered: Iterable[Tensor]) -> CodedWeight:
        """Weight as a view of the shares of all ranks, one behind the other, of each part of the format."""
        parts = []
        for part, rows in zip(self.format.parts, gathered, strict=True):
            shape = part.shape(self.shape)
            parts.append(rows[: prod(shape[:-1])].view(shape))
        return CodedWeight(tuple(parts), self.format)


@final
class CodedShare(Tensor):
    """What ``rank`` stores of a weight: its rows of ``codes`` and of each kind of scales, ``(R, columns)``.

    FSDP2 cuts what extends it along a dimension, and only evenly. So a share has, to FSDP2 and DTensor, the shape that
    they cut, rounded up. No number depends on it, because a share has no values.
    """

    codes: Tensor
    scales: Tensor
    sharing: Sharing
    rank: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, parts: Sequence[Tensor], sharing: Sharing, rank: int, shape: Sequence[int] | None = None
    ) -> CodedShare:
        """Wrap ``parts`` without copying them. ``shape``: that of the whole weight, until FSDP2 cuts it."""
        share: CodedShare = Tensor._make_wrapper_subclass(
            cls,
            sharing.shape if shape is None else shape,
            dtype=torch.bfloat16,
            device=parts[0].device,
            requires_grad=False,
        )
        for part, tensor in zip(sharing.format.parts, parts, strict=True):
            setattr(share, part.name, tensor)
        share.sharing = sharing
        share.rank = rank
        return share

    def __init__(
        self, parts: Sequence[Tensor], sharing: Sharing, rank: int, shape: Sequence[int] | None = None
    ) -> None:
        pass

    @staticmethod
    def of(weight: CodedWeight, rank: int, count: int) -> CodedShare:
        """What rank ``rank`` of ``count`` stores of ``weight``, a copy."""
        sharing = Sharing(weight.format, weight.shape, count)
        shapes = zip(weight.parts, sharing.shapes_of_share, strict=True)
        share = CodedShare([tensor.new_zeros(shape) for tensor, shape in shapes], sharing, rank)
        share.store(weight)
        return share

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """This rank's rows of codes and scales, in the order of the format's parts."""
        return tuple(getattr(self, part.name) for part in self.sharing.format.parts)

    @property
    def num_values(self) -> int:
        """Number of values whose codes this rank stores, without padding. A row of codes is one of the weight."""
        *rows, in_dim = self.sharing.shape
        of_share = len(self.codes)
        return min(max(prod(rows) - self.rank * of_share, 0), of_share) * in_dim

    def store(self, weight: CodedWeight) -> None:
        """Fill the share with its rows of a whole weight."""
        for own, tensor in zip(self.parts, weight.parts, strict=True):
            rows = tensor.flatten(0, -2)[self.rank * len(own) :][: len(own)]
            own[: len(rows)].copy_(rows)

    def gathered(self, group: ProcessGroup) -> CodedWeight:
        """The whole weight, from the ranks of ``group`` that share it. Collective."""
        gathered = []
        for own in self.parts:
            rows = own.new_empty(self.sharing.count * len(own), own.shape[-1])
            dist.all_gather_into_tensor(rows.view(torch.uint8), own.view(torch.uint8), group)
            gathered.append(rows)
        return self.sharing.whole(gathered)

    def __repr__(self) -> str:  # type: ignore[override]
        """The rank and what it shares: there are no values to show."""
        sharing = self.sharing
        return f"CodedShare({self.rank} of {sharing.count}: {tuple(sharing.shape)}, {sharing.format.name})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Sharing, int]]:
        """Names of the tensors that have memory, and what else the share consists of."""
        return [part.name for part in self.sharing.format.parts], (self.sharing, self.rank)

    @staticmethod
    def __tensor_unflatten__(
        tensors: Mapping[str, Tensor], rest: tuple[Sharing, int], outer_size: Any, outer_stride: Any
    ) -> CodedShare:
        """Share of the tensors that ``__tensor_flatten__`` names."""
        sharing, rank = rest
        return CodedShare([tensors[part.name] for part in sharing.format.parts], sharing, rank, outer_size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what FSDP2 does to shard a parameter. Raises ContractError for any other operation."""
        operation = _OPERATIONS.get(func)
        if operation is None or not isinstance(args[0], CodedShare):
            problem = f"{func} of a rank's share of a weight that is held as codes: there are no values."
            raise ContractError(problem, "Gather the weight (whole() of moefw.runtime.parallel.local_shards).")
        return operation(*args, **(kwargs or {}))

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Tensors that this rank sends: those that it stores."""
        return self.parts, None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Weight as a view of the gathered tensors; from the second time on, None: ``out`` is the view."""
        return (self.sharing.whole(all_gather_outputs), ()) if out is None else None


def _shaped(share: CodedShare, shape: Sequence[int]) -> CodedShare:
    """Another tensor of what a rank stores, in the shape that FSDP2 gives it."""
    return CodedShare(share.parts, share.sharing, share.rank, shape)


def _alias(share: CodedShare) -> CodedShare:
    return _shaped(share, share.shape)


def _view(share: CodedShare, size: Sequence[int]) -> CodedShare:
    return _shaped(share, (share.numel(),) if tuple(size) == (-1,) else size)


def _slice(
    share: CodedShare, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> CodedShare:
    begin, stop, _ = slice(start, end).indices(share.shape[dim])
    return _shaped(share, (*share.shape[:dim], stop - begin, *share.shape[dim + 1 :]))


def _split(share: CodedShare, size: int, dim: int = 0) -> list[CodedShare]:
    """Equal chunks, one for each rank. FSDP2 takes that of this rank, to which all of what it stores belongs."""
    shape = (*share.shape[:dim], size, *share.shape[dim + 1 :])
    return [_shaped(share, shape) for _ in range(share.sharing.count)]


def _new_zeros(share: CodedShare, size: Sequence[int], **options: Any) -> CodedShare:
    return CodedShare([torch.zeros_like(own) for own in share.parts], share.sharing, share.rank, size)


def _copy(share: CodedShare, source: CodedShare, non_blocking: bool = False) -> CodedShare:
    for own, other in zip(share.parts, source.parts, strict=True):
        own.copy_(other, non_blocking)
    return share


_OPERATIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    _aten.alias.default: _alias,
    _aten.copy_.default: _copy,
    _aten.detach.default: _alias,
    _aten.new_zeros.default: _new_zeros,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.view.default: _view,
}
"""The operations with which FSDP2 cuts a parameter, pads the piece, and keeps it."""
