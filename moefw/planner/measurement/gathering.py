"""FSDP2's buffers without FSDP2: units of parameters that allocate and free as ``fully_shard`` does, on one rank alone.

Modules compute with parameters in the form in which FSDP gathers them. An all-gather fills one flat buffer, from which
each parameter is copied to its place. In forward, that buffer stays until the next copy. In backward, the next unit is
gathered ahead, and the input of a reduction stays until the next reduction. Units of ZeRO 1 and 2 gather in the first
micro-batch of a step alone, and what they have gathered is memory of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Literal, TypeVar, final

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from moefw.core.contracts import Layout, WeightCodec
from moefw.core.records import Side, Zero
from moefw.planner.measurement.layers import RunLayer
from moefw.planner.measurement.operations import Operations
from moefw.recording.places import Place
from moefw.recording.recorder import GATHERED, GRADIENTS, PARAMETERS, REDUCED, Recorder
from moefw.runtime.accounting import done_for_step, made_for_step
from moefw.runtime.compute.coded_share import Sharing
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.runtime.compute.primary_weights import GatheredWeight
from moefw.runtime.compute.weights import StepWeights
from moefw.runtime.memory.dropped import in_backward
from moefw.runtime.parallel.cuts import even_dim
from moefw.runtime.parallel.local_shards import may_be_codes

M = TypeVar("M", bound=nn.Module)


@final
class Gathering:
    """Takes the place of :class:`moefw.runtime.parallel.sharding.Sharding`.

    ``shards``: the shape of this rank's shard of each parameter. ``operations`` is told FSDP's collectives and
    copies. ``reduced_once``: when units of ZeRO 1 reduce gradients (:data:`Reduced`). Until then their parameters
    have gradients in ``main_dtype``. ``is_first``: whether the micro-batch is the first of its step, in which units
    of ZeRO 1 and 2 gather. ``only``: the layers that are built, if others are left out. ``cut_for``: by side, as for
    how many ranks parameters are cut, if it is not for those that share them. ``step``: the weights that micro-batches
    share, once the step has begun.
    """

    step: StepWeights

    def __init__(
        self,
        layout: Layout,
        recorder: Recorder,
        operations: Operations,
        *,
        reduced_once: Reduced,
        main_dtype: torch.dtype,
        is_first: bool,
        only: Sequence[RunLayer] | None = None,
        cut_for: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.layout = layout
        self.recorder = recorder
        self.operations = operations
        self.reduced_once = reduced_once
        self.main_dtype = main_dtype
        self.is_first = is_first
        self._only = only
        self._cut_for = cut_for
        self.units: list[Unit] = []
        self.root_unit: Unit | None = None
        self.shards: dict[nn.Parameter, tuple[int, ...]] = {}
        self._copies: dict[Side, Sequence[Sequence[int]]] = {}
        """The ranks that hold the same parameters of a side: lists of thousands, for hundreds of units."""

    def add_up(self, gathered: nn.Parameter, stored: nn.Parameter) -> None:
        """Let micro-batches add up the gradients of a gathered parameter."""
        gathered.grad_dtype = self.main_dtype
        gathered.grad = stored.grad
        stored.grad = None
        self.step.add_up(gathered, gathered)

    def give_gradients(self) -> None:
        """Give all parameters the gradients of earlier micro-batches."""
        for unit in self.units:
            unit.give_gradients()

    @property
    def keeps_root(self) -> bool:
        """Whether what the root gathers is kept for all micro-batches of a step."""
        return self.root_unit is not None and self.root_unit.is_kept

    @property
    def added_up_whole(self) -> Set[nn.Parameter]:
        """Parameters whose gradients micro-batches add up whole."""
        return {parameter for unit in self.units if unit.adds_up_whole for parameter in unit.parameters}

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
        unit = self._unit(module, side, dtype=dtype, codec=codec, name=name, apart=apart)
        if unit is not None:
            module.register_forward_pre_hook(unit.before, prepend=True)
            module.register_forward_hook(unit.after)
        return module

    def root(self, model: M, apart: Set[nn.Parameter]) -> M:
        """Make all parameters outside units one more unit, ``root_unit``, around the calls of all others.

        Those of a layer count for all layers that it stands for and that are not built.
        """
        layers: Any = model.layers if self._only else ()
        alike = {
            parameter: layer.stands_for for layer in self._only or () for parameter in layers[layer.number].parameters()
        }
        self.root_unit = self._unit(model, "dense", dtype=None, codec=None, name="", apart=apart, alike=alike)
        if self.root_unit is not None:
            for unit in self.units:
                unit.order = self.root_unit.order
        return model

    def _unit(
        self,
        module: nn.Module,
        side: Side,
        *,
        dtype: torch.dtype | None,
        codec: WeightCodec | None,
        name: str,
        apart: Set[nn.Parameter],
        alike: Mapping[nn.Parameter, int] = MappingProxyType({}),
    ) -> Unit | None:
        """Unit of the module's parameters that are in none yet, or None if no other rank shares them."""
        if side not in self._copies:
            self._copies[side] = self.layout.plan.copies(self.layout.rank, side)
        rows = self._copies[side]
        if len(rows[0]) == 1:
            return None
        unit = Unit(self, rows, self.layout.plan.zero(side), cut_for=self._cut_for.get(side, len(rows[0])))
        for path, owner in module.named_modules():
            for key, parameter in [*owner.named_parameters(recurse=False)]:
                if parameter in apart or parameter in self.shards:
                    continue
                codec_of_matrix = codec if may_be_codes(owner, parameter) else None
                if codec_of_matrix is not None:
                    full_name = ".".join(filter(None, (name, path, key)))
                    codec_of_matrix.require(full_name, parameter.shape, unit.shards)
                sharded = _Sharded(
                    owner=owner,
                    key=key,
                    parameter=parameter,
                    dtype=dtype,
                    codec=codec_of_matrix,
                    count=alike.get(parameter, 1),
                )
                self.shards[parameter] = unit.add(sharded)
        self.units.append(unit)
        return unit


@final
class _Order:
    """State that the units under one root share.

    ``forward``: the units in the order of forward. ``gathered``: the flat buffer of the last all-gather in forward,
    which FSDP keeps until the next one is copied. ``reduced``: the input of the last reduction, kept until the next.
    """

    def __init__(self, root: Unit) -> None:
        self.root = root
        self.forward: list[Unit] = []
        self.gathered: Tensor | None = None
        self.reduced: Tensor | None = None


@frozen(eq=False)
class _Sharded:
    """A parameter of a module, the dtype or codec in which it is gathered, and how many it stands for."""

    owner: nn.Module
    key: str
    parameter: nn.Parameter
    dtype: torch.dtype | None
    codec: WeightCodec | None
    count: int


State = Literal["idle", "forward", "backward", "done"]
"""``done``: its gradients have been reduced in this backward."""
Reduced = Literal["micro_batch", "step", "later"]
"""When a unit reduces gradients.

``micro_batch``: after its backward in each micro-batch. ``step``: after that in the last one of a step, which is the
recorded one. ``later``: in a micro-batch behind the recorded one, or after the last pass of a pipeline.
"""


@final
class Unit:
    """Parameters that are gathered together over the ranks of a row; each of the ``rows`` holds the same.

    ``shards``: the number of ranks that share them. ``sharing``: the ranks of this row. ``copying``: the ranks that
    hold the same shard. ``elements``: of all that train, padded. ``grads``: the gradients of this rank's shard, fp32.
    ``reduced``: when gradients are reduced. ``cut_for``: as for how many ranks they are cut.
    """

    def __init__(self, sharding: Gathering, rows: Sequence[Sequence[int]], zero: Zero, *, cut_for: int) -> None:
        self.sharding = sharding
        self._cut_for = cut_for
        self.is_kept = zero != 3
        """Whether what is gathered is kept for all micro-batches of a step."""
        self.reduced: Reduced = sharding.reduced_once if zero == 1 else "micro_batch"
        self.shards = len(rows[0])
        self.sharing = rows[0]
        self.copying = [row[0] for row in rows]
        self.order = _Order(self)
        self.parameters: list[nn.Parameter] = []
        self.elements = 0
        self.grads: Tensor | None = None
        self.gathered_bytes: dict[nn.Parameter, int] = {}
        """Bytes of each parameter as it is gathered, padded, once the unit has run; not of codes that are stored."""
        self._to_gather: list[_Sharded] = []
        """Parameters that the module still has as they are stored; none once the unit has run."""
        self._nbytes = 0
        """Bytes of all parameters as they are gathered, padded."""
        self._reordered = 0
        """Bytes of parameters that are not sharded along their first dimension: gathered chunks are concatenated."""
        self._cast = 0
        """Bytes of this rank's shard that are cast for each gather."""
        self._encoded = 0
        """Bytes of the codes and scales of this rank's shard, which are made once a step, and kept for all gathers."""
        self._codes: Tensor | None = None
        self._state: State = "idle"
        self._places: Tensor | None = None
        """Memory of the gathered parameters; None while they are freed."""
        self._ahead: Tensor | None = None
        """Flat buffer of an all-gather that the unit before in backward began."""
        self._indices: list[int] = []
        """Where in the order of forward the unit ran, once for each of its calls."""
        self._reduced: Tensor | None = None
        """The shard's gradients while they are summed over ``copying``."""
        self._ran_in: Place | None = None
        """Where the unit gathered first; None until it runs."""

    @property
    def adds_up_whole(self) -> bool:
        """Whether micro-batches add up gradients of whole parameters."""
        return self.reduced != "micro_batch"

    def add(self, sharded: _Sharded) -> tuple[int, ...]:
        """Include a parameter. Return the shape of its first shard, the largest."""
        shape = sharded.parameter.shape
        dim = self._dim(sharded)
        self._to_gather.append(sharded)
        self.parameters.append(sharded.parameter)
        if sharded.parameter.requires_grad:
            self.elements += sharded.count * (sharded.parameter.numel() * self._padded(shape[0], dim) // shape[0])
        return tuple(-(-size // self.shards) if axis == dim else size for axis, size in enumerate(shape))

    def _dim(self, sharded: _Sharded) -> int:
        """Dimension along which a parameter is sharded: the first one if a codec encodes its rows."""
        return 0 if sharded.codec is not None else even_dim(sharded.parameter.shape, self._cut_for)

    def _padded(self, rows: int, dim: int) -> int:
        """Size of the first dimension with padding: FSDP pads only along the first one."""
        return rows if dim else -(-rows // self.shards) * self.shards

    def _become_gathered(self) -> None:
        """Give the modules their parameters as they are gathered, once. Units that do not run stay as they are."""
        if not self._to_gather:
            return
        to_gather = self._to_gather
        self._to_gather = []
        self.parameters = [self._gathered(sharded) for sharded in to_gather]

    def _gathered(self, sharded: _Sharded) -> nn.Parameter:
        """Replace a parameter by one as it is gathered, and count its bytes."""
        if isinstance(sharded.parameter, CodedWeight):  # it is gathered as it is stored
            sharing = Sharing(sharded.parameter.format, sharded.parameter.shape, self.shards)
            self._nbytes += sharded.count * self.shards * sharing.bytes_of_share
            return sharded.parameter
        dim = self._dim(sharded)
        stored = sharded.parameter
        value: Tensor
        if sharded.codec is None:
            value = torch.empty_like(stored, dtype=sharded.dtype or stored.dtype)
            nbytes = value.nbytes
        else:
            parts = sharded.codec.encode(stored.detach())
            value = GatheredWeight(parts, sharded.codec.rows)
            nbytes = sum(part.nbytes for part in parts)
        padded = sharded.count * (nbytes * self._padded(len(value), dim) // len(value))
        self._nbytes += padded
        if dim > 0:
            self._reordered += sharded.count * nbytes
        if sharded.codec is not None:
            self._encoded += sharded.count * (nbytes // self.shards)
        elif value.dtype != stored.dtype:
            self._cast += sharded.count * (nbytes // self.shards)
        gathered = nn.Parameter(value, requires_grad=sharded.parameter.requires_grad)
        setattr(sharded.owner, sharded.key, gathered)
        self.sharding.shards[gathered] = self.sharding.shards.pop(sharded.parameter)
        self.gathered_bytes[gathered] = padded
        memory = gathered.parts if isinstance(gathered, GatheredWeight) else [gathered]
        self.sharding.recorder.label(memory, PARAMETERS)
        if self.adds_up_whole:
            self.sharding.add_up(gathered, sharded.parameter)
        return gathered

    def before(self, module: nn.Module | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gather, before the forward of the module. Return its arguments, whose gradients end the unit's backward."""
        if self._ran_in is None:
            self._ran_in = self.sharding.recorder.places.here
        self._become_gathered()
        if self._state == "backward":  # a memory policy runs the module again
            self._gather(in_forward=False)
            return args
        self._state = "forward"
        self._gather(in_forward=True)
        leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not leaves or not torch.is_grad_enabled():
            return args
        watched_leaves = _EndOfBackward.apply(self, *leaves)  # type: ignore[no-untyped-call]
        watched = dict(zip(map(id, leaves), watched_leaves, strict=True))
        watched_args: tuple[Any, ...] = tree_map_only(Tensor, lambda leaf: watched.get(id(leaf), leaf), args)
        return watched_args

    def after(self, module: nn.Module | None, args: Any, outputs: Any) -> None:
        """Free the parameters, after the forward of the module."""
        if self._state == "backward":
            return
        runs_again = in_backward()
        if not runs_again:
            self._free()
            self._indices.append(len(self.order.forward))
            self.order.forward.append(self)
        self._state = "idle"
        if runs_again or self.order.root is self:  # FSDP takes a unit that runs again in backward for a root
            self.order.gathered = None
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward)

    def reduce(self) -> None:
        """Free the parameters, after the backward of the module, and reduce their gradients, if it is time."""
        self._state = "done"
        self._free()
        if self.reduced == "micro_batch":
            self._reduce()
        elif self.reduced == "step":
            self.reduce_once()

    def reduce_once(self) -> None:
        """Reduce the gradients that the micro-batches of a step added up."""
        with done_for_step():
            self._reduce()

    def reduce_behind_passes(self) -> None:
        """Reduce them behind the last pass of a step, in the layer of the unit.

        What a layer that does not run reduces counts where one like it does.
        """
        if self._ran_in is None:
            with self.sharding.operations.unnoted():
                self.reduce_once()
        else:
            places = self.sharding.recorder.places
            places.inside(self._ran_in.region, self._ran_in.layer, self.reduce_once)()

    def give_gradients(self) -> None:
        """Have gradients of earlier micro-batches: of this rank's shard, or of the parameters."""
        if not self.adds_up_whole:
            self.grads = torch.empty(self.elements // self.shards)
            return
        for parameter in (each for each in self.parameters if each.requires_grad):
            parameter.grad_dtype = self.sharding.main_dtype
            parameter.grad = torch.empty(parameter.shape, dtype=parameter.grad_dtype)
            self.sharding.recorder.label([parameter.grad], GRADIENTS)

    def _reduce(self) -> None:
        """Allocate and free as FSDP's reduce-scatter does, and add the result to this rank's ``grads``."""
        with_grad = [parameter for parameter in self.parameters if parameter.grad is not None]
        if not with_grad:
            return
        self.order.reduced = None
        self._reduced = None
        grads: list[Any] = [parameter.grad for parameter in with_grad]
        for parameter in with_grad:
            parameter.grad = None
        # By index: each gradient is freed when its reordered copy takes its place, and a loop variable would hold it.
        for index in range(len(grads)):
            if even_dim(grads[index].shape, self._cut_for):
                grads[index] = torch.empty_like(grads[index])
                self.sharding.operations.moved(2 * grads[index].nbytes)
        self.order.reduced = torch.empty(self.elements)
        self.sharding.recorder.label([self.order.reduced], REDUCED)
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
        has_run = not self._to_gather  # what a layer that does not run reduces counts where one like it does
        if has_run and self._state != "done":
            self.reduce()
        self._state = "idle"
        self._indices.clear()
        self._reduced = None
        self.order.reduced = None
        self.order.forward.clear()

    def _backward(self, grad: Tensor) -> None:
        """Gather, before the backward of the module, and begin to gather the unit that backward reaches next."""
        if self._state == "backward":
            return
        self._state = "backward"
        self._gather(in_forward=False)
        index = self._indices.pop() if self._indices else 0
        if index > 0:
            next_in_backward = self.order.forward[index - 1]
            if next_in_backward._places is None and next_in_backward._ahead is None:
                next_in_backward._ahead = next_in_backward._all_gather()

    def _gather(self, *, in_forward: bool) -> None:
        """Make the parameters' memory from a flat buffer of an all-gather, one that was begun ahead if there is one."""
        if self._places is not None:
            return
        if self.is_kept:
            self._gather_once()
            return
        arrived = self._all_gather() if self._ahead is None else self._ahead
        self._ahead = None
        if in_forward:
            self.order.gathered = None
        self._places = self._buffer(self._nbytes)
        self._buffer(self._reordered)
        self.sharding.operations.moved(2 * (self._nbytes + self._reordered))
        if in_forward:
            self.order.gathered = arrived

    def _gather_once(self) -> None:
        """Make the parameters' memory, that of operands of a step. Buffers count where this micro-batch gathers."""
        arrived = None
        with done_for_step():
            if self.sharding.is_first:
                encoded = self._buffer(self._encoded)
                cast = self._buffer(self._cast)
                arrived = self._buffer(self._nbytes)
                del encoded, cast
                self.order.gathered = None
            with made_for_step():
                self._places = torch.empty(self._nbytes, dtype=torch.uint8)
            if self.sharding.is_first:
                self._buffer(self._reordered)
                self.order.gathered = arrived
            self.sharding.operations.moved(3 * self._encoded)
            self._note_all_gather()
            self.sharding.operations.moved(2 * (self._nbytes + self._reordered))

    def _free(self) -> None:
        """Free the parameters, behind a pass through the unit."""
        if not self.is_kept:
            self._places = None

    def _all_gather(self) -> Tensor:
        """Flat buffer of an all-gather. What it sends is made before, and freed when it has arrived."""
        if self._codes is None:
            with made_for_step():
                self._codes = torch.empty(self._encoded, dtype=torch.uint8)
                self.sharding.operations.moved(3 * self._encoded)
        cast = self._buffer(self._cast)
        arrived = self._buffer(self._nbytes)
        self._note_all_gather()
        del cast
        return arrived

    def _note_all_gather(self) -> None:
        """Note the transfer, and the copies into its buffer."""
        sent = self._nbytes // self.shards
        self.sharding.operations.moved(2 * sent + 3 * self._cast)
        self.sharding.operations.sent_to_all("all-gather", self.sharing, sent)

    def _buffer(self, nbytes: int) -> Tensor:
        """Memory that FSDP allocates for gathered parameters."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.sharding.recorder.label([buffer], GATHERED)
        return buffer


class _EndOfBackward(torch.autograd.Function):
    """Identity of a unit's inputs. Its backward, the last of the unit, reduces the unit's gradients."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.unit.reduce()
        return (None, *grads)
