"""The abstract runtime parts: what a plugin's ``build`` returns. They touch tensors; declarations do not.

Shapes follow the legend of :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from moefw.core.errors import PlanError
from moefw.core.records import Canonical, Pass, Role, RowGroups, SavedOperand, Side, State, Traffic

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moefw.core.stages import Batch, DispatchHandle, DispatchPlan, ExpertBatch, Pending, Routing


class Stateful:
    """A module that may keep tensors from step to step; only ``update`` changes what is saved of them."""

    def state_spec(self) -> Sequence[State]:
        """Return the declared state; everything else about a part is constant."""
        return ()

    def update(self, reduced: Mapping[str, Tensor]) -> None:
        """Advance the state once a step, from what the part reports, reduced over the global batch."""


class Router(Stateful, ABC):
    """Chooses K experts for each token. A module; forward reads state and never writes it.

    ``update`` gets ``Routing.stats``, summed over micro-batches and dp*cp*tp.
    """

    @abstractmethod
    def __call__(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Return the routing of the tokens, with statistics to be summed over the global batch."""


class Meter(Stateful, ABC):
    """What a recipe remembers of one GEMM. A module, inside the one that owns the GEMM.

    Every tensor of its state begins with an axis of the GEMM's groups: experts, or a single one. ``update`` gets
    ``largest``, the largest over all ranks with a copy or a part of the GEMM's weights.
    """

    gemm: str
    """As the GEMM is named in ``Precision.at``."""
    largest: Tensor
    """State that is not saved: the largest values of a step, which quantizing may raise in training; 0 at its start."""

    @abstractmethod
    def state_spec(self) -> Sequence[State]:
        """Return the declared state, ``largest`` among it."""

    @abstractmethod
    def update(self, reduced: Mapping[str, Tensor]) -> None:
        """Advance the state once a step."""


class Dispatcher(ABC):
    """Moves rows to the ranks of their experts and back. Keeps nothing between calls.

    Each movement is a start and a finish, two autograd nodes: the backward of finish starts the dual movement,
    the backward of start waits for it. Work placed between them overlaps with it, both ways.
    """

    key_columns: int = 8
    """So many columns of bf16, a multiple of 4, have the rows in which keys are redispatched, bit for bit."""

    @abstractmethod
    def plan(
        self, routing: Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> DispatchPlan:
        """Return the metadata of a movement.

        ``counts[rank][expert]`` given, the exchange of counts is saved. ``dropless``: no budget of rows holds.
        """

    @abstractmethod
    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: DispatchPlan) -> Pending:
        """Send each token to the ranks of its experts."""

    @abstractmethod
    def finish_dispatch(self, pending: Pending) -> tuple[ExpertBatch, DispatchHandle]:
        """Wait, and return this rank's rows grouped by expert, and what the way back needs."""

    @abstractmethod
    def start_combine(self, rows_RD: Tensor, handle: DispatchHandle) -> Pending:
        """Send rows back to the ranks of their tokens."""

    @abstractmethod
    def finish_combine(self, pending: Pending) -> Tensor:
        """Wait, and return ``out_TD``: the plain sum of each token's rows (zero where a token has none)."""

    @abstractmethod
    def start_redispatch(self, x_TD: Tensor, weights_TK: Tensor, handle: DispatchHandle) -> Pending:
        """Repeat the dispatch of ``handle`` with other values, without exchanging metadata."""

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: DispatchPlan) -> tuple[ExpertBatch, DispatchHandle]:
        """Start and finish in one go."""
        return self.finish_dispatch(self.start_dispatch(x_TD, weights_TK, plan))

    def redispatch(
        self, x_TD: Tensor, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[ExpertBatch, DispatchHandle]:
        """Start and finish in one go."""
        return self.finish_dispatch(self.start_redispatch(x_TD, weights_TK, handle))

    def combine(self, rows_RD: Tensor, handle: DispatchHandle) -> Tensor:
        """Start and finish in one go."""
        return self.finish_combine(self.start_combine(rows_RD, handle))

    @abstractmethod
    def traffic(self, handle: DispatchHandle, *, row_bytes: int) -> Traffic:
        """Return the bytes that this rank sends in the movement of ``handle``, rows of ``row_bytes`` each."""

    def close(self) -> None:
        """Free what the dispatcher holds; may be called twice."""


class Named(ABC):
    """A module that names its own parameters, because they are stacked or parts of larger ones."""

    @abstractmethod
    def canonical(self) -> Iterator[Canonical]:
        """Yield every parameter of the module under its name within the module."""


class ExpertGemm(Named):
    """The experts of one layer on this rank. A module that owns their parameters."""

    @abstractmethod
    def __call__(self, batch: ExpertBatch) -> Tensor:
        """Return ``rows_RD``: ``w * W2 (silu(W1 x) * (W3 x))`` per row, w its routing weight; padding gives zero."""

    @abstractmethod
    def canonical(self) -> Iterator[Canonical]:
        """Yield ``{e}.gate_proj.weight``, ``{e}.up_proj.weight`` (F, D) and ``{e}.down_proj.weight`` (D, F).

        ``e`` is the expert's number in the whole layer.
        """


class Codec(Protocol):
    """How rows of some width travel: in fewer bytes than they have. What was packed once packs to the same values."""

    @property
    def row_bytes(self) -> int:
        """The bytes of a packed row, an even number."""

    def pack(self, rows_ND: Tensor) -> Tensor:
        """Return ``(N, row_bytes / 2)`` bf16, which hold bytes and no numbers."""

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows ``(N, D)``."""


class WeightCodec(ABC):
    """What ranks that shard the fp32 master of a weight gather instead of its values: codes and scales.

    Those of whole blocks of ``rows`` do not depend on what else there is of the weight.
    """

    rows: int

    @abstractmethod
    def require(self, weight: str, shape: Sequence[int], shards: int) -> None:
        """Raise PlanError unless shards of ``weight`` ``(..., R, C)``, cut along the first axis, are whole blocks."""

    @abstractmethod
    def encode(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes ``(..., r, C)`` and scales ``(..., r / rows, ...)`` of a shard ``(..., r, C)``, contiguous."""


class Precision(ABC):
    """In which format a GEMM ``y = x W^T`` gets its operands.

    Its three products sum over different axes: fprop over the inputs (the last axis of x and of W), dgrad over the
    outputs (the last axis of grad y, the first but one of W), wgrad over the rows (the first but one of both).
    """

    residual_dtype: ClassVar[Any]
    """The dtype of the residual stream, and of what flows between modules."""
    weight_dtype: ClassVar[Any] = None
    """The dtype in which weights may be gathered where they are sharded; None: as they are stored."""
    by_pass: ClassVar[bool] = False
    """Whether backward needs operands of its own. If not, operands are tensors, and autograd takes those of forward."""
    draws: bool = False
    """Whether gradients are rounded at random where ``RowGroups.keys_R`` are given."""
    shares_inputs: bool = False
    """Whether recipes that ``at`` gives out make the same of an input, and of what is kept of it."""

    def at(self, name: str, *, groups: int | None = None) -> Precision:
        """Return the recipe for a module or a GEMM inside: what it draws or remembers there is its own.

        ``groups``: of a GEMM, how many groups of rows, or stacked weights, it has on this rank. An owner that assigns
        the result to itself also owns its state.
        """
        return self

    @abstractmethod
    def quantize(self, x: Tensor, *, role: Role, during: Pass, rows: RowGroups | None = None) -> Any:
        """Return the operand that takes the part of ``x`` in a GEMM.

        It is a tensor, or has ``mT``, ``@`` and ``grouped_mm(other, ends_e)``, which multiply as torch's do.

        Where it is a tensor, gradients flow straight through to ``x``. Leading axes, of stacked weights, are apart;
        ``rows`` tells about those of an input or a gradient. With ``by_pass``, the operands of wgrad count as a pair:
        both may have their rows turned by one orthogonal matrix, after zero rows are added to both.
        """

    def quantize_swiglu(self, h_RH: Tensor, weights_R: Tensor, *, rows: RowGroups | None = None) -> Any | None:
        """Return the input in fprop of ``weights_R * silu(gate) * up`` (R, F), made in the same pass as its values.

        ``h_RH`` is gate, then up. The operand is that of ``quantize``, bit for bit, but not differentiable; None: the
        recipe does not fuse the two, and the caller does one after the other.
        """
        return None

    def keep(self, x: Tensor, used: Any, *, role: Role, during: Pass, rows: RowGroups | None = None) -> SavedOperand:
        """Return what to save of ``x`` for its operand in a pass of backward; ``used`` is the one of forward."""
        return SavedOperand((used,), lambda saved: saved[0])

    def weight_codec(self) -> WeightCodec | None:
        """Return as what weights are gathered where they are sharded; None: in ``weight_dtype``.

        ``quantize`` and ``keep`` then get a :class:`moefw.runtime.parallel.primary_weights.GatheredWeight`.
        """
        return None

    def codec(self, dim: int) -> Codec | None:
        """Return what packs rows of ``dim`` values on their way to experts; None: they travel as they are.

        Needed where the plugin offers a ``wire`` beside that of the residual stream.
        """
        return None

    def keep_activation(self, x: Tensor, rows: RowGroups | None = None) -> SavedOperand:
        """Return what to save of the rows ``x``, which backward reads as they are."""
        return SavedOperand((x,), lambda saved: saved[0])


class MemoryPolicy(ABC):
    """What happens to what a region saves for backward.

    Hooks on saved tensors do not stack: those of a policy ask :func:`moefw.runtime.memory.dropped.stand_in` first.
    """

    drops_outputs: ClassVar[bool] = False
    """Whether others need not save what a region returns: the policy computes it again."""

    @abstractmethod
    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its saved tensors treated; values and gradients are the same bits."""

    def wrap_movement(self, region: str, finish: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``finish``, the second half of a movement, which cannot be run twice.

        ``finish(pending, *args)`` returns what was brought, and a handle; ``again(handle, *args)`` brings the same.
        Raises PlanError where the policy cannot treat one.
        """
        what = f"region {region!r} is a movement of rows, which {type(self).__name__} cannot treat."
        raise PlanError(what, "Name other regions, or a policy that knows how to repeat a movement.")


class LayoutPlan(ABC):
    """Ranks arranged into meshes: pure arithmetic, no process group."""

    world: int

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis by name."""

    @abstractmethod
    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return a rank's position on every axis."""

    @abstractmethod
    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only on ``axes``, which are axes of one mesh, in ascending order.

        Within a group over ep and etp, the ranks of one position on ep are neighbours: dispatchers count on it.
        """

    @abstractmethod
    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        """Return the ranks with this rank's parameters, attention's or the experts', in rows of equal length.

        The ranks of a row shard each parameter (FSDP); rows of one hold all of it. Ranks ascend along a row, and
        from row to row in one place.
        """


class Layout(ABC):
    """An opened plan: this rank's place and its process groups."""

    plan: LayoutPlan
    rank: int
    device: str
    ranks_per_node: int
    """How many consecutive ranks a fast link joins: a machine, or a larger NVLink domain."""

    @abstractmethod
    def open(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Return the process group of ``ranks``, of which this is one, or None where it is this rank alone.

        Collective over ``ranks``; the same ranks get the same group.
        """

    @abstractmethod
    def host_group(self) -> ProcessGroup | None:
        """Return a group of all ranks in which hosts wait for each other's files, for hours if need be.

        None in a world of one. Collective at its first call.
        """

    def group(self, *axes: str) -> ProcessGroup | None:
        """Return the process group over axes of one mesh. Collective over its ranks."""
        return self.open(self.plan.group(self.rank, axes))

    def size(self, *axes: str) -> int:
        """Return how many ranks ``group(*axes)`` has."""
        return len(self.plan.group(self.rank, axes))

    def index(self, *axes: str) -> int:
        """Return this rank's position in ``group(*axes)``."""
        return self.plan.group(self.rank, axes).index(self.rank)
