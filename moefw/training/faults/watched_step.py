"""A step under watch: every activation and every gradient is checked as it is computed.

Steps are deterministic, so a bad step is bad again at the same place. The hooks of modules and tensors change no value
and exist only during a watch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, Self, final

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moefw.core.contracts import ExpertGemm
from moefw.core.records import Action, Canonical
from moefw.core.stages import ExpertBatch, Routing
from moefw.runtime.memory.dropped import in_backward
from moefw.runtime.naming import by_parameter
from moefw.runtime.parallel.local_shards import is_shared_out
from moefw.runtime.pipeline.stage import Pipelined
from moefw.training.faults.bad_values import BadTensor, bad_pieces, bad_values

_FORWARD = 0
_BACKWARD = 1


@frozen(eq=False)
class _Place:
    """One side of a module. Rows of routed experts form groups that end at ``ends``; rows after these are undefined."""

    path: str
    side: Literal["input", "output"]
    order: int
    experts: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    num_rows: int = -1

    def bad(self, tensor: Tensor) -> Iterator[tuple[str, str]]:
        """Yield the name and the bad values of a tensor of this place, or of each expert's rows if it holds rows."""
        if not tensor.dim() or len(tensor) != self.num_rows:
            yield f"the {self.side} of {self.path or 'the model'}", bad_values(tensor)
            return
        start = 0
        for expert, end in zip(self.experts, self.ends, strict=True):
            yield f"the {self.side} of expert {expert} of {self.path}", bad_values(tensor[start:end])
            start = end


@final
class StepWatch:
    """Watches the steps that run while it is open; a context manager. ``num_batches``: micro-batches of a step.

    Modules inside routed experts are not checked, as it depends on the rank which of them run.
    """

    def __init__(self, model: nn.Module, num_batches: int) -> None:
        self._model = model
        self._num_batches = num_batches
        pieces = dict(by_parameter(model))
        self._pieces = {name: pieces[parameter] for name, parameter in model.named_parameters()}
        self._calls = 0
        self._orders: dict[tuple[str, str], int] = {}
        self._weights: set[nn.Parameter] = set()
        self._found: BadTensor | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        inner = {part for gemm in self._model.modules() if isinstance(gemm, ExpertGemm) for part in _inside(gemm)}
        for path, module in self._model.named_modules():
            if module not in inner:
                enter = partial(self._enter, path)
                leave = partial(self._leave, path)
                self._hold(module.register_forward_pre_hook(enter, with_kwargs=True))
                self._hold(module.register_forward_hook(leave, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @torch.no_grad()
    def first(self) -> BadTensor | None:
        """First bad tensor on this rank, with the summed gradients checked last; None if there is none."""
        return self._found or next(self._bad_gradients(), None)

    def _bad_gradients(self) -> Iterator[BadTensor]:
        for number, (parameter, pieces) in enumerate(by_parameter(self._model)):
            if parameter.grad is not None:
                for name, values in bad_pieces(parameter.grad, pieces):
                    order = (self._num_batches, _BACKWARD, number)
                    yield BadTensor(order, f"the gradient of {name}, added up over the step, holds {values}")

    def _hold(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls += not path
        self._watch(self._place(path, "input", module, args), (args, kwargs))
        self._watch_weights(path, module)

    def _leave(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if isinstance(out, Routing):  # its scores are not checked, as they may be -inf
            out = (out.weights_TK, dict(out.stats), dict(out.aux_losses))
        self._watch(self._place(path, "output", module, args), out)

    def _place(self, path: str, side: Literal["input", "output"], module: nn.Module, args: tuple[Any, ...]) -> _Place:
        place = partial(_Place, path, side, self._orders.setdefault((path, side), len(self._orders)))
        batch = args[0] if args else None
        if not (isinstance(module, ExpertGemm) and isinstance(batch, ExpertBatch)):
            return place()
        experts = tuple(dict.fromkeys(piece.name.split(".", 1)[0] for piece in module.canonical()))
        return place(experts, tuple(batch.offsets_e.tolist()), len(batch.rows_RD))

    def _watch(self, place: _Place, values: Any) -> None:
        """Check the tensors of a place now, and their gradients in backward.

        Tensors that a memory policy recomputes in backward were checked in forward.
        """
        for tensor in tree_leaves(values):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            if not in_backward():
                self._note((_FORWARD, place.order), "forward", "", place.bad(tensor.detach()))
            if tensor.requires_grad:
                self._hold(tensor.register_hook(partial(self._watch_gradient, place)))

    def _watch_gradient(self, place: _Place, gradient: Tensor) -> None:
        self._note((_BACKWARD, -place.order), "backward", "the gradient of ", place.bad(gradient))

    def _watch_weights(self, path: str, module: nn.Module) -> None:
        """Check the gradients of unsharded weights as they are computed, before ranks sum them."""
        for key, weight in module.named_parameters():
            name = f"{path}.{key}" if path else key
            if weight.requires_grad and weight not in self._weights and not is_shared_out(weight):
                self._weights.add(weight)
                self._hold(weight.register_hook(partial(self._watch_weight, name, self._pieces[name])))

    def _watch_weight(self, name: str, pieces: list[Canonical], gradient: Tensor | None) -> None:
        if gradient is None:  # it is left to a pass of its own
            return
        order = (_BACKWARD, -self._owner(name) - 0.5)
        self._note(order, "backward", "the gradient of ", bad_pieces(gradient, pieces))

    def _owner(self, name: str) -> int:
        """Order of the innermost watched module that has run and holds a parameter."""
        while name:
            name = name.rpartition(".")[0]
            if (name, "input") in self._orders:
                return self._orders[name, "input"]
        raise AssertionError("the model itself has run")

    def _note(self, order: tuple[int, float], when: str, what: str, named_values: Iterator[tuple[str, str]]) -> None:
        playing: Action | None = self._model.link.playing if isinstance(self._model, Pipelined) else None
        batch = playing.micro_batch if playing else (self._calls - 1) % self._num_batches
        stage = playing.stage if playing else 0
        direction, place_order = order
        at = (batch, direction, stage if direction == _FORWARD else -stage, place_order)
        for name, values in named_values:
            if values and (self._found is None or at < self._found.order):
                place = f"{what}{name}, in {when} of micro-batch {batch + 1} of {self._num_batches},"
                self._found = BadTensor(at, f"{place} holds {values}")


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if part is not module)
