"""Fake tensors whose operators are computed once: on tensors alike, the results are alike.

PyTorch remembers results, too, but takes five times as long to find them and to make tensors of them, and computes
views of each offset anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, final

import torch
from attrs import frozen
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_map_only

from moefw.recording.tensors import tensors_in

aten = torch.ops.aten
_CONSTANTS: Final = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that are compared by value."""
_KNOWABLE: Final = ("aten", "moefw")
"""Namespaces of operators whose results depend on their arguments alone. Of a third party's nothing is known."""
_DEPENDS_ON_MORE: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.inplace_view})
"""Tags of operators whose results depend on more than shapes, or that change those of their arguments."""
_DEPENDS_ON_OFFSET: Final = (
    *(getattr(packet, name) for packet in (aten.as_strided, aten.as_strided_) for name in packet.overloads()),
    aten.view.dtype,
)
"""Operators that are given an offset in a storage, or count it in elements of another size.

Views that all others make lie as far behind their tensor wherever this lies in its storage.
"""
_UNSEEN: Final = object()
"""In the place of a description: the operator has not run on such arguments."""
_DIRECT: Final = frozenset(
    {
        aten.as_strided.default,
        aten.detach.default,
        aten.expand.default,
        aten.mm.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
"""Operators that PyTorch's kernels for ``meta`` compute. For fake tensors it looks further, or composes them of others:
that takes ten times as long."""
_MAKE: Final = frozenset(
    {aten.empty.memory_format, aten.empty_like.default, aten.zeros.default, aten.zeros_like.default}
)
"""The same of operators that make a tensor, on the device that they are given or on that of the one that it is like."""


@frozen
class _Argument:
    """A result that is an argument of its operator, changed in place: its number among the tensors."""

    number: int


@frozen
class _Made:
    """A tensor that an operator makes.

    ``viewed``: the number of the argument whose storage it shares, or None. ``offset``: beyond that of this argument.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    viewed: int | None


class NotDescribedError(Exception):
    """An operator has arguments or results that shapes, dtypes and constants do not describe."""


@final
class KnownResults(FakeTensorMode):
    """Mode of fake tensors that makes results anew of their description, where the operator has run on others alike.

    Alike are tensors of one shape, stride, dtype and device, and constants of one type and value. Results are
    remembered for all modes of the process.
    """

    known: ClassVar[dict[Any, Any]] = {}
    """Descriptions of the results by that of the operator and its arguments; None: they cannot be described."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_enabled = False  # what PyTorch would remember is known here already
        self._attributes: dict[torch.device, Mapping[str, Any]] = {}
        """Attributes of a new fake tensor of each device: they are the same for all tensors of that device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in moefw.recording.patches.Mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results of an operator: made of their description if it is known, otherwise computed by PyTorch."""
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        try:
            call = self._call_described(func, args, kwargs, tensors)
        except NotDescribedError:
            return self._computed(func, types, args, kwargs)
        described = self.known.get(call, _UNSEEN)
        if described is _UNSEEN:
            result = self._computed(func, types, args, kwargs)
            self.known[call] = self._learned(call, args, kwargs, result)
            return result
        if described is None:
            return self._computed(func, types, args, kwargs)
        (results,) = described
        return self._made(results, tensors)

    def of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Results of an operator for a mode above this one: made at once if they are known.

        Otherwise it runs, and PyTorch calls this mode, which takes longer than to make a result.
        """
        with torch._C._DisableTorchDispatch():
            tensors: list[Tensor] = []
            try:
                described = self.known.get(self._call_described(func, args, kwargs, tensors))
            except NotDescribedError:
                described = None
            if described is not None:
                return self._made(described[0], tensors)
        return func(*args, **kwargs)

    def _computed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Results that PyTorch computes."""
        devices = {self._device_of(tensor) for tensor in tensors_in((args, kwargs))}
        if None in devices:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in _MAKE:
            device = kwargs.get("device") or next(iter(devices), torch.device("cpu"))
            with in_kernel_invocation_manager(self):
                return FakeTensor(self, func(*args, **{**kwargs, "device": torch.device("meta")}), device)
        if func.namespace == "c10d":
            with in_kernel_invocation_manager(self):
                return func(*args, **kwargs)  # the arguments that it has written, and a handle
        if func in _DIRECT and len(devices) == 1:
            (device,) = devices
            with in_kernel_invocation_manager(self):
                results = func(*args, **kwargs)
            return tree_map_only(Tensor, lambda result: FakeTensor(self, result, device), results)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _device_of(self, tensor: Tensor) -> torch.device | None:
        """Device for which a fake tensor of this mode stands; None: it is another tensor, or one with a value."""
        if type(tensor) is FakeTensor and tensor.fake_mode is self and tensor.constant is None:
            return tensor.fake_device
        return None

    def _call_described(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Description of an operator and its arguments, as of :meth:`described`."""
        described = self.described(args, tensors), self.described(kwargs, tensors)
        offsets = [tensor.storage_offset() for tensor in tensors] if func in _DEPENDS_ON_OFFSET else []
        return func, torch.get_default_dtype(), *described, *offsets

    def described(self, given: Any, tensors: list[Tensor]) -> Any:
        """Description of arguments, which can be compared and hashed. Appends their tensors.

        Raises NotDescribedError for what has none: tensors of other classes or modes, and those with values.
        """
        if isinstance(given, Tensor):
            tensors.append(given)
            return self._tensor_described(given)
        if isinstance(given, (tuple, list)):
            return type(given), *[self.described(item, tensors) for item in given]
        if isinstance(given, _CONSTANTS):
            return type(given), given
        if isinstance(given, Mapping):
            return tuple((name, self.described(value, tensors)) for name, value in given.items())
        raise NotDescribedError

    def _tensor_described(self, tensor: Tensor) -> Any:
        if type(tensor) is FakeTensor:
            if tensor.fake_mode is not self or tensor.constant is not None:
                raise NotDescribedError
            device = tensor.fake_device
        elif type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
            device = tensor.device
        else:
            raise NotDescribedError
        dtype = tensor.dtype
        if tensor.layout is not torch.strided or dtype.is_complex:
            raise NotDescribedError
        return tensor.shape, tensor.stride(), dtype, device

    def _learned(self, call: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Description of a result in a tuple of one; None if arguments do not determine it, or it has none.

        Results of those that are described must be the same when they are made of that.
        """
        func = call[0]
        if not isinstance(func, OpOverload) or func.namespace not in _KNOWABLE or _DEPENDS_ON_MORE & set(func.tags):
            return None
        tensors: list[Tensor] = []
        try:
            if call != self._call_described(func, args, kwargs, tensors):
                return None  # it has changed a shape
            described = self._result_described(result, tensors)
            again = self._made(described, tensors)
            return (described,) if [*_sizes(result)] == [*_sizes(again)] else None
        except NotDescribedError:
            return None

    def _result_described(self, result: Any, tensors: Sequence[Tensor]) -> Any:
        if result is None:
            return None
        if type(result) in (tuple, list):
            return type(result)(self._result_described(item, tensors) for item in result)
        if type(result) is not FakeTensor:
            raise NotDescribedError
        for number, tensor in enumerate(tensors):
            if result is tensor:
                return _Argument(number)
        shape, stride, dtype, device = self._tensor_described(result)
        storage = result.untyped_storage()._cdata
        sharing = (number for number, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage)
        viewed = next(sharing, None)
        offset = int(result.storage_offset()) - (0 if viewed is None else int(tensors[viewed].storage_offset()))
        return _Made(shape, stride, offset, dtype, device, viewed)

    def _made(self, described: Any, tensors: Sequence[Tensor]) -> Any:
        """Results as they are described."""
        if isinstance(described, _Made):
            return self._made_tensor(described, tensors)
        if isinstance(described, _Argument):
            return tensors[described.number]
        if described is None:
            return None
        return type(described)(self._made(item, tensors) for item in described)

    def _made_tensor(self, made: _Made, tensors: Sequence[Tensor]) -> Tensor:
        if made.viewed is None:
            memory = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        else:
            viewed = tensors[made.viewed]
            memory = torch.empty(0, dtype=made.dtype, device="meta")
            memory.set_(viewed.untyped_storage(), viewed.storage_offset() + made.offset, made.shape, made.stride)
        return self.fake(memory, made.device)

    def fake(self, memory: Tensor, device: torch.device) -> FakeTensor:
        """Fake tensor of a device, of a tensor without memory that needs no gradient.

        It is what the class's constructor returns, which checks its arguments, normalises the device and sets each
        attribute by itself for every tensor.
        """
        attributes = self._attributes.get(device)
        if attributes is None:
            made = FakeTensor(self, memory, device)
            self._attributes[device] = dict(made.__dict__)
            return made
        subclass: Any = Tensor._make_subclass
        like: FakeTensor = subclass(FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_warn_deprecated_on_mutable_data_ptr(like)
        like.__dict__.update(attributes)
        return like


def _sizes(result: Any) -> Iterator[Any]:
    """Yield shape, stride, offset, dtype and storage's bytes of the tensors of a result, and what is no tensor."""
    if isinstance(result, (tuple, list)):
        yield type(result)
        for item in result:
            yield from _sizes(item)
    elif isinstance(result, Tensor):
        nbytes = result.untyped_storage().nbytes()
        yield result.shape, result.stride(), result.storage_offset(), result.dtype, result.device, nbytes
    else:
        yield result
