"""A device whose tensors hold CPU values, and a count of the times that the host would wait for a GPU.

The host waits where it reads a value and where it uploads from pageable memory. An asynchronous copy to pinned memory
waits only for the event behind it. Until then the copy holds garbage, so that code which does not wait fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_map_only

from moefw.core.errors import ContractError
from moefw.recording.patches import Mode
from moefw.recording.tensors import tensors_in
from moefw.runtime.attention import kernels

NAME: Final = "counted"
"""The type of the device."""
GARBAGE: Final = 0x55
"""Every byte of a copy that has not arrived."""
DEPTH: Final = 4
"""How many calls a wait names."""

Ran = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]
"""Takes an operator that has run, its arguments by position and by name, and its result."""

_aten = torch.ops.aten
_READS: Final = (
    _aten._local_scalar_dense, _aten.bincount, _aten.equal, _aten.masked_select, _aten.nonzero,
    _aten._unique, _aten._unique2, _aten.unique_consecutive, _aten.unique_dim,
)  # fmt: skip
"""Operators that always read a value on the host, most of them the number of their results."""
_INDEXES: Final = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index)


@frozen
class Wait:
    """One wait of the host: the operator, and the calls that led to it, innermost first."""

    what: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} at {' < '.join(self.where)}"


@final
class HostWaits(Mode):
    """Notes the waits of this thread, and of the backwards that it starts, while it is active.

    ``reads`` of values, waits for an event included, and ``uploads``. Collectives run on the held values and are
    neither. Tensors of the device work only while a mode is active. ``ran`` is called with each operator of the device,
    its arguments and its result, as tensors of the CPU that hold the values. Raises ContractError where PyTorch has no
    devices that are written in Python.
    """

    def __init__(self, ran: Ran | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _register()
        self.ran = ran
        self.device = torch.device(NAME, 0)
        self.reads: list[Wait] = []
        self.uploads: list[Wait] = []
        self._pinned: dict[int, Tensor] = {}
        self._under_way: list[tuple[Tensor, Tensor]] = []
        self._arrived = 0

    def on_device(self, value: Any) -> Any:
        """Pytree with copies of its tensors on the device. Nothing is noted."""
        return tree_map_only(Tensor, lambda tensor: _Held(tensor.detach().clone()), value)

    def on_host(self, value: Any) -> Any:
        """Pytree with copies of the device's tensors on the CPU. Nothing is noted."""
        return tree_map_only(_Held, lambda tensor: tensor.held.detach().clone(), value)

    def move(self, module: nn.Module) -> None:
        """Replace the parameters and buffers of a module by copies on the device. Nothing is noted."""
        for each in module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                each.register_parameter(name, nn.Parameter(self.on_device(parameter), parameter.requires_grad))
            for name, buffer in each.named_buffers(recurse=False):
                setattr(each, name, self.on_device(buffer))

    @property
    def launched(self) -> int:
        """How many asynchronous copies to the host were launched."""
        return self._arrived + len(self._under_way)

    def arrive(self, count: int, what: str) -> None:
        """Wait until the first ``count`` copies have arrived."""
        self.reads.append(_wait(what))
        while self._arrived < count:
            place, values = self._under_way.pop(0)
            place.copy_(values)
            self._arrived += 1

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a CPU tensor counts as pinned."""
        return tensor.untyped_storage()._cdata in self._pinned

    def upload(self, source: Tensor, non_blocking: bool) -> Tensor:
        """Note that a CPU tensor goes to the device, unless the host does not wait."""
        if not (non_blocking and self.is_pinned(source)):
            self.uploads.append(_wait("upload"))
        return source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on the held values."""
        kwargs = kwargs or {}
        packet = func.overloadpacket
        device = kwargs.get("device")
        allocates_on_device = device is not None and torch.device(device).type == NAME
        if not allocates_on_device and not _any_held(types, (args, kwargs)):
            return self._on_cpu(func, args, kwargs)
        if packet is _aten.copy_:
            return self._copy(*args, **kwargs)
        if packet is _aten._to_copy:
            return self._moved(func, args[0], kwargs)
        held_args, held_kwargs = _all_held((args, kwargs))
        if device is not None and not allocates_on_device:
            return self._on_cpu(func, held_args, held_kwargs)  # such as a new_empty(..., device="cpu") of a _Held
        self._note(func, args, kwargs)
        if allocates_on_device:
            held_kwargs = held_kwargs | {"device": "cpu"}
        values = func(*held_args, **held_kwargs)
        if self.ran is not None:
            self.ran(func, held_args, held_kwargs, values)
        result = _on_device(values)
        if func.namespace == "c10d":
            return result
        return return_and_correct_aliasing(func, args, kwargs, result)

    def _on_cpu(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator on CPU tensors. Pinning is only noted, because memory is pinned only where a GPU is."""
        if func.overloadpacket is _aten.is_pinned:
            return self.is_pinned(args[0])
        is_pin_memory = func.overloadpacket is _aten._pin_memory
        pins = kwargs.pop("pin_memory", False) or is_pin_memory
        result = args[0].clone() if is_pin_memory else func(*args, **kwargs)
        if pins:
            self._pinned[result.untyped_storage()._cdata] = result
        return result

    def _moved(self, func: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Copy of a tensor on another device or in another dtype: ``Tensor.to``."""
        target = torch.device(kwargs.pop("device", None) or source.device)
        non_blocking = kwargs.pop("non_blocking", False)
        if target.type == NAME:
            values = _held(source) if isinstance(source, _Held) else self.upload(source, non_blocking)
            moved = func(values, **kwargs)
            if self.ran is not None:
                self.ran(func, (values,), kwargs, moved)
            return _Held(moved)
        self.reads.append(_wait("copy to the CPU"))
        values = func(_held(source), **kwargs)
        assert isinstance(values, Tensor)
        return values

    def _copy(self, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy into a tensor: ``Tensor.copy_``. Into pinned memory without blocking, garbage until it has arrived."""
        values = _held(source) if isinstance(source, _Held) else self.upload(source, non_blocking)
        if isinstance(into, _Held):
            into.held.copy_(values)
            if self.ran is not None:
                self.ran(_aten.copy_.default, (into.held, values), {}, into.held)
        elif non_blocking and self.is_pinned(into):
            self._under_way.append((into, values.clone()))
            into.view(-1).view(torch.uint8).fill_(GARBAGE)
        else:
            self.reads.append(_wait("copy to the CPU"))
            into.copy_(values)
        return into

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note what an operator reads or uploads. Raises ContractError for what a GPU refuses."""
        packet = func.overloadpacket
        if packet in _INDEXES:
            # A mask as an index reads how many of its values are true.
            reads = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        elif packet is _aten.repeat_interleave:
            reads = kwargs.get("output_size") is None
        elif packet is _aten._grouped_mm:
            # In other dtypes it is a loop over the groups, whose ends it reads.
            reads = args[0].dtype is not torch.bfloat16
        else:
            reads = packet in _READS
        if reads:
            self.reads.append(_wait(str(func)))
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, _Held):
                continue
            if packet in (*_INDEXES, _aten.where):
                self.upload(tensor, non_blocking=False)
            elif tensor.dim():
                raise ContractError(f"{func} gets tensors of a CPU and of a GPU.", "Create them on one device.")


@final
class _Held(Tensor):
    """A tensor of the device, with its values on the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> _Held:
        tensor: _Held = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.held = held
        return tensor

    def tolist(self) -> Any:
        """Values. A tensor of a subclass would refuse."""
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{NAME}({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise ContractError(f"{func} runs on a counted device outside of HostWaits.", "Enter a HostWaits around it.")


def _held(tensor: Any) -> Tensor:
    values: Tensor = tensor.held
    return values


def _any_held(types: Collection[type], arguments: Any) -> bool:
    """Whether an operator gets a tensor of the device; ``types`` lacks those in a list of lists."""
    return _Held in types or any(isinstance(tensor, _Held) for tensor in tensors_in(arguments))


def _all_held(arguments: Any) -> Any:
    """Arguments of an operator, with the values in place of the device's tensors; faster than a pytree."""
    if isinstance(arguments, _Held):
        return arguments.held
    if isinstance(arguments, (tuple, list)):
        return type(arguments)([_all_held(item) for item in arguments])
    if isinstance(arguments, dict):
        return {name: _all_held(item) for name, item in arguments.items()}
    return arguments


def _on_device(values: Any) -> Any:
    """Result of an operator, with its tensors on the device; faster than a pytree."""
    if isinstance(values, Tensor):
        return _Held(values)
    if isinstance(values, (tuple, list)):
        return type(values)([_on_device(item) for item in values])
    return values


class _Event:
    """Event behind the copies that were launched. The host's wait for it is a read."""

    def __init__(self) -> None:
        self._count = 0

    def record(self) -> None:
        """Note the copies that were launched."""
        self._count = _active().launched

    def synchronize(self) -> None:
        """Wait for them."""
        _active().arrive(self._count, "wait for an event")


class _Module:
    """The device's module, which ``torch.get_device_module`` returns."""

    Event = _Event

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def synchronize(self, device: Any = None) -> None:
        """Wait for all copies."""
        _active().arrive(_active().launched, "synchronize")


def available() -> bool:
    """Whether this version of PyTorch has devices that are written in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@cache
def _register() -> Any:
    """Register the device, for the rest of the process; return what must stay alive."""
    if not available():
        what = f"torch {torch.__version__} has no devices that are written in Python."
        raise ContractError(what, "Use torch 2.11 or later.")
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    kernels.KERNELS[NAME] = kernels.KERNELS["cpu"]
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    """Allocate for ``torch.tensor``, which goes past the mode."""
    with _disable_current_modes():
        return _Held(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
    waits = _active()
    with _disable_current_modes():
        _held(into).copy_(waits.upload(source, non_blocking))
    return into


def _active() -> HostWaits:
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, HostWaits)]
    if not modes:
        raise ContractError("a counted device is used outside of HostWaits.", "Enter a HostWaits around it.")
    return modes[-1]


def _wait(what: str) -> Wait:
    return Wait(what, tuple(name for name, _ in zip(_calls(sys._getframe(2)), range(DEPTH), strict=False)))


def _calls(frame: FrameType | None) -> Iterator[str]:
    """Yield the calls of a stack outside of PyTorch and of this module, innermost first."""
    torch_folder = str(Path(torch.__file__).parent)
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__ and not code.co_filename.startswith((torch_folder, "<")):
            yield f"{'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
