"""Record of every storage of a step, from allocation to end.

Storages count, not tensors: views share the memory of what they view. A storage begins when an operator returns it for
the first time, and ends when it is freed or resized. Time is the number of these changes, not a clock's.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar, final

import torch
from attrs import frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moefw.recording.collectives import WAIT
from moefw.recording.patches import Mode, fake_mode, holds_dtensor, resizes_told
from moefw.recording.places import Place, Places
from moefw.recording.tensors import tensors_in
from moefw.runtime.accounting import account

FOREVER: Final = 1 << 62
GATHERED: Final = "gathered"
PARAMETERS: Final = "parameters"
GRADIENTS: Final = "gradients"
REDUCED: Final = "reduced"
"""Inputs of reductions of gradients, each of which is there until the next one."""
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
    made_as: Sequence[Any]
    """The operator that allocated it, and the dtype and shape of its result; empty: it was resized."""
    of_weights: bool
    """Whether it was computed from parameters alone: a copy in another dtype."""
    ended: int = FOREVER
    saved_in: Place | None = None
    """Where autograd saved it first, in forward."""
    given_to: Place | None = None
    """The first region with a memory policy that it is an input of, in forward."""
    kind: str | None = None
    """Label, such as ``parameters``; None: no label."""

    @property
    def tensor(self) -> str:
        """The operator that allocated it, and the dtype and shape of its result."""
        if not self.made_as:
            return "resize"
        operator, dtype, shape = self.made_as
        return f"{operator} {str(dtype).removeprefix('torch.')}{list(shape)}"

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
    made_as: Sequence[Any]
    of_weights: bool


@frozen(kw_only=True, eq=False)
class Recorded:
    """What some operators did. ``changes``: the number of a life that begins, or ``~number`` of one that ends."""

    lives: Sequence[Life]
    changes: Sequence[int]
    operators: frozenset[Any]


@final
class _Known(weakref.ref[Storage]):
    """Reference to a storage, with its life; None: it has no bytes."""

    __slots__ = ("key", "life")

    key: int
    """The storage's ``id``, which another one may get when it is freed."""
    life: Life | None


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
        self.listeners: list[Callable[[Any, Any, Any, Any], None]] = []
        """Called with each operator, its arguments by position and by name, and its result."""
        self._operators: set[Any] = set()
        self.peak_bytes = 0
        self.peak_moment = 0
        self.peak_place = self.places.here
        self._in_use = 0
        self._known: dict[int, _Known] = {}
        """The known storages by their ``id``. One reference each: a weak dictionary would make two for every look."""
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
        keys = dict.fromkeys(id(storage) for tensor in tensors for storage in _storages(tensor))
        for key in keys:
            known = self._known.get(key)
            if known is not None and known.life is not None:
                yield known.life

    def life_of(self, tensor: Tensor) -> Life | None:
        """Storage of a tensor; None if no operator returned it, or it has no bytes."""
        return next(self.of([tensor]), None)

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
            lives[change] = self._begin(allocation.nbytes, allocation.made_as, of_weights=allocation.of_weights)
        return [lives[number] for number in range(len(allocations))]

    def attach(self, storage: Storage, life: Life) -> None:
        """Let a life that has begun end with a storage."""
        self._know(storage).life = life

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
        return bool(self._off_device) and self._off_device.issuperset(_storages(tensor))

    def alive(self, moment: int) -> Iterator[Life]:
        """Yield the storages in use at a moment."""
        return (life for life in self.lives if life.alive(moment))

    def __enter__(self) -> Recorder:
        """Start recording."""
        self._fake = fake_mode()
        self._resizes = resizes_told(self._resized)
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
            for listener in self.listeners:
                listener(func, args, kwargs, result)
        return result

    def _note_result(self, tensor: Tensor, func: Any, made_of: _MadeOf) -> None:
        """Begin the lives of a result's storages that are not known, and note new sizes of those that are."""
        storages = _storages(tensor)
        if account().in_host_memory and not self._off_device.issuperset(storages):
            new_storages = set(storages) - self._off_device
            self._off_device |= new_storages
            self.off_device[self.places.here] += sum(storage.nbytes() for storage in new_storages)
        if self.is_off_device(tensor) or self._is_view_of_unknown(storages, func):
            return
        for storage in storages:
            known = self._known.get(id(storage))
            if known is not None:
                self._note_size(storage, known)
            else:
                made_as = func, tensor.dtype, tensor.shape
                self._know(storage).life = self._begin_with(storage, made_as, of_weights=made_of.weights)

    def _is_view_of_unknown(self, storages: Collection[Storage], func: Any) -> bool:
        """Whether a tensor is in memory that no operator returned: a backend allocated it, as gloo does."""
        is_view = getattr(func, "is_view", False) and func is not torch.ops.aten.lift_fresh.default
        return is_view and not any(id(storage) in self._known for storage in storages)

    def _resized(self, storage: Storage) -> None:
        """Note the size of a storage, if it is known."""
        known = self._known.get(id(storage))
        if known is not None:
            self._note_size(storage, known)

    def _note_size(self, storage: Storage, known: _Known) -> None:
        """End the life of a known storage if it has another size now, and begin another one."""
        known_nbytes = 0 if known.life is None else known.life.nbytes
        if storage.nbytes() == known_nbytes:
            return
        if known.life is not None:
            self._end(known.life)
        known.life = self._begin_with(storage, (), of_weights=False)

    def _know(self, storage: Storage) -> _Known:
        """Reference to a storage that is known from now on until it is freed, which ends its life."""
        known = _Known(storage, self._freed)
        known.key = id(storage)
        self._known[known.key] = known
        return known

    def _freed(self, known: _Known) -> None:
        del self._known[known.key]
        if known.life is not None:
            self._end(known.life)

    def _begin_with(self, storage: Storage, made_as: Sequence[Any], *, of_weights: bool) -> Life | None:
        """Life of a storage that begins now; None if it has no bytes."""
        nbytes = storage.nbytes()
        return self._begin(nbytes, made_as, of_weights=of_weights) if nbytes else None

    def _begin(self, nbytes: int, made_as: Sequence[Any], *, of_weights: bool) -> Life:
        """A life that begins now."""
        self.now += 1
        life = Life(
            nbytes=nbytes,
            began=self.now,
            made_in=self.places.here,
            made_as=made_as,
            of_weights=of_weights,
            kind=OPERANDS if account().made_for_step else None,
        )
        self.lives.append(life)
        self._in_use += nbytes
        if self._in_use > self.peak_bytes:
            self.peak_bytes = self._in_use
            self.peak_moment = self.now
            self.peak_place = life.made_in
        return life

    def _end(self, life: Life) -> None:
        """End a life."""
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


def _storages(tensor: Tensor) -> Collection[Storage]:
    """Storages of a tensor, or of the tensors that a subclass wraps."""
    if type(tensor) is FakeTensor or not is_traceable_wrapper_subclass(tensor):
        return (tensor.untyped_storage(),)
    names, _ = tensor.__tensor_flatten__()
    return {storage for name in names for storage in _storages(getattr(tensor, name))}
