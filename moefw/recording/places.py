"""Where a step is: its phase, and the innermost region of a layer, in backward too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, final

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

OUTSIDE: Final = "outside"
"""What lies in no region: embedding, head and loss, or the optimizer."""
_BUILD: Final = "build"


@frozen
class Place:
    """A moment of a step. ``layer`` is None outside of every region."""

    phase: str
    """``forward``, ``backward``, ``gradients`` or ``optimizer``; ``build`` is before the step."""
    region: str = OUTSIDE
    layer: int | None = None

    def __str__(self) -> str:
        where = self.region if self.layer is None else f"{self.region} of layer {self.layer}"
        return f"{self.phase}, {where}"


Seen = Callable[[Tensor, Place], None]
"""Is told of a tensor, and where it was seen."""


@final
class Places:
    """Follows a step through its phases and through the regions that :meth:`inside` and :meth:`around` are given.

    ``saved`` is told what autograd saves in forward, ``given`` what a region with a memory policy is given there.
    """

    def __init__(self, *, saved: Seen, given: Seen) -> None:
        self._saved, self._given = saved, given
        self._phase = _BUILD
        self._inside: list[Place] = []
        self._numbers: list[int] = []
        self._regions: list[Place] = []

    @property
    def here(self) -> Place:
        """Where the step is now; in backward, where forward made the node that runs."""
        if self._inside:
            return evolve(self._inside[-1], phase=self._phase)
        if self._phase == "backward":
            return evolve(self._of_node(), phase=self._phase)
        return Place(self._phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in a phase. In ``forward``, what autograd saves is told."""
        before, self._phase = self._phase, name
        try:
            with ExitStack() as stack:
                if name == "forward":
                    stack.enter_context(self._hooks())
                yield
        finally:
            self._phase = before

    def inside(self, region: str, layer: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a region, followed."""
        return self._marked(function, Place(_BUILD, region, layer))

    def around(self, region: str, layer: int, treated: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a region under its memory policy, followed; what it is given is told."""
        place = Place(_BUILD, region, layer)

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._phase == "forward":
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor):
                        self._given(leaf, evolve(place, phase=self._phase))
            return treated(*args, **kwargs)

        return self._marked(called, place)

    def _marked(self, function: Callable[..., Any], place: Place) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(place)
            self._moved()
            try:
                with ExitStack() as stack:
                    if self._phase == "forward":
                        stack.enter_context(self._hooks())
                    return function(*args, **kwargs)
            finally:
                self._inside.pop()
                self._moved()

        return inside

    def _hooks(self) -> Any:
        """Return hooks that tell of a tensor and leave it to the hooks that are in force: they would not stack."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            return saved_tensors_hooks(_Tells(self, _as_it_is), _unpacked)
        pack, unpack = outer
        return ExitStack() if isinstance(pack, _Tells) else saved_tensors_hooks(_Tells(self, pack), unpack)

    def tell_saved(self, tensor: Tensor) -> None:
        """Tell that autograd saves a tensor here."""
        self._saved(tensor, self.here)

    def _moved(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._regions.append(self._inside[-1] if self._inside else Place(_BUILD))

    def _of_node(self) -> Place:
        node = torch._C._current_autograd_node()
        if node is None or not self._numbers:
            return Place(_BUILD)
        before = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._regions[before] if before >= 0 else Place(_BUILD)


@final
class _Tells:
    """Packs a saved tensor as ``pack`` does, and tells of it."""

    def __init__(self, places: Places, pack: Callable[[Tensor], Any]) -> None:
        self._places, self._pack = places, pack

    def __call__(self, tensor: Tensor) -> Any:
        self._places.tell_saved(tensor)
        return self._pack(tensor)


def _as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph: a result that holds on to its own graph would never be freed."""
    return tensor.detach() if tensor.requires_grad else tensor


def _unpacked(tensor: Tensor) -> Tensor:
    return tensor
