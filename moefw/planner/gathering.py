"""FSDP2's buffers without FSDP2: units of parameters that allocate and free as ``fully_shard`` does, on one rank alone.

Modules compute with parameters in the form in which FSDP gathers them. An all-gather fills one flat buffer, from which
each parameter is copied to its place. In forward, that buffer stays until the next copy. In backward, the next unit is
gathered ahead, and the input of a reduction stays until the next reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeVar, final

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from moefw.core.contracts import Layout, WeightCodec
from moefw.core.records import Side
from moefw.planner.operations import Operations
from moefw.recording.recorder import GATHERED, GRADIENTS, PARAMETERS, Recorder
from moefw.runtime.compute.for_step import done_for_step, made_for_step
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.runtime.memory.dropped import in_backward
from moefw.runtime.parallel.pieces import even_dim
from moefw.runtime.parallel.primary_weights import GatheredWeight

M = TypeVar("M", bound=nn.Module)


@final
class Gathering:
    """Takes the place of :class:`moefw.runtime.parallel.sharding.Sharding`.

    ``shards``: the shape of this rank's shard of each parameter. ``operations`` is told FSDP's collectives and copies.
    ``reduced``: when gradients are reduced: after the backward of their unit in each micro-batch, or in the last one of
    a step, or after the last pass of a pipeline. Until then parameters have gradients in fp32.
    """

    def __init__(self, layout: Layout, recorder: Recorder, operations: Operations, reduced: Reduced) -> None:
        self.layout, self.recorder, self.operations, self.reduced = layout, recorder, operations, reduced
        self.units: list[Unit] = []
        self.root_unit: Unit | None = None
        self.shards: dict[nn.Parameter, tuple[int, ...]] = {}
        self._adding_up = ExitStack()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Enter the block in which parameters may be gathered."""
        with self._adding_up:
            yield

    def add_up(self, gathered: nn.Parameter, stored: nn.Parameter) -> None:
        """Let micro-batches add up the gradients of a gathered parameter, if that is not reduced after each."""
        if self.reduced != "micro_batch":
            gathered.grad_dtype = torch.float32
            gathered.grad, stored.grad = stored.grad, None
            self._adding_up.enter_context(shared_by_micro_batches((), gathered={gathered: gathered}))

    def give_gradients(self) -> None:
        """Give all parameters the gradients of earlier micro-batches."""
        for unit in self.units:
            unit.give_gradients(sharded=self.reduced == "micro_batch")

    def unit(
        self,
        module: M,
        side: Side,
        *,
        dtype: torch.dtype | None = None,
        codec: WeightCodec | None = None,
        name: str = "",
        apart: Set[nn.Parameter] = frozenset(),
    ) -> M:
        """Make the module's parameters a unit, except those of inner units and ``apart``. Return the module."""
        unit = self._unit(module, side, dtype, codec, name, apart)
        if unit is not None:
            module.register_forward_pre_hook(unit.before, prepend=True)
            module.register_forward_hook(unit.after)
        return module

    def root(self, model: M, apart: Set[nn.Parameter]) -> M:
        """Make all parameters outside units one more unit, ``root_unit``, around the calls of all others."""
        self.root_unit = self._unit(model, "dense", None, None, "", apart)
        if self.root_unit is not None:
            for unit in self.units:
                unit.order = self.root_unit.order
        return model

    def _unit(
        self,
        module: nn.Module,
        side: Side,
        dtype: torch.dtype | None,
        codec: WeightCodec | None,
        name: str,
        apart: Set[nn.Parameter],
    ) -> Unit | None:
        rows = self.layout.plan.copies(self.layout.rank, side)
        if len(rows[0]) == 1:
            return None
        unit = Unit(self, rows)
        for path, owner in module.named_modules():
            for key, parameter in [*owner.named_parameters(recurse=False)]:
                if parameter in apart or parameter in self.shards:
                    continue
                encode = codec if parameter.ndim > 1 else None
                if encode is not None:
                    encode.require(".".join(filter(None, (name, path, key))), parameter.shape, unit.shards)
                self.shards[parameter] = unit.add(_Sharded(owner, key, parameter, dtype, encode))
        self.units.append(unit)
        return unit


@final
class _Order:
    """State that the units under one root share.

    ``forward``: the units in the order of forward. ``gathered``: the buffer of the last all-gather. ``reduced``: the
    input of the last reduction.
    """

    def __init__(self, root: Unit) -> None:
        self.root = root
        self.forward: list[Unit] = []
        self.gathered: Tensor | None = None
        self.reduced: Tensor | None = None


@frozen(eq=False)
class _Sharded:
    """A parameter of a module, and the dtype or codec in which it is gathered."""

    owner: nn.Module
    key: str
    parameter: nn.Parameter
    dtype: torch.dtype | None
    codec: WeightCodec | None


State = Literal["idle", "forward", "backward", "done"]
Reduced = Literal["micro_batch", "step", "pipeline"]


@final
class Unit:
    """Parameters that are gathered together over the ranks of a row; each of the ``rows`` holds the same.

    ``sharing``: the ranks of this row. ``copying``: those that hold the same shard. ``elements``: of all, padded.
    ``grads``: the gradients of this rank's shard, fp32.
    """

    def __init__(self, sharding: Gathering, rows: Sequence[Sequence[int]]) -> None:
        self.sharding, self.shards = sharding, len(rows[0])
        self.sharing, self.copying = rows[0], [row[0] for row in rows]
        self.order = _Order(self)
        self.parameters: list[nn.Parameter] = []
        self.elements = 0
        self.grads: Tensor | None = None
        self._given: list[_Sharded] = []
        self._nbytes = 0
        self._reordered = 0
        """Bytes of parameters that are not sharded along their first dimension: gathered chunks are concatenated."""
        self._cast = 0
        """Bytes of this rank's shard that are cast for each gather."""
        self._encoded = 0
        """Bytes of the codes and scales of this rank's shard, which are made once a step."""
        self._codes: Tensor | None = None
        self._state: State = "idle"
        self._places: Tensor | None = None
        self._ahead: Tensor | None = None
        self._indices: list[int] = []
        self._reduced: Tensor | None = None

    def add(self, given: _Sharded) -> tuple[int, ...]:
        """Include a parameter. Return the shape of its first shard."""
        shape = given.parameter.shape
        dim = self._dim(given)
        self._given.append(given)
        self.parameters.append(given.parameter)
        self.elements += given.parameter.numel() * self._padded(shape[0], dim) // shape[0]
        return tuple(-(-size // self.shards) if axis == dim else size for axis, size in enumerate(shape))

    def _dim(self, given: _Sharded) -> int:
        return 0 if given.codec is not None else even_dim(given.parameter.shape, self.shards)

    def _padded(self, rows: int, dim: int) -> int:
        return rows if dim else -(-rows // self.shards) * self.shards

    def _become_gathered(self) -> None:
        """Give the modules their parameters as they are gathered, once. Units that do not run stay as they are."""
        given, self._given = self._given, []
        self.parameters = [self._gathered(one) for one in given] or self.parameters

    def _gathered(self, given: _Sharded) -> nn.Parameter:
        value, dim = given.parameter.detach(), self._dim(given)
        if given.codec is not None:
            parts = given.codec.encode(value)
            value, nbytes = GatheredWeight(parts, given.codec.rows), sum(part.nbytes for part in parts)
        else:
            value = torch.empty_like(value, dtype=given.dtype or value.dtype)
            nbytes = value.nbytes
        self._nbytes += nbytes * self._padded(len(value), dim) // len(value)
        self._reordered += nbytes if dim else 0
        if given.codec is not None:
            self._encoded += nbytes // self.shards
        elif value.dtype != given.parameter.dtype:
            self._cast += nbytes // self.shards
        made = nn.Parameter(value)
        setattr(given.owner, given.key, made)
        self.sharding.shards[made] = self.sharding.shards.pop(given.parameter)
        self.sharding.recorder.label(made.parts if isinstance(made, GatheredWeight) else [made], PARAMETERS)
        self.sharding.add_up(made, given.parameter)
        return made

    def before(self, module: nn.Module | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gather, before the forward of the module."""
        self._become_gathered()
        if self._state == "backward":
            self._gather(in_forward=False)
            return args
        self._state = "forward"
        self._gather(in_forward=True)
        leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not leaves or not torch.is_grad_enabled():
            return args
        passed = dict(zip(map(id, leaves), _After.apply(self, *leaves), strict=True))  # type: ignore[no-untyped-call]
        given: tuple[Any, ...] = tree_map_only(Tensor, lambda leaf: passed.get(id(leaf), leaf), args)
        return given

    def after(self, module: nn.Module | None, args: Any, outputs: Any) -> None:
        """Free the parameters, after the forward of the module."""
        if self._state == "backward":
            return
        again = in_backward()
        if not again:
            self._places = None
            self._indices.append(len(self.order.forward))
            self.order.forward.append(self)
        self._state = "idle"
        if again or self.order.root is self:  # FSDP takes a unit that runs again in backward for a root
            self.order.gathered = None
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward)

    def reduce(self) -> None:
        """Free the parameters, after the backward of the module, and reduce their gradients, if it is time."""
        self._state, self._places = "done", None
        if self.sharding.reduced == "micro_batch":
            self._reduce()
        elif self.sharding.reduced == "step":
            self.reduce_once()

    def reduce_once(self) -> None:
        """Reduce the gradients that the micro-batches of a step added up."""
        with done_for_step():
            self._reduce()

    def give_gradients(self, *, sharded: bool) -> None:
        """Have gradients of earlier micro-batches: of this rank's shard, or of the parameters."""
        if sharded:
            self.grads = torch.empty(self.elements // self.shards)
            return
        for parameter in self.parameters:
            parameter.grad = torch.empty(parameter.shape)
            self.sharding.recorder.label([parameter.grad], GRADIENTS)

    def _reduce(self) -> None:
        given = [parameter for parameter in self.parameters if parameter.grad is not None]
        if not given:
            return
        self.order.reduced = self._reduced = None
        grads: list[Any] = [parameter.grad for parameter in given]
        for parameter in given:
            parameter.grad = None
        for at in range(len(grads)):
            if even_dim(grads[at].shape, self.shards):
                grads[at] = torch.empty_like(grads[at])
                self.sharding.operations.moved(2 * grads[at].nbytes)
        self.order.reduced = torch.empty(self.elements)
        self.sharding.operations.moved(sum(grad.nbytes for grad in grads) + self.order.reduced.nbytes)
        grads.clear()
        reduced = torch.empty(self.elements // self.shards)
        self.sharding.operations.sent_to_all("reduce-scatter", self.sharing, reduced.nbytes)
        if len(self.copying) > 1:
            self._reduced = reduced
            self.sharding.operations.sent_to_all("all-reduce", self.copying, reduced.nbytes)
        if self.grads is None:
            self.grads = reduced
        else:
            self.sharding.operations.moved(3 * reduced.nbytes)

    def end(self) -> None:
        """End the backward of the model."""
        if self._state != "done":
            self.reduce()
        self._state = "idle"
        self._indices.clear()
        self._reduced = self.order.reduced = None
        self.order.forward.clear()

    def _backward(self, grad: Tensor) -> None:
        if self._state == "backward":
            return
        self._state = "backward"
        self._gather(in_forward=False)
        if self._indices and (index := self._indices.pop()):
            target = self.order.forward[index - 1]
            if target._places is None and target._ahead is None:
                target._ahead = target._all_gather()

    def _gather(self, *, in_forward: bool) -> None:
        if self._places is not None:
            return
        arrived, self._ahead = self._all_gather() if self._ahead is None else self._ahead, None
        if in_forward:
            self.order.gathered = None
        self._places = self._buffer(self._nbytes)
        self._buffer(self._reordered)
        self.sharding.operations.moved(2 * (self._nbytes + self._reordered))
        if in_forward:
            self.order.gathered = arrived

    def _all_gather(self) -> Tensor:
        if self._codes is None:
            with made_for_step():
                self._codes = torch.empty(self._encoded, dtype=torch.uint8)
                self.sharding.operations.moved(3 * self._encoded)
        cast = self._buffer(self._cast)
        arrived = self._buffer(self._nbytes)
        sent = self._nbytes // self.shards
        self.sharding.operations.moved(2 * sent + 3 * self._cast)
        self.sharding.operations.sent_to_all("all-gather", self.sharing, sent)
        del cast
        return arrived

    def _buffer(self, nbytes: int) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.sharding.recorder.label([buffer], GATHERED)
        return buffer


class _After(torch.autograd.Function):
    """Reduces the gradients of a unit when those of its inputs are there."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.unit.reduce()
        return (None, *grads)
