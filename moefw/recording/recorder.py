"""Record of every storage of a step, from allocation to end, by PyTorch's memory tracker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.mem_tracker import MemTracker, _UpdateType
from torch.utils._pytree import tree_leaves

from moefw.recording.places import Place, Places
from moefw.runtime.memory.host import is_host_memory

FOREVER: Final = 1 << 62
GATHERED: Final = "gathered"
PARAMETERS: Final = "parameters"
WEIGHTS: Final = (PARAMETERS, GATHERED)
"""Kinds of storages that hold parameters."""
_DEVICE: Final = torch.ops.prim.device.default


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
    given_to: Place | None = None
    kind: str | None = None
    """Label, such as ``parameters``; None: no label."""

    def alive(self, moment: int) -> bool:
        """Return whether the storage is in use at ``moment``."""
        return self.began <= moment < self.ended


@final
class Recorder(MemTracker):
    """PyTorch's memory tracker, which also records when and where each storage is allocated and freed.

    ``off_device``: bytes of host memory by place. ``now``: the number of changes so far. Statistics by module are left
    out: their cost grows with operators times modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places = Places(saved=self._saved, given=self._given)
        self._mod_tracker: Any = _NoModules(self.places)
        self.lives: list[Life] = []
        self.now = 0
        self.off_device: Counter[Place] = Counter()
        self._off_device: set[Any] = set()
        self.peak_bytes = self.peak_moment = 0
        self.peak_place = self.places.here
        self.operators: set[str] = set()
        self._current: dict[Any, Life] = {}
        self._running: tuple[Any, Any] = (None, ())
        self._result: Tensor | None = None

    def start(self) -> None:
        """Reset the peak."""
        self._peak_mem.clear()
        self._peak_mem_snap.clear()
        self.peak_bytes = 0

    def of(self, tensors: Iterable[Tensor]) -> Iterator[Life]:
        """Yield the storages of tensors, each once."""
        found = dict.fromkeys(storage for tensor in tensors for storage in get_untyped_storages(tensor))
        for storage in found:
            winfo, _ = self._WINFO.get(storage, (None, None))
            if winfo in self._current:
                yield self._current[winfo]

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Label the storages of tensors."""
        for life in self.of(tensors):
            life.kind = kind

    def is_off_device(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in host memory."""
        return get_untyped_storages(tensor) <= self._off_device

    def alive(self, moment: int) -> Iterator[Life]:
        """Yield the storages in use at a moment."""
        return (life for life in self.lives if life.alive(moment))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and track what it returns."""
        if func is _DEVICE:  # asked of a fake tensor several times an operator
            return func(*args)
        before, self._running = self._running, (func, (args, kwargs))
        self.operators.add(str(func))
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        finally:
            self._running = before

    def _track(self, reftype: Any, t: Tensor) -> None:
        storages = get_untyped_storages(t)
        if is_host_memory() and not storages <= self._off_device:
            made = storages - self._off_device
            self._off_device |= made
            self.off_device[self.places.here] += sum(storage.nbytes() for storage in made)
        if storages <= self._off_device or self._is_view_of_unknown(storages):
            return
        self._result = t
        super()._track(reftype, t)
        self._result = None

    def _is_view_of_unknown(self, storages: set[Any]) -> bool:
        """Return whether a tensor is in memory that no operator returned: a backend allocated it, as gloo does."""
        func = self._running[0]
        is_view = getattr(func, "is_view", False) and func is not torch.ops.aten.lift_fresh.default
        return is_view and not any(storage in self._WINFO for storage in storages)

    def _update_snap(self, u_type: Any, winfo: Any, *args: Any, **kwargs: Any) -> None:
        super()._update_snap(u_type, winfo, *args, **kwargs)
        if u_type is _UpdateType.REF:
            return
        self.now += 1
        ended = self._current.pop(winfo, None)
        if ended is not None:
            ended.ended = self.now
        if u_type is not _UpdateType.DEL and winfo.mem_consumed:
            self._current[winfo] = life = self._life(winfo.mem_consumed)
            self.lives.append(life)

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        peak = max(self._peak_mem.values(), default=0)
        if peak > self.peak_bytes:
            self.peak_bytes, self.peak_moment, self.peak_place = peak, self.now, self.places.here

    def _life(self, nbytes: int) -> Life:
        func, arguments = self._running
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        result = self._result
        shape = "" if result is None else f" {str(result.dtype).removeprefix('torch.')}{list(result.shape)}"
        sources = list(self.of(tensors))
        of_weights = bool(sources) and all(life.of_weights or life.kind in WEIGHTS for life in sources)
        return Life(nbytes, self.now, self.places.here, f"{func}{shape}", of_weights)

    def _saved(self, tensor: Tensor, place: Place) -> None:
        for life in self.of([tensor]):
            life.saved_in = life.saved_in or place

    def _given(self, tensor: Tensor, place: Place) -> None:
        for life in self.of([tensor]):
            life.given_to = life.given_to or place


class _NoModules:
    """Replacement of PyTorch's tracker of modules, which only knows whether backward runs."""

    parents: Final = frozenset({"Global"})

    def __init__(self, places: Places) -> None:
        self._places = places

    @property
    def is_bw(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def register_user_hooks(self, *hooks: Any) -> None:
        """Do nothing."""

    def clear_user_hooks(self) -> None:
        """Do nothing."""

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *error: Any) -> None:
        """Do nothing."""
