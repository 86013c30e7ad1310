"""The place of a step at any time: its phase and the innermost region of a layer, also in backward.

Backward runs outside of all regions, but each of its nodes was created inside one. Autograd numbers nodes as they are
created, so the number of the running node tells between which two borders of regions forward created it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Final, final

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

OUTSIDE: Final = "outside"
"""The place outside all regions: embedding, head and loss, or the optimizer."""
_BUILD: Final = "build"
_ADDS_TO_PARAMETER: Final = 2**64 - 1
"""The number of every node that adds to the gradient of a parameter, so that it runs before all others."""


@frozen(cache_hash=True)
class Place:
    """A place in a step. ``layer`` is None outside of all regions."""

    phase: str
    """``forward``, ``backward``, ``gradients`` or ``optimizer``; ``build`` is before the step."""
    region: str = OUTSIDE
    layer: int | None = None

    def __str__(self) -> str:
        where = self.region if self.layer is None else f"{self.region} of layer {self.layer}"
        return f"{self.phase}, {where}"


_NOWHERE: Final = Place(_BUILD)
"""Outside of all regions."""


@cache
def _during(phase: str, place: Place) -> Place:
    """Place in a phase. Every operator asks for it."""
    return evolve(place, phase=phase)


Seen = Callable[[Tensor, Place], None]
"""Called with a tensor and the place where it was seen."""
Entered = Callable[["Place", Sequence["Place"], tuple[Any, ...]], None]
"""Called with a place, the places around it, the innermost last, and the arguments of its region's function."""


@final
class Places:
    """Follows a step through its phases and the regions whose functions :meth:`inside` and :meth:`around` wrap.

    ``saved`` is called for each tensor that autograd saves in forward, ``policy_input`` for each input of a region with
    a memory policy.
    """

    def __init__(self, *, saved: Seen, policy_input: Seen) -> None:
        self._saved = saved
        self._policy_input = policy_input
        self.entered: Entered | None = None
        """Called before the function of a region runs in forward; None: nothing asks for it."""
        self._phase = _BUILD
        self._inside: list[Place] = []
        """The regions that are entered now, the innermost last."""
        self._delayed: Place | None = None
        """The place whose work runs now, later than its backward."""
        self._border_numbers: list[int] = []
        """At each border of a region, in order, the number that autograd gives to its next node."""
        self._border_places: list[Place] = []
        """The place behind each border."""
        self._ran_before = _NOWHERE
        """The place of the node of backward that ran last, but for those that add up gradients of parameters."""

    @property
    def here(self) -> Place:
        """The place of the step now; in backward, the place where forward created the running node."""
        if self._inside:
            place = self._inside[-1]
        elif self._delayed is not None:
            place = self._delayed
        elif self._phase == "backward":
            place = self._place_of_running_node()
        else:
            place = _NOWHERE
        return _during(self._phase, place)

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
        phase_before = self._phase
        self._phase = name
        try:
            with ExitStack() as stack:
                if name == "forward":
                    stack.enter_context(self._hooks())
                yield
        finally:
            self._phase = phase_before

    @contextmanager
    def delayed(self, place: Place) -> Iterator[None]:
        """Run work that backward has left in ``place``."""
        self._delayed = place
        try:
            yield
        finally:
            self._delayed = None

    def inside(self, region: str, layer: int | None, function: Callable[..., Any]) -> Callable[..., Any]:
        """Function of a region, wrapped. ``layer`` None: it belongs to none."""
        return self._marked(function, Place(_BUILD, region, layer))

    def around(self, region: str, layer: int, treated: Callable[..., Any]) -> Callable[..., Any]:
        """Function of a region under its memory policy, wrapped. Its inputs are reported."""
        place = Place(_BUILD, region, layer)

        def report_inputs_and_call(*args: Any, **kwargs: Any) -> Any:
            if self._phase == "forward":
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor):
                        self._policy_input(leaf, _during(self._phase, place))
            return treated(*args, **kwargs)

        return self._marked(report_inputs_and_call, place)

    def _marked(self, function: Callable[..., Any], place: Place) -> Callable[..., Any]:
        """Function, wrapped so that it runs in a place."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            if self.entered is not None and self._phase == "forward":
                self.entered(place, self._inside, args)
            self._inside.append(place)
            self._add_border()
            try:
                with ExitStack() as stack:
                    if self._phase == "forward":
                        # Again in each region: a policy around it may have entered hooks of its own meanwhile.
                        stack.enter_context(self._hooks())
                    return function(*args, **kwargs)
            finally:
                self._inside.pop()
                self._add_border()

        return inside

    def _hooks(self) -> Any:
        """Hooks that report a tensor and then call the hooks in force, because hooks do not stack."""
        hooks_in_force = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks_in_force is None:
            return saved_tensors_hooks(_ReportingPack(self, _without_graph), _unpacked)
        pack, unpack = hooks_in_force
        if isinstance(pack, _ReportingPack):
            return ExitStack()  # they report already
        return saved_tensors_hooks(_ReportingPack(self, pack), unpack)

    def tell_saved(self, tensor: Tensor) -> None:
        """Report that autograd saves a tensor here."""
        self._saved(tensor, self.here)

    def _add_border(self) -> None:
        self._border_numbers.append(torch._C._autograd._get_sequence_nr())
        self._border_places.append(self._inside[-1] if self._inside else _NOWHERE)

    def _place_of_running_node(self) -> Place:
        """Place where forward created the node that backward runs now."""
        node = torch._C._current_autograd_node()
        if node is None or not self._border_numbers:
            return _NOWHERE
        number = node._sequence_nr()
        # A node that adds to a parameter's gradient belongs to no forward. It runs at once after the one that computes
        # what it adds.
        if number != _ADDS_TO_PARAMETER:
            last_border_before = bisect_right(self._border_numbers, number) - 1
            self._ran_before = self._border_places[last_border_before] if last_border_before >= 0 else _NOWHERE
        return self._ran_before


@final
class _ReportingPack:
    """Hook that reports a saved tensor, and packs it with ``pack``."""

    def __init__(self, places: Places, pack: Callable[[Tensor], Any]) -> None:
        self._places = places
        self._pack = pack

    def __call__(self, tensor: Tensor) -> Any:
        self._places.tell_saved(tensor)
        return self._pack(tensor)


def _without_graph(tensor: Tensor) -> Tensor:
    """Tensor without its graph: a result that referenced its own graph would never be freed."""
    return tensor.detach() if tensor.requires_grad else tensor


def _unpacked(tensor: Tensor) -> Tensor:
    return tensor
