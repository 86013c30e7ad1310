"""One call of a region that can be made again: for what it saved, and for what it returned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Never, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moefw.core.errors import ContractError
from moefw.plugins.memory.recompute.arguments import Arguments
from moefw.runtime.memory.dropped import Output, current, inside, stay


class Call(ABC):
    """What a call returned is computed again when it is first asked for, and held until the call's own backward."""

    _returned: Sequence[Tensor] | None = None

    def returned(self, result: Any) -> Any:
        """Return ``result`` as it is; nobody need save the tensors in it whose gradients are wanted."""
        leaves, structure = tree_flatten(result)
        self.places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if self.places:
            tensors = _Return.apply(self, *(leaves[at] for at in self.places))  # type: ignore[no-untyped-call]
            for at, tensor in zip(self.places, tensors, strict=True):
                leaves[at] = tensor
        return tree_unflatten(leaves, structure)

    def want(self) -> None:
        """Be told that somebody will ask for an output."""

    def output(self, index: int) -> Tensor:
        """Return what the call returned as number ``index``."""
        if self._returned is None:
            self.hold(self.again())
        assert self._returned is not None
        return self._returned[index]

    def hold(self, result: Any) -> None:
        """Keep what was returned once more, for everybody who will ask."""
        leaves = tree_leaves(result)
        self._returned = [leaves[at].detach() for at in self.places]

    def forget(self) -> None:
        """Let go of what was returned: everybody who saved it has had it."""
        self._returned = None

    @abstractmethod
    def again(self) -> Any:
        """Return the call's result once more."""


@final
class Run(Call):
    """A function that is run again, no further than to the last tensor that is wanted."""

    def __init__(self, region: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._region, self._function, self._arguments = region, function, Arguments(args, kwargs)
        self._scope = current()
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._found: dict[int, Tensor] = {}
        self._wanted = False

    def result(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function for the first time, dropping what it saves."""
        with saved_tensors_hooks(self._drop, self._find):
            result = self._function(*args, **kwargs)
        return self.returned(result)

    def want(self) -> None:
        """Be told that the function must be run to its end."""
        self._wanted = True

    def again(self) -> Any:
        """Run the function to its end, and hold what it saves."""
        args, kwargs = self._arguments.again()
        found: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            found.append(stay(tensor))
            if len(found) == len(self._saved) and not self._wanted:
                raise _EnoughError

        try:
            with torch.enable_grad(), inside(self._scope), saved_tensors_hooks(collect, _never):
                result = self._function(*args, **kwargs)
        except _EnoughError:
            result = None
        if [(tensor.shape, tensor.dtype) for tensor in found] != self._saved:
            what = f"memory policy recompute: the region {self._region!r} saves other tensors when it is run again."
            raise ContractError(what, "What a recomputed region does may depend on nothing but what it is given.")
        self._found = dict(enumerate(found))
        return result

    def _drop(self, tensor: Tensor) -> int:
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def _find(self, index: int) -> Tensor:
        if index not in self._found:
            result = self.again()
            if self._wanted:
                self.hold(result)
        return self._found.pop(index)


@final
class Movement(Call):
    """A movement of rows that is repeated; its metadata is in ``handle``."""

    def __init__(self, again: Callable[..., Any], handle: Any, args: Sequence[Any]) -> None:
        self._again, self._handle, self._arguments = again, handle, Arguments(args, {})

    def again(self) -> Any:
        """Return what the movement brings."""
        args, _ = self._arguments.again()
        with torch.no_grad():
            return self._again(self._handle, *args)


class _EnoughError(Exception):
    """Everything that is wanted has been found."""


def _never(packed: None) -> Never:
    raise AssertionError("nobody goes backward through a region that runs again")


class _Return(torch.autograd.Function):
    """Passes on what a call returns. Its backward comes after that of everybody who saved any of it.

    The call is let go of then: what it was given must not wait for the whole graph to die.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.outputs = call, [Output(tensor, call, index) for index, tensor in enumerate(tensors)]
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.call is not None:
            ctx.call.forget()
        ctx.call, ctx.outputs = None, ()
        return (None, *grads)
