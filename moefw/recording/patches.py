"""Where recording needs more than PyTorch offers: all places that replace its private functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from moefw.recording.recorder import GATHERED, Recorder


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
def fsdp_told(recorder: Recorder) -> Iterator[None]:
    """Label the storages that FSDP gathers parameters into, and do not record tensors that DTensor makes for shapes."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def gathering(function: Callable[..., Any]) -> Callable[..., Any]:
        def gathers(*args: Any, **kwargs: Any) -> Any:
            before = len(recorder.lives)
            result = function(*args, **kwargs)
            for life in recorder.lives[before:]:
                life.kind = GATHERED
            return result

        return gathers

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return shaping(*args, **kwargs)

    shaping = ShardingPropagator._propagate_tensor_meta_non_cached
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ShardingPropagator, shaping.__name__, unseen))
        for name in ("unshard", "wait_for_unshard"):
            function = gathering(getattr(FSDPParamGroup, name))
            stack.enter_context(mock.patch.object(FSDPParamGroup, name, function))
        yield
