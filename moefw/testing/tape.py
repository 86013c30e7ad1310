"""A tape of what a device ran: every operator with its storages, to be run again on new values, as a CUDA graph is.

A graph of a GPU runs the same kernels on the same addresses with the same numbers, whatever the values. A tape does so
on the counted device (:mod:`moefw.testing.host_waits`): what replays equal on it has no operator, no shape and no
number that depends on values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moefw.core.errors import ContractError
from moefw.recording.tensors import tensors_in
from moefw.testing.host_waits import HostWaits, Wait

T = TypeVar("T")


@frozen(eq=False)
class Recorded:
    """An operator that ran, its arguments, and its result, whose memory a replay writes again."""

    operator: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any

    def __str__(self) -> str:
        shapes = [list(tensor.shape) for tensor in tensors_in((self.args, self.kwargs))]
        return f"{self.operator}({', '.join(map(str, shapes))})"


@final
class Tape:
    """The operators of a device, in order. ``waits``: the host's reads and uploads meanwhile, which no graph holds."""

    def __init__(self) -> None:
        self.recorded: list[Recorded] = []
        self.waits: list[Wait] = []

    @contextmanager
    def recording(self, device: HostWaits) -> Iterator[None]:
        """Record what the device runs in this block."""
        reads, uploads = len(device.reads), len(device.uploads)
        device.ran = self._add
        try:
            yield
        finally:
            device.ran = None
            self.waits += [*device.reads[reads:], *device.uploads[uploads:]]

    def _add(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        self.recorded.append(Recorded(operator, args, kwargs, result))

    @property
    def operators(self) -> list[str]:
        """The operators with the shapes of their tensors: the same on every rank whose values alone differ."""
        return [str(each) for each in self.recorded]

    def made_outside(self) -> list[Tensor]:
        """Tensors that are read and that no recorded operator has made: they must stay where they are."""
        made: set[int] = set()
        outside: dict[int, Tensor] = {}
        for each in self.recorded:
            for tensor in tensors_in((each.args, each.kwargs)):
                if _storage(tensor) not in made:
                    outside.setdefault(_storage(tensor), tensor)
            made.update(map(_storage, tensors_in(each.result)))
        return [*outside.values()]

    def replay(self) -> None:
        """Run all operators again, in order, on the memory of the first time.

        Raises ContractError at an operator whose result has another shape than then.
        """
        with _disable_current_modes(), torch.no_grad():
            for number, each in enumerate(self.recorded):
                again = each.operator(*each.args, **each.kwargs)
                if each.operator.namespace == "c10d":
                    _wait(again)
                for place, value in zip(tensors_in(each.result), tensors_in(again), strict=True):
                    if place.shape != value.shape:
                        what = f"operator {number} of a tape, {each}, makes {list(value.shape)} after"
                        raise ContractError(f"{what} {list(place.shape)}.", "Give it a size that no value changes.")
                    if _storage(place) != _storage(value):
                        place.copy_(value)


@final
class TapeGraphs:
    """Graphs of the counted device: a capture also runs what it records, unlike that of a GPU."""

    def __init__(self, device: HostWaits) -> None:
        self._device = device
        self.tapes: list[Tape] = []

    def capture(self, function: Callable[[], T]) -> tuple[Tape, T]:
        """Record what ``function`` runs. Raises RuntimeError with each wait of the host, as a GPU refuses it."""
        tape = Tape()
        with tape.recording(self._device):
            result = function()
        if tape.waits:
            raise RuntimeError(f"a graph holds no wait of the host: {'; '.join(map(str, tape.waits))}")
        self.tapes.append(tape)
        return tape, result


def _wait(result: Any) -> None:
    """Wait for a collective."""
    work = result[-1] if isinstance(result, (tuple, list)) else result
    dist.Work.unbox(work).wait()


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity
