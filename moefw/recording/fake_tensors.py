"""One rank of a world of any size, on tensors without memory. Indices, which a step reads on the host, have values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from moefw.core.errors import ContractError
from moefw.recording.collectives import WAIT, Collective, collective_of
from moefw.recording.even_routing import CHOOSING, chosen_evenly
from moefw.recording.known_results import KnownResults
from moefw.recording.patches import Mode, fake_mode, holds_dtensor, meshes_with_values
from moefw.recording.skew import Skew
from moefw.recording.tensors import tensors_in

INDICES: Final = (torch.int64, torch.int32, torch.bool)
"""Dtypes of tokens, experts, counts, places and masks. Tensors of other dtypes have no values."""
_INDICES_HAVE_VALUES: Final = ContextVar("_INDICES_HAVE_VALUES", default=True)
"""Whether indices that are made now have values."""


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Act as ``rank`` of ``world`` ranks. Collectives do nothing; tensors made inside have shapes but no values.

    Code that reads a value on the host fails, so code that runs needs no such read on a device either.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with meshes_with_values(), KnownResults():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensor_world(rank: int, world: int, skew: Skew | None = None) -> Iterator[None]:
    """Act as ``rank`` of ``world`` ranks that all do the same. Routing is even, or as ``skew`` says.

    Tensors have shapes and no values, except those that are computed from indices alone, also across ranks. On the
    host, a missing number reads as 0.0 and a missing truth value as True; a missing integer raises ContractError.
    """
    with fake_world(rank, world):
        fake = fake_mode()
        fake.allow_non_fake_inputs = True
        with _RealIndices(fake, skew):
            yield


@contextmanager
def indices_without_values() -> Iterator[None]:
    """Make integers without values, too, in a world of fake tensors.

    For an optimizer's step: its integers are bits to round with and codes of states, as many as a rank has parameters.
    Nothing reads them, and computing them takes minutes and gigabytes for a large model.
    """
    token = _INDICES_HAVE_VALUES.set(False)
    try:
        yield
    finally:
        _INDICES_HAVE_VALUES.reset(token)


@final
class _RealIndices(Mode):
    """Dispatch mode that runs operators on indices alone with values, outside of the mode of fake tensors.

    A tensor is fake if it has no values. Results of operators with a fake input are fake, except what routing chooses.
    """

    def __init__(self, fake: KnownResults, skew: Skew | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.skew = skew

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, with values if all of its inputs have them and are indices."""
        if holds_dtensor(types):
            return NotImplemented  # its local tensors come here
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default or fake_mode() is not self.fake:
            return func(*args, **kwargs)  # in another fake mode, DTensor computes shapes
        tensors = tensors_in((args, kwargs))
        if not tensors:
            return self._created(func, args, kwargs)
        num_fake = sum(isinstance(tensor, FakeTensor) for tensor in tensors)
        if num_fake == 0:
            if _INDICES_HAVE_VALUES.get() and all(tensor.dtype in INDICES for tensor in tensors):
                return self._run_with_values(func, args, kwargs)
            return func(*args, **kwargs)
        # A constant has its value although it is fake: PyTorch reads it itself.
        if func is torch.ops.aten._local_scalar_dense.default and tensors[0].constant is None:  # type: ignore[attr-defined]
            return _read(tensors[0])
        if num_fake < len(tensors):
            _refuse_writes(func, args)
        if func is torch.ops.aten._grouped_mm.default and tensors[0].dtype is not torch.bfloat16:
            return _grouped(args, kwargs)
        result = self.fake.of(func, args, kwargs)
        return chosen_evenly(func, args, kwargs, result, self.skew) if func in CHOOSING else result

    def _created(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operator without tensor inputs; indices have values if they are to."""
        result = self.fake.of(func, args, kwargs)
        if _INDICES_HAVE_VALUES.get() and isinstance(result, Tensor) and result.dtype in INDICES:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return result

    def _run_with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose inputs have values. Of its results, only indices keep theirs."""
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
            if func.namespace in ("c10d", "_c10d_functional") and func is not WAIT:
                # The fake process group has left its outputs as they were.
                _as_if_all_were_alike(collective_of(func, args, kwargs), result)
        return tree_map_only(Tensor, self._fake_unless_indices, result)

    def _fake_unless_indices(self, tensor: Tensor) -> Tensor:
        if tensor.dtype in INDICES or isinstance(tensor, FakeTensor):
            return tensor
        return self.fake.from_tensor(tensor, static_shapes=True)


def _read(tensor: Tensor) -> bool | float:
    """Number that the host reads from a tensor without values. Raises ContractError for integers."""
    if tensor.dtype is torch.bool:
        return True
    if tensor.is_floating_point():
        return 0.0
    problem = f"an integer ({tensor.dtype}) is read on the host that depends on values, and here there are none."
    raise ContractError(problem, "Measure with tensors that have values, or take it from shapes and indices.")


def _grouped(args: Any, kwargs: Any) -> Tensor:
    """Grouped product of fake tensors of any dtype. PyTorch infers its shape only for bf16."""
    narrow_args, narrow_kwargs = tree_map_only(FakeTensor, _narrow, (args, kwargs))
    product: Tensor = torch.ops.aten._grouped_mm.default(*narrow_args, **narrow_kwargs)
    return product.new_empty(product.shape, dtype=args[0].dtype)


def _narrow(tensor: FakeTensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def _refuse_writes(func: Any, args: Sequence[Any]) -> None:
    """Raise ContractError if an operator would write unknown values into indices."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for tensor in tensors_in(value):
            if not isinstance(tensor, FakeTensor) and tensor.dtype in INDICES:
                problem = f"{func} writes values that depend on floating-point numbers into {tensor.dtype} indices."
                raise ContractError(problem, "Measure with tensors that have values.")


def _as_if_all_were_alike(collective: Collective, result: Any) -> None:
    """Write what a collective receives, as if every rank sent what this one does.

    From another rank comes what this one sends to itself. If sizes differ, it is what this rank sends to the rank that
    lies as far behind it as the other one lies before it. A sum is the size of the group times this rank's part.
    """
    if collective.kind == "recv":
        raise ContractError("indices are received from one rank: unknown where all ranks are alike.")
    rank = collective.group.rank()
    size = collective.group.size()
    received = collective.places if collective.places_in is None else collective.places_in(result)
    for sender, places in received.items():
        to_itself = collective.to.get(rank, places)
        for index, place in enumerate(places):
            sent = to_itself[index]
            if sent.shape != place.shape and place.numel():
                sent = collective.to[(2 * rank - sender) % size][index]
            if place.numel():
                place.copy_(sent)
            if collective.operation == dist.ReduceOp.SUM:
                place.mul_(size)
