"""The place of a step at any time: its phase and the innermost region of a layer, also in backward."""

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
"""The place outside all regions: embedding, head and loss, or the optimizer."""
_BUILD: Final = "build"


@frozen
class Place:
    """A place in a step. ``layer`` is None outside of all regions."""

    phase: str
    """``forward``, ``backward``, ``gradients`` or ``optimizer``; ``build`` is before the step."""
    region: str = OUTSIDE
    layer: int | None = None

    def __str__(self) -> str:
        where = self.region if self.layer is None else f"{self.region} of layer {self.layer}"
        return f"{self.phase}, {where}"


Seen = Callable[[Tensor, Place], None]
"""Called with a tensor and the place where it was seen."""


@final
class Places:
    """Follows a step through its phases and the regions whose functions :meth:`inside` and :meth:`around` wrap.

    ``saved`` is called for each tensor that autograd saves in forward, ``given`` for each input of a region with a
    memory policy.
    """

    def __init__(self, *, saved: Seen, given: Seen) -> None:
        self._saved, self._given = saved, given
        self._phase = _BUILD
        self._inside: list[Place] = []
        self._numbers: list[int] = []
        self._regions: list[Place] = []

    @property
    def here(self) -> Place:
        """The place of the step now; in backward, the place where forward created the running node."""
        if self._inside:
            return evolve(self._inside[-1], phase=self._phase)
        if self._phase == "backward":
            return evolve(self._of_node(), phase=self._phase)
        return Place(self._phase)

    @property
    def runs_again(self) -> bool:
        """Whether backward runs the forward of a region again."""
        return self._phase == "backward" and bool(self._inside)

    @property
    def in_backward(self) -> bool:
        """Whether gradients are computed."""
        return self._phase == "backward" and not self._inside

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase. In ``forward``, saved tensors are reported."""
        before, self._phase = self._phase, name
        try:
            with ExitStack() as stack:
                if name == "forward":
                    stack.enter_context(self._hooks())
                yield
        finally:
            self._phase = before

    def inside(self, region: str, layer: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a region, wrapped."""
        return self._marked(function, Place(_BUILD, region, layer))

    def around(self, region: str, layer: int, treated: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a region under its memory policy, wrapped. Its inputs are reported."""
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
        """Return hooks that report a tensor and then call the hooks in force, because hooks do not stack."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            return saved_tensors_hooks(_Tells(self, _as_it_is), _unpacked)
        pack, unpack = outer
        return ExitStack() if isinstance(pack, _Tells) else saved_tensors_hooks(_Tells(self, pack), unpack)

    def tell_saved(self, tensor: Tensor) -> None:
        """Report that autograd saves a tensor here."""
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
    """Reports a saved tensor, and packs it with ``pack``."""

    def __init__(self, places: Places, pack: Callable[[Tensor], Any]) -> None:
        self._places, self._pack = places, pack

    def __call__(self, tensor: Tensor) -> Any:
        self._places.tell_saved(tensor)
        return self._pack(tensor)


def _as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph: a result that referenced its own graph would never be freed."""
    return tensor.detach() if tensor.requires_grad else tensor


def _unpacked(tensor: Tensor) -> Tensor:
    return tensor
