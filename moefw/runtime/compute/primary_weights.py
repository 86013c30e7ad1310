"""fp32 masters that ranks shard and gather as codes and scales: FSDP2's extension for tensor subclasses.

:class:`Master` is the tensor that a rank stores, and defines the tensors that it sends. :class:`GatheredWeight` is the
parameter of a module while it is gathered. Optimizer, gradients and checkpoints see only fp32 values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from moefw.core.contracts import WeightCodec
from moefw.core.errors import ContractError
from moefw.runtime.accounting import made_for_step

_aten = torch.ops.aten


@final
class Master(Tensor):
    """A weight, or this rank's shard of it, ``stored`` in fp32 and gathered with ``codec``.

    Shards and views are masters, too. The results of all other operations are plain tensors.
    """

    stored: Tensor
    codec: WeightCodec
    _codes: tuple[Tensor, ...] | None = None
    """What this rank sends in a step, once it is encoded."""
    _keeps_codes: bool = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, stored: Tensor, codec: WeightCodec) -> Master:
        """Wrap ``stored``, to which all writes go."""
        master: Master = _wrapper(cls, stored.shape, stored.stride(), stored)
        master.stored = stored
        master.codec = codec
        return master

    def __init__(self, stored: Tensor, codec: WeightCodec) -> None:
        pass

    def keep_codes(self) -> None:
        """Encode the shard once, at the next gathering, until :meth:`free_codes`. It must not change until then."""
        self._keeps_codes = True

    def free_codes(self) -> None:
        """Free the codes, and encode the shard for each gathering."""
        self._keeps_codes = False
        self._codes = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute with the stored tensors."""
        plain_args, plain_kwargs = tree_map_only(Master, lambda master: master.stored, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func in _SHARDED:
            return tree_map_only(Tensor, lambda stored: Master(stored, args[0].codec), result)
        wrote_in_place = isinstance(result, Tensor) and result is plain_args[0]
        return args[0] if wrote_in_place else result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], WeightCodec]:
        """Tensors that this rank sends: codes and scales of its shard, in a step quantized once."""
        if not self._keeps_codes:
            return self.codec.encode(self.stored), self.codec
        if self._codes is None:
            with made_for_step():
                self._codes = self.codec.encode(self.stored)
        return self._codes, self.codec

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: WeightCodec,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Weight as a view of the gathered tensors; from the second time on, None: ``out`` is the view."""
        if out is not None:
            return None
        return GatheredWeight(all_gather_outputs, metadata.rows), ()


@final
class GatheredWeight(Tensor):
    """A weight ``(..., R, C)`` that exists only as codes ``(..., R, C)`` and scales ``(..., R / rows, ...)``.

    To autograd it is fp32, and so are its gradients. Matrices may be cut and joined between whole blocks of ``rows``.
    """

    parts: tuple[Tensor, ...]
    rows: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parts: tuple[Tensor, ...], rows: int) -> GatheredWeight:
        """Wrap ``parts``, the codes and scales of a weight, without copying them."""
        codes = parts[0]
        weight: GatheredWeight = _wrapper(cls, codes.shape, codes.stride(), codes)
        weight.parts = parts
        weight.rows = rows
        return weight

    def __init__(self, parts: tuple[Tensor, ...], rows: int) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Cut, join or return the weight. Raises ContractError for any operation that needs values."""
        operation = _OPERATIONS.get(func)
        result = None if operation is None else operation(*args, **(kwargs or {}))
        if result is None:
            problem = f"{func} of a weight that was gathered as codes and scales: there are no values."
            fix = "Quantize it with role='weight' (Precision.quantize), and cut it between whole blocks of rows alone."
            raise ContractError(problem, fix)
        return result


def _wrapper(cls: type[Any], shape: Sequence[int], stride: Sequence[int], like: Tensor) -> Any:
    """Fp32 tensor of a subclass that has no memory of its own."""
    return Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=torch.float32, device=like.device, requires_grad=False
    )


def _alias(weight: GatheredWeight) -> GatheredWeight:
    """Another tensor of the same codes and scales."""
    return GatheredWeight(weight.parts, weight.rows)


def _strided(weight: GatheredWeight, size: Sequence[int], stride: Sequence[int], start: int | None = None) -> Any:
    """Weight if ``size`` and ``stride`` are its own, as FSDP2 requests them; else None."""
    is_whole = tuple(size) == weight.shape and tuple(stride) == weight.stride() and not start
    return _alias(weight) if is_whole else None


def _zeros(weight: GatheredWeight, **options: Any) -> Tensor:
    """Zero gradient of a weight that does not affect the loss."""
    return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)


def _cut(weight: GatheredWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """Range of rows of a matrix; None if they are not whole blocks."""
    begin, stop, _ = slice(start, end).indices(weight.shape[0])
    is_cut_in_rows = weight.ndim == 2 and dim == 0 and step == 1
    if not is_cut_in_rows or begin % weight.rows or stop % weight.rows:
        return None
    codes, scales = weight.parts
    blocks = slice(begin // weight.rows, stop // weight.rows)
    return GatheredWeight((codes[begin:stop], scales[blocks]), weight.rows)


def _join(weights: Sequence[Any], dim: int = 0) -> Any:
    """Concatenation of matrices along rows; None if they are not whole blocks."""
    if dim or not all(isinstance(weight, GatheredWeight) for weight in weights):
        return None
    rows_of_block = {weight.rows for weight in weights}
    are_whole_blocks = all(weight.ndim == 2 and len(weight) % weight.rows == 0 for weight in weights)
    if not are_whole_blocks or len(rows_of_block) != 1:
        return None
    parts = zip(*(weight.parts for weight in weights), strict=True)  # the codes of all, then the scales of all
    return GatheredWeight(tuple(torch.cat(of_all) for of_all in parts), rows_of_block.pop())


_SHARDED: Final = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
}
"""Operations that return masters: shards, and views of them."""
_OPERATIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    _aten.alias.default: _alias,
    _aten.as_strided.default: _strided,
    _aten.detach.default: _alias,
    _aten.slice.Tensor: _cut,
    _aten.cat.default: _join,
    _aten.zeros_like.default: _zeros,
}
"""Operations on a gathered weight. A function returns None if it needs values."""
