"""What parts say of the memory that they take, in bytes, on one rank and in one micro-batch. Imports no torch.

A formula stands at the declaration of what it describes. The planner knows none: it applies memory policies to
regions and adds up. Legend of shapes: :mod:`moefw.core.stages`. Routing is even.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from attrs import evolve, field, frozen

from moefw.core.site import Dims

FP32: Final = 4
FP64: Final = 8
INT32: Final = 4
INT64: Final = 8


@frozen(kw_only=True)
class Tensor:
    """Memory that something is saved in. Within a layer, equal names are the same memory.

    ``weights``: a copy of parameters. ``row_bytes``: of each of its R rows, if it is a matrix of the rows of experts.
    ``stands_for``: the tensor in whose place it is saved; where that one will be
    computed again, it is saved itself, and so costs nothing.
    """

    name: str
    nbytes: int
    weights: bool = False
    row_bytes: int = 0
    stands_for: str | None = None


@frozen(kw_only=True)
class Region:
    """One call of a region of a layer, and the calls inside.

    ``given``: what it reads. ``returns``: what it returns that has a gradient. ``saves``: what autograd saves in it and
    not inside. ``holds``: what stays beside, whatever a policy does, such as indices. ``unit``: whose weights it needs,
    as the regions inside do. ``moves_rows``: running it again brings what it returns, and drops nothing that it saves.

    ``forward_bytes`` and ``backward_bytes``: the most that passes at a time in that pass, beside what is saved; what it
    returns and the gradients that it gets count, too. ``leaves_bytes``: what stays of it until the forward of its layer
    ends, whoever saves it or not. ``weight_elements``: of its weights, whose gradients are there after its backward.
    """

    name: str
    given: tuple[Tensor, ...] = ()
    returns: tuple[str, ...] = ()
    saves: tuple[Tensor, ...] = ()
    holds: tuple[Tensor, ...] = ()
    inside: tuple[Region, ...] = ()
    unit: str = ""
    moves_rows: bool = False
    forward_bytes: int = 0
    backward_bytes: int = 0
    leaves_bytes: int = 0
    weight_elements: int = 0


@frozen(kw_only=True)
class Weight:
    """A parameter as a rank has it before FSDP, fp32.

    ``unit``: the module that FSDP gathers it with, on the mesh ``side``. ``split``: whether tp splits it.
    """

    shape: tuple[int, ...]
    unit: str
    side: str = "dense"
    split: bool = False

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def share(self, shards: int) -> int:
        """Return the elements of the first of so many shards: along the first dim that divides, or else the first."""
        if any(size % shards == 0 for size in self.shape):
            return self.elements // shards
        return -(-self.shape[0] // shards) * math.prod(self.shape[1:])

    def gathering(self, shards: int) -> int:
        """Return the elements that are there while FSDP gathers it: what arrived, its place, and unless shards are
        whole rows of it the parts in order.
        """
        return self.elements * (2 if self.shape[0] % shards == 0 else 3)


@frozen(kw_only=True)
class PartMemory:
    """What a router, a dispatcher or a GEMM takes in one layer.

    ``buffers``: bytes of its state. ``regions`` in the order in which they run. ``rows``: how many rows a dispatcher
    brings, where that is not as many as even routing sends. ``filled``: up to how many rows of one rank a router has
    the group of each expert filled.
    """

    weights: tuple[Weight, ...] = ()
    buffers: int = 0
    regions: tuple[Region, ...] = ()
    rows: int | None = None
    filled: int | None = None


@frozen(kw_only=True)
class PeakCandidate:
    """A moment outside of layers, when all layers hold what they save: bytes that pass, in words and number."""

    name: str
    passing: int
    gathered: tuple[str, ...] = ()
    """The units whose weights are there."""


@frozen(kw_only=True)
class LayerMemory:
    """A layer: the region ``layer`` with all others inside, and its parameters."""

    kind: str
    region: Region
    weights: tuple[Weight, ...]
    buffers: int = 0


@frozen(kw_only=True)
class ModelMemory:
    """A model: its layers in order, and what lies outside of them.

    ``saves``: between forward and backward. ``peak_candidates``: at the end of forward and the start of backward.
    ``stream_bytes``: the residual stream, whose gradient passes through all of backward.
    """

    layers: tuple[LayerMemory, ...]
    weights: tuple[Weight, ...]
    saves: tuple[Tensor, ...]
    peak_candidates: tuple[PeakCandidate, ...]
    last_peak_candidate: PeakCandidate
    """The end of backward, when no layer holds anything any more."""
    stream_bytes: int


@frozen(kw_only=True)
class Codes:
    """Values in few bits, with a scale for each block of rows and columns.

    ``matrix_scale_bytes``: of a further scale, one for the matrix. Where experts share one matrix, there is one for
    each row of blocks, as these belong to one expert each. Codes of less than a byte lie side by side down the rows of
    a block, or else along them.
    """

    value_bits: int
    block: tuple[int, int]
    scale_bytes: int
    matrix_scale_bytes: int = 0

    def nbytes(self, rows: int, columns: int, *, shared: bool = False) -> int:
        """Return the bytes of codes and scales of a matrix, which experts share or not."""
        down, across = -(-rows // self.block[0]), -(-columns // self.block[1])
        scales = down * across * self.scale_bytes + (down if shared else 1) * self.matrix_scale_bytes
        return -(-rows * columns * self.value_bits // 8) + scales

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of what there is of every single row of a matrix that experts share."""
        scales = -(-columns // self.block[1]) * self.scale_bytes + self.matrix_scale_bytes if self.block[0] == 1 else 0
        packed = self.value_bits < 8 and self.block[0] > 1
        return (0 if packed else columns * self.value_bits // 8) + scales


@frozen(kw_only=True)
class Formats:
    """What a precision keeps of the operands of a GEMM. Sizes are bytes of an element.

    ``stream``: of the residual stream. ``gathered``: of a weight that FSDP gathers. ``copy``: of the copy of a weight
    that backward reads where FSDP does not gather it; 0: it reads the weight. ``inputs``: what wgrad reads of an input;
    None: the input. ``shares_inputs``: whether GEMMs that read one input keep it once. ``activations``: what is kept of
    the experts' pre-activation; None: itself. ``packed``: as what rows travel that a dispatcher packs; None: as they
    are. ``passing_counted``: whether operands cost nothing beside what the regions say. ``keyed``: whether backward
    draws from keys of rows. ``state``: bytes that a GEMM keeps from step to step, for each expert that it multiplies
    for.
    """

    stream: int
    gathered: int = FP32
    copy: int = 0
    inputs: Codes | None = None
    shares_inputs: bool = True
    activations: Codes | None = None
    packed: Codes | None = None
    passing_counted: bool = True
    keyed: bool = False
    state: int = 0

    def kept_input(
        self, reader: str, x: Tensor, rows: int, columns: int, *, shared: bool = False
    ) -> tuple[Tensor, ...]:
        """Return what the GEMM ``reader`` saves of an input ``x`` (rows, columns), which experts share or not."""
        if self.inputs is None:
            return (x,)
        return (self._codes(self.inputs, f"{x.name} as codes for {reader}", x, rows, columns, shared=shared),)

    def kept_inputs(self, readers: Sequence[str], x: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        """Return what ``readers``, one after the other, save of an input that they all read."""
        apart = readers[:1] if self.shares_inputs else readers
        return tuple(kept for reader in apart for kept in self.kept_input(reader, x, rows, columns))

    def kept_activation(self, x: Tensor, rows: int, columns: int, *, shared: bool = False) -> tuple[Tensor, ...]:
        """Return what is saved of the pre-activation ``x`` (rows, columns), which experts share or not."""
        if self.activations is None:
            return (x,)
        return (self._codes(self.activations, f"{x.name} as codes", x, rows, columns, shared=shared),)

    def _codes(self, codes: Codes, name: str, x: Tensor, rows: int, columns: int, *, shared: bool) -> Tensor:
        row_bytes = codes.row_bytes(columns) if x.row_bytes else 0
        nbytes = codes.nbytes(rows, columns, shared=shared)
        return Tensor(name=name, nbytes=nbytes, row_bytes=row_bytes, stands_for=x.name)


BF16_FORMATS: Final = Formats(stream=2, gathered=2, copy=2)
"""Of what computes in bf16 from fp32 parameters."""


@frozen(kw_only=True)
class RankShape:
    """How much one rank works on: sizes of the layer, of the layout and of a micro-batch.

    ``shards``: over how many ranks FSDP shards a parameter of ``dense`` and ``experts``; 1: it does not.
    ``precision``: what a module (``attention``, ``moe.experts``, ``head``) of a layer computes in.
    """

    dims: Dims
    layer: int
    sequences: int
    seq_len: int
    axes: Mapping[str, int]
    shards: Mapping[str, int]
    ranks_per_node: int
    row_alignment: int
    precision: Callable[[int, str], Formats] = field(eq=False)
    budget: int | None = None
    """The rows that a dispatcher brings, whatever routing sends."""
    capacity: float = 1.0
    """So many times the rows of even routing ``budget`` is, before it is rounded up to the alignment."""
    filled: int | None = None
    """Up to how many rows of one rank the group of each expert is filled, whatever routing sends."""

    @property
    def all_tokens(self) -> int:
        """The tokens of a micro-batch: those of all ranks of tp."""
        return self.sequences * self.seq_len

    @property
    def tokens(self) -> int:
        """This rank's part of them, T."""
        return self.all_tokens // self.tp

    @property
    def tp(self) -> int:
        """The ranks that split attention and MLPs."""
        return self.axes.get("tp", 1)

    @property
    def ep(self) -> int:
        """The ranks that split the experts."""
        return self.axes.get("ep", 1)

    @property
    def etp(self) -> int:
        """The ranks that split an expert."""
        return self.axes.get("etp", 1)

    @property
    def ranks(self) -> int:
        """The ranks that exchange rows, P."""
        return self.ep * self.etp

    @property
    def local_experts(self) -> int:
        """The experts of this rank, e."""
        return self.dims.num_experts // self.ep

    @property
    def choices(self) -> int:
        """The (token, expert) pairs of this rank's tokens."""
        return self.tokens * self.dims.top_k

    @property
    def group_rows(self) -> int:
        """The rows of one expert, filled up, and rounded up to the alignment."""
        even = -(-self.choices * self.ranks // self.dims.num_experts)
        return self.aligned(even if self.filled is None else self.filled * self.ranks)

    @property
    def valid_rows(self) -> int:
        """The rows of this rank's experts that come from tokens."""
        return self.choices * self.etp

    @property
    def rows(self) -> int:
        """The rows of this rank's experts, R."""
        return self.group_rows * self.local_experts if self.budget is None else self.budget

    def formats_of(self, module: str) -> Formats:
        """Return what a module of this layer computes in."""
        return self.precision(self.layer, module)

    def aligned(self, rows: int) -> int:
        """Return ``rows`` rounded up to the row alignment."""
        return -(-rows // self.row_alignment) * self.row_alignment

    def at(self, layer: int) -> RankShape:
        """Return the shape of another layer."""
        return evolve(self, layer=layer)

    def tokens_given(self, module: str = "moe.experts") -> Tensor:
        """Return what an MoE layer is given: ``x`` (T, D)."""
        return Tensor(name="x", nbytes=self.tokens * self.dims.model_dim * self.formats_of(module).stream)

    def rows_given(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what experts are given: ``rows`` (R, D), ``row weights`` (R) fp32, ``group ends`` (e) int32."""
        return (
            self.matrix("rows", self.dims.model_dim),
            Tensor(name="row weights", nbytes=self.rows * FP32),
            Tensor(name="group ends", nbytes=self.local_experts * INT32),
        )

    def keys_given(self) -> tuple[Tensor, ...]:
        """Return ``row keys`` (R) int64, if the recipe of the experts draws from them."""
        keys = Tensor(name="row keys", nbytes=self.rows * INT64)
        return (keys,) if self.formats_of("moe.experts").keyed else ()

    def matrix(self, name: str, columns: int) -> Tensor:
        """Return a matrix ``(R, columns)`` of the rows of experts, in the dtype of the residual stream."""
        row_bytes = columns * self.formats_of("moe.experts").stream
        return Tensor(name=name, nbytes=self.rows * row_bytes, row_bytes=row_bytes)

    def weight_copy(self, name: str, elements: int, module: str, side: str = "dense") -> tuple[Tensor, ...]:
        """Return the copy of a weight that backward reads, if there is one: none of those that FSDP gathers."""
        copy = self.formats_of(module).copy
        if not copy or self.shards[side] > 1:
            return ()
        return (Tensor(name=f"copy of {name}", nbytes=elements * copy, weights=True),)


@frozen(kw_only=True)
class Placement:
    """Where the bytes of a saved tensor wait between forward and backward.

    ``kept`` where they are; ``offloaded`` off the device; ``stashed`` in memory of the device that a policy holds.
    """

    kept: int = 0
    offloaded: int = 0
    stashed: int = 0


@frozen(kw_only=True)
class StateRest:
    """How one state of the optimizer rests between steps: the bytes of an element, and where."""

    itemsize: int = FP32
    on_device: bool = True
    passing: int = 0
    """Bytes of the device that pass at a time in a step, for all states."""
