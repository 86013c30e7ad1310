"""Functions whose operators run once: on tensors alike, they allocate, free and return the same.

A format that is only emulated takes fifty operators where a GPU launches a kernel, so a measurement of FP8 spends two
thirds of its time in them. What a quantizer did to tensors of some shapes is done again without running it: storages
begin and end in the same order, and results are made of their descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import wraps
from typing import Any, Final, Protocol, TypeVar, final
from unittest import mock

import torch
from attrs import frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from moefw.recording.known_results import NotDescribedError
from moefw.recording.patches import fake_mode
from moefw.recording.recorder import Allocation, Life, Recorder
from moefw.runtime.accounting import account
from moefw_kernels.quantize import Format, Quantized, reference

T = TypeVar("T")
QUANTIZERS: Final = ("quantize_tensor", "quantize_fp8", "quantize_mxfp8", "quantize_nvfp4")
"""Functions of the reference that run in the place of a kernel, or of a part of one."""


class Notes(Protocol):
    """What notes operators beside the recorder."""

    def circumstances(self) -> Hashable | None:
        """What decides how operators are noted here; None: they have to run."""

    def noted_apart(self, run: Callable[[], T], outside: Sequence[Life]) -> tuple[T, Any]:
        """Result of a function whose operators are noted as usual, and what was noted; None: it is not known.

        ``outside``: the storages that it is given.
        """

    def note_again(self, noted: Any, outside: Sequence[Life], made: Sequence[Life]) -> None:
        """Note what :meth:`noted_apart` did, of other storages. ``made``: those that the function allocates."""


@frozen
class _Result:
    """A tensor that a function returns.

    ``given``: the number of the tensor whose storage it shares, of those that the function is given; None: it lies in
    allocation ``made``.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    given: int | None
    made: int


@frozen(kw_only=True)
class _Known:
    """What a function does. ``changes``: the number of an allocation that begins, or ``~number`` of one that ends."""

    allocations: Sequence[Allocation]
    changes: Sequence[int]
    operators: frozenset[Any]
    noted: Any
    results: Sequence[_Result]
    assembled: Callable[[Sequence[Tensor]], Any]


_known: Final[dict[Any, _Known | None]] = {}
"""What is known of calls; None: it cannot be described."""


@contextmanager
def functions_known(recorder: Recorder, notes: Notes) -> Iterator[None]:
    """Run quantizers and what undoes them once for tensors alike, while a recorder of fake tensors is active."""
    known = _Functions(recorder, notes)
    with ExitStack() as stack:
        for name in QUANTIZERS:
            stack.enter_context(mock.patch.object(reference, name, known.once(getattr(reference, name))))
        stack.enter_context(mock.patch.object(Quantized, "dequantize", known.once(Quantized.dequantize)))
        yield


@final
class _Functions:
    """Functions that run once for arguments alike."""

    def __init__(self, recorder: Recorder, notes: Notes) -> None:
        self._recorder = recorder
        self._notes = notes
        self._fake = fake_mode()

    def once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which runs only where nothing is known of such arguments."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors: list[Tensor] = []
            try:
                call = self._call_described(function, (args, kwargs), tensors)
            except NotDescribedError:
                return function(*args, **kwargs)
            if call not in _known:
                result, _known[call] = self._learn(lambda: function(*args, **kwargs), tensors)
                return result
            known = _known[call]
            return function(*args, **kwargs) if known is None else self._again(known, tensors)

        return run

    def _call_described(self, function: Any, given: Any, tensors: list[Tensor]) -> Any:
        """Description of a call, which can be compared and hashed. Appends its tensors.

        Raises NotDescribedError if what it does depends on more than that.
        """
        circumstances = self._notes.circumstances()
        if circumstances is None or account().in_host_memory:
            raise NotDescribedError
        call = [*_described(given, tensors)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise NotDescribedError
        outside = self._storages(tensors)
        for tensor, life in zip(tensors, outside, strict=True):
            call.append((outside.index(life), tensor.storage_offset(), life.is_number, life.is_copy_of_weights))
        return function, circumstances, torch.get_default_dtype(), *call

    def _storages(self, tensors: Sequence[Tensor]) -> Sequence[Life]:
        """Storage of each tensor. Raises NotDescribedError if one is not recorded."""
        lives = [self._recorder.life_of(tensor) for tensor in tensors]
        recorded = [life for life in lives if life is not None]
        if len(recorded) < len(lives):
            raise NotDescribedError
        return recorded

    def _learn(self, function: Callable[[], Any], tensors: Sequence[Tensor]) -> tuple[Any, _Known | None]:
        """Result of a function, which runs, and what it does; None: it cannot be described."""
        outside = self._storages(tensors)
        (result, noted), recorded = self._recorder.recorded_apart(lambda: self._notes.noted_apart(function, outside))
        parts = _parts(result)
        if noted is None or recorded is None or parts is None:
            return result, None
        returned, assembled = parts
        try:
            results = [self._result_described(tensor, outside, recorded.lives) for tensor in returned]
        except NotDescribedError:
            return result, None
        known = _Known(
            allocations=[Allocation(life.nbytes, life.made_as, life.of_weights) for life in recorded.lives],
            changes=recorded.changes,
            operators=recorded.operators,
            noted=noted,
            results=results,
            assembled=assembled,
        )
        return result, known

    def _result_described(self, tensor: Tensor, outside: Sequence[Life], made: Sequence[Life]) -> _Result:
        """Description of a tensor that is returned. Raises NotDescribedError if it lies elsewhere, or has values."""
        (life,) = self._storages([tensor])
        is_known = life in outside or life in made
        if type(tensor) is not FakeTensor or tensor.constant is not None or not is_known:
            raise NotDescribedError
        return _Result(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.fake_device,
            given=outside.index(life) if life in outside else None,
            made=made.index(life) if life in made else -1,
        )

    def _again(self, known: _Known, tensors: Sequence[Tensor]) -> Any:
        """Result of a function that does not run."""
        recorder = self._recorder
        outside = self._storages(tensors)
        made = recorder.record_again(known.allocations, known.changes, known.operators)
        new_storages: dict[int, torch.UntypedStorage] = {}
        returned = []
        with _disable_current_modes():
            for number in {result.made for result in known.results if result.given is None}:
                new_storages[number] = _storage(known.allocations[number].nbytes)
            for result in known.results:
                if result.given is not None:
                    storage = tensors[result.given].untyped_storage()
                else:
                    storage = new_storages[result.made]
                memory = torch.empty(0, dtype=result.dtype, device="meta")
                memory.set_(storage, result.offset, result.shape, result.stride)
                returned.append(self._fake.fake(memory, result.device))
        for number, storage in new_storages.items():
            recorder.attach(storage, made[number])
        self._notes.note_again(known.noted, outside, made)
        return known.assembled(returned)


def _storage(nbytes: int) -> torch.UntypedStorage:
    """Storage of so many bytes, without memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def _described(given: Any, tensors: list[Tensor]) -> Iterator[Any]:
    """Yield descriptions of arguments, which can be compared and hashed. Appends their tensors.

    Raises NotDescribedError for what has none.
    """
    if isinstance(given, Quantized):
        for each in fields(given):
            yield each.name
            yield from _described(getattr(given, each.name), tensors)
    elif isinstance(given, (tuple, list)):
        yield type(given)
        yield len(given)
        for item in given:
            yield from _described(item, tensors)
    elif isinstance(given, Mapping):
        for name, value in given.items():
            yield name
            yield from _described(value, tensors)
    elif isinstance(given, Format):
        yield given
    else:
        yield fake_mode().described(given, tensors)


def _parts(result: Any) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Any]] | None:
    """Tensors of a result, and the function that makes it of others like them; None: it has another class."""
    if isinstance(result, Tensor):
        return [result], lambda tensors: tensors[0]
    if not isinstance(result, Quantized):
        return None
    names = [each.name for each in fields(result) if isinstance(getattr(result, each.name), Tensor)]
    nothing: dict[str, Any] = dict.fromkeys(names)
    form = replace(result, **nothing)  # it keeps no storage in use
    return [getattr(result, name) for name in names], lambda tensors: replace(
        form, **dict(zip(names, tensors, strict=True))
    )
