"""Where recording needs more than PyTorch offers: all places that replace its private functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Mode(TorchDispatchMode):
    """Dispatch mode that PyTorch does not wrap to keep ``torch.compile`` out of it.

    The wrapper takes longer than many an operator. What is compiled is compiled while no mode is active.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def holds_dtensor(types: Collection[type]) -> bool:
    """Whether one of the types is a DTensor, without the second that importing it takes."""
    return any(map(_is_dtensor, types))


@cache
def _is_dtensor(kind: type) -> bool:
    tensor = sys.modules.get("torch.distributed.tensor")  # a class of it cannot exist before it
    return tensor is not None and issubclass(kind, tensor.DTensor)


def fake_mode() -> Any:
    """Mode of fake tensors in force, found faster than PyTorch does; None: tensors have values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


@contextmanager
def meshes_with_values() -> Iterator[None]:
    """Make device meshes with real tensors also in a fake world, because they read their own ranks on the host."""
    from_group = DeviceMesh.from_group

    @wraps(from_group)
    def with_values(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return from_group(*args, **kwargs)

    with mock.patch.object(DeviceMesh, "from_group", staticmethod(with_values)):
        yield


@contextmanager
def resizes_told(told: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``told`` with each storage that is resized, which no operator does."""
    resize = torch.UntypedStorage.resize_

    @wraps(resize)
    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        told(storage)

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_and_tell):
        yield


@contextmanager
def fsdp_told(
    gathering: Callable[[nn.Module], AbstractContextManager[None]],
    reducing: Callable[[nn.Module], AbstractContextManager[None]],
) -> Iterator[None]:
    """Enter ``gathering`` while FSDP gathers parameters, and ``reducing`` while it reduces gradients, of a unit.

    While DTensor computes shapes, no dispatch mode is active: its operators are not the model's.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def gathering_inside(function: Callable[..., Any]) -> Callable[..., Any]:
        def gather(group: Any, *args: Any, **kwargs: Any) -> Any:
            with gathering(group.modules[0]):
                return function(group, *args, **kwargs)

        return gather

    behind_backward: list[nn.Module] = []
    post_backward = FSDPParamGroup.post_backward
    foreach_reduce = vars(_fsdp_param_group)["foreach_reduce"]

    def with_unit_known(group: Any, *unused: Any) -> None:
        behind_backward.append(group.modules[0])
        try:
            post_backward(group, *unused)
        finally:
            behind_backward.pop()

    def reduce_inside(*args: Any, **kwargs: Any) -> Any:
        with reducing(behind_backward[-1]):
            return foreach_reduce(*args, **kwargs)

    compute_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    def compute_shapes_unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return compute_shapes(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ShardingPropagator, compute_shapes.__name__, compute_shapes_unseen))
        for name in ("unshard", "wait_for_unshard"):
            function = gathering_inside(getattr(FSDPParamGroup, name))
            stack.enter_context(mock.patch.object(FSDPParamGroup, name, function))
        stack.enter_context(mock.patch.object(FSDPParamGroup, "post_backward", with_unit_known))
        stack.enter_context(mock.patch.object(_fsdp_param_group, "foreach_reduce", reduce_inside))
        yield
