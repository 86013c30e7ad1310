"""Record of every storage of a step, from allocation to end.

Storages count, not tensors: views share the memory of what they view. A storage begins when an operator returns it for
the first time, and ends when it is freed or resized. Time is the number of these changes, not a clock's.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar, final

import torch
from attrs import frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from moefw.recording.collectives import WAIT
from moefw.recording.patches import Mode, fake_mode, holds_dtensor, resizes_told
from moefw.recording.places import Place, Places
from moefw.recording.tensors import tensors_in
from moefw.runtime.accounting import account

FOREVER: Final = 1 << 62
GATHERED: Final = "gathered"
PARAMETERS: Final = "parameters"
GRADIENTS: Final = "gradients"
OPERANDS: Final = "operands"
"""Operands of weights that the micro-batches of a step share."""
WEIGHTS: Final = (PARAMETERS, GATHERED)
"""Kinds of storages that hold parameters."""
NUMBER: Final = 8
"""Most bytes of a single number, such as a constant or a scale, which does not say of what a result is a copy."""
META: Final = torch.device("meta")
DEVICE: Final = torch.ops.prim.device.default
Storage = torch.UntypedStorage
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Life:
    """A storage of ``nbytes`` bytes. ``began`` and ``ended`` count changes of the memory in use."""

    nbytes: int
    began: int
    made_in: Place
    tensor: str
    """The operator that allocated it, and the dtype and shape of its result."""
    of_weights: bool
    """Whether it was computed from parameters alone: a copy in another dtype."""
    ended: int = FOREVER
    saved_in: Place | None = None
    """Where autograd saved it first, in forward."""
    given_to: Place | None = None
    """The first region with a memory policy that it is an input of, in forward."""
    kind: str | None = None
    """Label, such as ``parameters``; None: no label."""

    def alive(self, moment: int) -> bool:
        """Whether the storage is in use at ``moment``."""
        return self.began <= moment < self.ended

    @property
    def is_copy_of_weights(self) -> bool:
        """Whether it holds parameters, or was computed from them alone."""
        return self.of_weights or self.kind in WEIGHTS

    @property
    def is_number(self) -> bool:
        """Whether it has room for a single number at most."""
        return self.nbytes <= NUMBER


@frozen
class Allocation:
    """A storage as an operator allocates it, wherever that is: see :class:`Life`."""

    nbytes: int
    tensor: str
    of_weights: bool


@frozen(kw_only=True, eq=False)
class Recorded:
    """What some operators did. ``changes``: the number of a life that begins, or ``~number`` of one that ends."""

    lives: Sequence[Life]
    changes: Sequence[int]
    operators: frozenset[Any]


@final
class Recorder(Mode):
    """Dispatch mode that records when and where each storage is allocated and freed.

    ``off_device``: bytes of host memory by place. ``now``: the number of changes so far. Whole storages count, without
    an allocator's rounding and without memory inside of operators.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = Places(saved=self._note_saved, policy_input=self._note_policy_input)
        self.lives: list[Life] = []
        self.now = 0
        self.off_device: Counter[Place] = Counter()
        self._operators: set[Any] = set()
        self.peak_bytes = 0
        self.peak_moment = 0
        self.peak_place = self.places.here
        self._in_use = 0
        self._lives: Any = WeakIdKeyDictionary(ref_type=weakref.ref)
        """The life of each known storage; None: it has no bytes."""
        self._off_device: set[Storage] = set()
        """Storages in host memory."""
        self._fake: Any = None
        """The mode of fake tensors in which recording began; None: tensors have values."""

    def start(self) -> None:
        """Reset the peak and the operators."""
        self.peak_bytes = 0
        self._operators.clear()

    @property
    def operators(self) -> Set[str]:
        """Names of the operators that ran since the start."""
        return {str(operator) for operator in self._operators}

    def of(self, tensors: Iterable[Tensor]) -> Iterator[Life]:
        """Yield the storages of tensors, each once."""
        for storage in dict.fromkeys(storage for tensor in tensors for storage in _storages(tensor)):
            life = self._lives.get(storage)
            if life is not None:
                yield life

    def life_of(self, tensor: Tensor) -> Life | None:
        """Storage of a tensor; None if no operator returned it, or it has no bytes."""
        life: Life | None = self._lives.get(tensor.untyped_storage())
        return life

    def recorded_apart(self, run: Callable[[], T]) -> tuple[T, Recorded | None]:
        """Result of a function that is recorded as usual, and what was recorded.

        None: it has changed storages that it did not allocate.
        """
        first = len(self.lives)
        before = self.now
        operators_before = self._operators
        self._operators = set()
        try:
            result = run()
            operators = frozenset(self._operators)
        finally:
            self._operators |= operators_before
        lives = self.lives[first:]
        moments = {life.began: number for number, life in enumerate(lives)}
        moments |= {life.ended: ~number for number, life in enumerate(lives) if life.ended <= self.now}
        if len(moments) < self.now - before:
            return result, None
        changes = [moments[moment] for moment in sorted(moments)]
        return result, Recorded(lives=lives, changes=changes, operators=operators)

    def record_again(
        self, allocations: Sequence[Allocation], changes: Sequence[int], operators: Set[Any]
    ) -> Sequence[Life]:
        """Lives of storages that begin and end as others did. ``changes``, ``operators``: as of :class:`Recorded`."""
        self._operators |= operators
        lives: dict[int, Life] = {}
        for change in changes:
            if change < 0:
                self._end(lives[~change])
                continue
            allocation = allocations[change]
            lives[change] = self._begin(allocation.nbytes, allocation.tensor, of_weights=allocation.of_weights)
        return [lives[number] for number in range(len(allocations))]

    def attach(self, storage: Storage, life: Life) -> None:
        """Let a life that has begun end with a storage."""
        self._lives[storage] = life
        weakref.finalize(storage, self._end, life).atexit = False

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Label the storages of tensors."""
        for life in self.of(tensors):
            life.kind = kind

    @contextmanager
    def labelling(self, kind: str) -> Iterator[None]:
        """Label the storages that are allocated in this block, and have no label yet."""
        before = len(self.lives)
        yield
        for life in self.lives[before:]:
            life.kind = life.kind or kind

    def is_off_device(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in host memory."""
        return bool(self._off_device) and _storages(tensor) <= self._off_device

    def alive(self, moment: int) -> Iterator[Life]:
        """Yield the storages in use at a moment."""
        return (life for life in self.lives if life.alive(moment))

    def __enter__(self) -> Recorder:
        """Start recording."""
        self._fake = fake_mode()
        self._resizes = resizes_told(self._note_size)
        self._resizes.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._resizes.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record its results."""
        if func is DEVICE:  # asked of a fake tensor several times an operator
            return args[0].device
        if holds_dtensor(types):
            return NotImplemented  # its local tensors come here
        kwargs = kwargs or {}
        is_fake_wait = func is WAIT and self._fake is not None  # a fake one would return a new tensor
        result = args[0] if is_fake_wait else func(*args, **kwargs)
        self._operators.add(func)
        if fake_mode() is self._fake:  # in another one, DTensor computes shapes
            made_of = _MadeOf(self, (args, kwargs))
            for tensor in tensors_in(result):
                if _has_memory(tensor):
                    self._note_result(tensor, func, made_of)
        return result

    def _note_result(self, tensor: Tensor, func: Any, made_of: _MadeOf) -> None:
        """Begin the lives of a result's storages that are not known, and note new sizes of those that are."""
        storages = _storages(tensor)
        if account().in_host_memory and not storages <= self._off_device:
            new_storages = storages - self._off_device
            self._off_device |= new_storages
            self.off_device[self.places.here] += sum(storage.nbytes() for storage in new_storages)
        if storages <= self._off_device or self._is_view_of_unknown(storages, func):
            return
        for storage in storages:
            if storage in self._lives:
                self._note_size(storage)
            else:
                name = f"{func} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                self._begin_with(storage, name, of_weights=made_of.weights)

    def _is_view_of_unknown(self, storages: set[Storage], func: Any) -> bool:
        """Whether a tensor is in memory that no operator returned: a backend allocated it, as gloo does."""
        is_view = getattr(func, "is_view", False) and func is not torch.ops.aten.lift_fresh.default
        return is_view and not any(storage in self._lives for storage in storages)

    def _note_size(self, storage: Storage) -> None:
        """End the life of a known storage if it has another size now, and begin another one."""
        if storage not in self._lives:
            return
        life = self._lives[storage]
        known_nbytes = 0 if life is None else life.nbytes
        if storage.nbytes() == known_nbytes:
            return
        if life is not None:
            self._end(life)
        self._begin_with(storage, "resize", of_weights=False)

    def _begin_with(self, storage: Storage, name: str, *, of_weights: bool) -> None:
        """Begin the life of a storage, if it has bytes."""
        if storage.nbytes():
            self.attach(storage, self._begin(storage.nbytes(), name, of_weights=of_weights))
        else:
            self._lives[storage] = None

    def _begin(self, nbytes: int, name: str, *, of_weights: bool) -> Life:
        """A life that begins now."""
        self.now += 1
        life = Life(
            nbytes=nbytes,
            began=self.now,
            made_in=self.places.here,
            tensor=name,
            of_weights=of_weights,
            kind=OPERANDS if account().made_for_step else None,
        )
        self.lives.append(life)
        self._in_use += nbytes
        if self._in_use > self.peak_bytes:
            self.peak_bytes = self._in_use
            self.peak_moment = self.now
            self.peak_place = self.places.here
        return life

    def _end(self, life: Life) -> None:
        """End a life, unless a new size of its storage has ended it before the storage was freed."""
        if life.ended == FOREVER:
            self.now += 1
            life.ended = self.now
            self._in_use -= life.nbytes

    def _note_saved(self, tensor: Tensor, place: Place) -> None:
        for life in self.of([tensor]):
            life.saved_in = life.saved_in or place

    def _note_policy_input(self, tensor: Tensor, place: Place) -> None:
        for life in self.of([tensor]):
            life.given_to = life.given_to or place


@final
class _MadeOf:
    """The arguments of an operator, which may have thousands of results."""

    def __init__(self, recorder: Recorder, arguments: Any) -> None:
        self._recorder = recorder
        self._arguments = arguments

    @cached_property
    def weights(self) -> bool:
        """Whether results are computed from parameters alone."""
        sources = [life for life in self._recorder.of(tensors_in(self._arguments)) if not life.is_number]
        return bool(sources) and all(life.is_copy_of_weights for life in sources)


def _has_memory(tensor: Tensor) -> bool:
    """Whether a run has memory for a tensor: not for one on ``meta``. A fake one has the device that it stands for."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device != META


def _storages(tensor: Tensor) -> set[Storage]:
    """Storages of a tensor, or of the tensors that a subclass wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        return {tensor.untyped_storage()}
    names, _ = tensor.__tensor_flatten__()
    return {storage for name in names for storage in _storages(getattr(tensor, name))}
