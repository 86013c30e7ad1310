"""Abstract runtime parts, which a plugin's ``build`` returns. They compute with tensors; declarations do not.

Shapes follow the legend of :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

from moefw.core.errors import PlanError
from moefw.core.records import (
    AdaptedWeight,
    Canonical,
    GemmPass,
    HeadRows,
    Role,
    RowGroups,
    SavedOperand,
    Side,
    State,
    Zero,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Parameter

    from moefw.core.records import ParameterFacts
    from moefw.core.stages import Batch, ExpertBatch, Pending, Routing


class Stateful:
    """Module that may keep tensors between steps. Only ``update`` changes the state that checkpoints save."""

    def state_spec(self) -> Sequence[State]:
        """Declared state. Everything else in the part is constant."""
        return ()

    def update(self, reduced: Mapping[str, Tensor]) -> None:
        """Advance the state once per step, from the part's statistics, reduced over the global batch."""


class Router(Stateful, ABC):
    """Module that chooses K experts for each token. Its forward reads state and never writes it.

    ``update`` gets ``Routing.stats``, summed over micro-batches and over the ranks of dp, cp and tp. State may change
    which experts are chosen, so that their load becomes more even, and never the weights of the same choices.
    """

    @abstractmethod
    def __call__(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Routing of the tokens, with statistics to be summed over the global batch."""

    def over_layers(self, pooled: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Losses by name, sums over tokens, of all MoE layers: of the ``Routing.pooled`` of each."""
        return {}


class Meter(Stateful, ABC):
    """State of a recipe for one GEMM. A module, inside the module that owns the GEMM.

    The first axis of each state tensor is the GEMM's groups: one per expert, or a single one. ``update`` gets
    ``largest``, the maximum over all ranks that hold a copy or a part of the GEMM's weights.
    """

    gemm: str
    """Name of the GEMM, as given to ``Precision.at``."""
    largest: Tensor
    """Unsaved state: the largest values of a step. 0 at its start; quantizing may raise it in training."""

    @abstractmethod
    def state_spec(self) -> Sequence[State]:
        """Declared state, including ``largest``."""

    @abstractmethod
    def update(self, reduced: Mapping[str, Tensor]) -> None:
        """Advance the state once per step."""


PlanT = TypeVar("PlanT")
HandleT = TypeVar("HandleT")


class Dispatcher(ABC, Generic[PlanT, HandleT]):
    """Moves rows to the ranks of their experts and back. Keeps no state between calls.

    ``PlanT``: the dispatcher's own type of plan, the metadata of a movement. ``HandleT``: its record of a dispatch, for
    combine and redispatch; often it is the plan. Nobody else looks into them.

    Each movement is two autograd nodes, start and finish. The backward of finish starts the dual movement, and the
    backward of start waits for it. Work placed between the two overlaps with the movement in forward and backward.
    """

    key_columns: int = 8
    """Width, in bf16 columns, of rows that carry random keys bit for bit. A multiple of 4."""

    @abstractmethod
    def plan(self, routing: Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False) -> PlanT:
        """Metadata of a movement.

        With ``counts[rank][expert]``, no counts are exchanged. With ``dropless``, no row budget applies.
        """

    @abstractmethod
    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: PlanT) -> Pending[Any]:
        """Start sending each token to the ranks of its experts."""

    @abstractmethod
    def finish_dispatch(self, pending: Pending[Any]) -> tuple[ExpertBatch, HandleT]:
        """Wait, and return this rank's rows grouped by expert, and the handle for combine and redispatch."""

    @abstractmethod
    def start_combine(self, rows_RD: Tensor, handle: HandleT) -> Pending[Any]:
        """Start sending rows back to the ranks of their tokens."""

    @abstractmethod
    def finish_combine(self, pending: Pending[Any]) -> Tensor:
        """Wait, and return ``out_TD``: the unweighted sum of each token's rows, zero for a token without rows."""

    def start_redispatch(self, x_TD: Tensor, weights_TK: Tensor, handle: HandleT) -> Pending[Any]:
        """Start repeating the dispatch of ``handle`` with other values, to the same places, without metadata.

        Override this if the handle is not the plan.
        """
        return self.start_dispatch(x_TD, weights_TK, cast("PlanT", handle))

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: PlanT) -> tuple[ExpertBatch, HandleT]:
        """Start and finish a dispatch."""
        return self.finish_dispatch(self.start_dispatch(x_TD, weights_TK, plan))

    def redispatch(self, x_TD: Tensor, weights_TK: Tensor, handle: HandleT) -> tuple[ExpertBatch, HandleT]:
        """Start and finish a repeated dispatch."""
        return self.finish_dispatch(self.start_redispatch(x_TD, weights_TK, handle))

    def combine(self, rows_RD: Tensor, handle: HandleT) -> Tensor:
        """Start and finish a combine."""
        return self.finish_combine(self.start_combine(rows_RD, handle))

    def close(self) -> None:
        """Free the dispatcher's resources. May be called twice."""


class Named(ABC):
    """Module that names its own parameters, because they are stacked, or parts of larger ones."""

    @abstractmethod
    def canonical(self) -> Iterator[Canonical]:
        """Yield every parameter of the module under its name within the module."""


class Attention(ABC):
    """Module that owns the attention of one layer on this rank: projections around a core."""

    @abstractmethod
    def tables(self, batch: Batch) -> Any:
        """Table of positions that the attentions of all layers share, computed once per forward: a pytree."""

    @abstractmethod
    def __call__(self, x_tD: Tensor, tables: Any, batch: Batch) -> Tensor:
        """``(t, D)``, given and returned for this rank's part of the tokens.

        A token sees itself and the earlier tokens of its sequence and its document.
        """

    def logit_rows(self) -> Mapping[str, HeadRows]:
        """Rows that make queries and keys, by the canonical name of a tensor within the attention.

        Required if the plugin offers ``logits=("weights",)``: a logit is then in proportion to the rows of its head.
        """
        return {}


class CachedAttention(Attention):
    """Attention that can go on behind earlier tokens, given what it computed of them, such as keys and values."""

    reach: int | None = None
    """How many earlier positions a token sees, and the caller keeps. None: all."""

    @abstractmethod
    def extend(self, x_tD: Tensor, tables: Any, batch: Batch, past: Any) -> tuple[Tensor, Any]:
        """``(t, D)`` for tokens behind ``past``, and ``past`` with them: tensors ``(..., positions, width)``.

        ``past`` is None before the first tokens. The caller may drop positions at both ends of what is returned. No
        forward calls it: where weights are sharded, each gathers them.
        """


class ContextAttention(ABC):
    """Core of an attention over sequences that the ranks of cp share, each with its own positions of all sequences.

    Rank r of c has pieces r and 2c-1-r of 2c equal ones, in this order: of each row, or of each sequence of a pack,
    whose lengths the mask tells. Keeps no state between calls.
    """

    @abstractmethod
    def __call__(
        self,
        q_BHSd: Tensor,
        k_BGSd: Tensor,
        v_BGSe: Tensor,
        mask: Any,
        *,
        attend: Callable[..., tuple[Tensor, Tensor]],
        sinks_H: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """``out_BHSe`` of this rank's queries, which attend to the keys of all ranks. Collective over cp.

        ``attend`` does so with whole sequences: :func:`moefw.runtime.attention.attend.attend`, or a like function. So
        ``mask``, a :class:`moefw.runtime.attention.mask.Mask`, is of whole sequences.
        """


class ExpertGemm(Named):
    """Module that owns the parameters of one layer's experts on this rank."""

    @abstractmethod
    def __call__(self, batch: ExpertBatch) -> Tensor:
        """``rows_RD``: ``w * (W2 act(W1 x + b1, W3 x + b3) + b2)`` per row, w its routing weight.

        ``act`` and whether there are biases: :class:`moefw.Dims`. Padding rows are zero.
        """

    @abstractmethod
    def canonical(self) -> Iterator[Canonical]:
        """Yield ``{e}.gate_proj.weight``, ``{e}.up_proj.weight`` (F, D) and ``{e}.down_proj.weight`` (D, F).

        With biases, also ``{e}.gate_proj.bias``, ``{e}.up_proj.bias`` (F) and ``{e}.down_proj.bias`` (D). ``e`` is the
        expert's number among all experts of the layer.
        """


class Adapter(Named):
    """Module of what trains beside one weight W ``(O, I)``, and adapts its products ``x W^T``.

    The weight itself stays frozen, as a rule. Products are adapted without a tensor of the weight's size.
    """

    weight: AdaptedWeight
    """The weight that it is for."""

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor, weight: Tensor, rows: RowGroups | None = None) -> Tensor:
        """``(..., O)``, adapted, given ``x`` ``(..., I)`` and ``out``, its product with ``weight``.

        If the inputs of the weight are split, it is this rank's part of a sum. ``rows`` describes the flattened rows.
        """

    def begin(self, weight: Tensor) -> None:
        """Set parameters that begin with values of the weight, this rank's part of it. Collective over the ranks of it.

        Called once, when a run begins, behind the initial values of parameters (``Canonical.adapter_std``).
        """

    @abstractmethod
    def merged(self, weight: Tensor) -> Tensor:
        """Weight ``(O, I)`` whose plain product is the adapted one, outside of training. Of parts on this rank."""

    @abstractmethod
    def canonical(self) -> Iterator[Canonical]:
        """Yield every parameter under its name beside the weight's, each with an ``adapter_std``."""


class StackedAdapter(Named):
    """Module of low-rank adapters of a stack of weights, one for each expert: ``x W^T + scale (x A^T) B^T``.

    An expert GEMM multiplies them inside its own products. ``a`` ``(e, r, I)`` and ``b`` ``(e, O, r)`` are parameters.
    """

    weight: AdaptedWeight
    """The weights that they are for."""
    a: Parameter
    b: Parameter
    scale: float
    precision: Precision
    """Recipe of the products with both."""

    @abstractmethod
    def merged(self, weight: Tensor, expert: int) -> Tensor:
        """Weight ``(O, I)`` of the expert with this number whose plain product is the adapted one."""


class Codec(Protocol):
    """Packs rows of one width into fewer bytes for the wire. Packing unpacked rows again keeps their values."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row, an even number."""

    def pack(self, rows_ND: Tensor) -> Tensor:
        """Packed rows ``(N, row_bytes / 2)``: raw bytes in a bf16 tensor."""

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``(N, D)`` in ``dtype``."""


class WeightCodec(ABC):
    """Encodes shards of a weight's fp32 master as codes and scales, which ranks gather instead of its values.

    The codes and scales of a whole block of ``rows`` rows do not depend on the rest of the weight.
    """

    rows: int

    @abstractmethod
    def require(self, weight: str, shape: Sequence[int], shards: int) -> None:
        """Raise PlanError unless shards of ``weight`` ``(..., R, C)``, cut along the first axis, are whole blocks."""

    @abstractmethod
    def encode(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Contiguous codes ``(..., r, C)`` and scales ``(..., r / rows, ...)`` of a shard ``(..., r, C)``."""


class Precision(ABC):
    """Precision recipe: the formats of the operands of a GEMM ``y = x W^T``.

    Its three products sum over different axes. fprop: inputs (the last axis of x and of W). dgrad: outputs (the last
    axis of grad y, the second-to-last of W). wgrad: rows (the second-to-last axis of grad y and of x).
    """

    residual_dtype: ClassVar[Any]
    """Dtype of the residual stream, and of activations between modules."""
    weight_dtype: ClassVar[Any] = None
    """Dtype in which sharded weights are gathered. None: the dtype in which they are stored."""
    by_pass: ClassVar[bool] = False
    """Whether backward needs its own operands. If not, operands are tensors, and autograd reuses those of forward."""
    draws: bool = False
    """Whether gradients are rounded stochastically where ``RowGroups.keys_R`` is given."""
    shares_inputs: bool = False
    """Whether all recipes from ``at`` make the same operand and the same saved operand of an input."""

    def at(self, name: str, *, groups: int | None = None) -> Precision:
        """Recipe for a module, or for a GEMM inside it, with random draws and state of its own.

        ``groups``: the number of row groups, or of stacked weights, of a GEMM on this rank; None for a module. A module
        that assigns the result to an attribute also owns its state.
        """
        return self

    @abstractmethod
    def quantize(self, x: Tensor, *, role: Role, during: GemmPass, rows: RowGroups | None = None) -> Any:
        """Operand that replaces ``x`` in a GEMM.

        It is a tensor, or an object with ``mT``, ``@`` and ``grouped_mm(other, ends_e)``, which multiply as torch's do.

        Gradients of a tensor operand pass straight through to ``x``. Stacked weights (leading axes) are quantized
        independently. ``rows`` describes the rows of an input or a gradient. With ``by_pass``, wgrad takes its operands
        as a pair: the recipe may append zero rows to both, then mix the rows of both with one orthogonal matrix.
        """

    def quantize_swiglu(self, h_RH: Tensor, weights_R: Tensor, *, rows: RowGroups | None = None) -> Any | None:
        """Fprop operand of the input ``weights_R * silu(gate) * up`` (R, F), quantized as it is computed.

        ``h_RH`` is gate, then up. The operand equals that of ``quantize`` bit for bit, but is not differentiable. None:
        the recipe does not fuse the two steps, and the caller runs them in order.
        """
        return None

    def keep(
        self, x: Tensor, used: Any, *, role: Role, during: GemmPass, rows: RowGroups | None = None
    ) -> SavedOperand:
        """Saved operand of ``x`` for ``during``, a pass of backward. ``used`` is its operand of fprop."""
        return SavedOperand((used,), lambda saved: saved[0])

    def weight_operands(self, weight: Tensor, passes: Sequence[GemmPass]) -> Mapping[GemmPass, Callable[[], Any]]:
        """Function for each of ``passes``, fprop or dgrad, that returns the operand of a weight.

        They are made once for all micro-batches of a step. What they hold is held until its end.
        """

        def operand_of(during: GemmPass) -> Callable[[], Any]:
            operand = self.quantize(weight, role="weight", during=during)
            return lambda: operand

        if self.by_pass:
            return {during: operand_of(during) for during in passes}
        return dict.fromkeys(passes, operand_of("fprop"))  # one for all passes

    def weight_codec(self) -> WeightCodec | None:
        """Codec with which sharded weights are gathered. None: they are gathered in ``weight_dtype``.

        With a codec, ``quantize`` and ``keep`` get :class:`moefw.runtime.compute.primary_weights.GatheredWeight`.
        """
        return None

    def codec(self, dim: int) -> Codec | None:
        """Codec that packs rows of ``dim`` values on their way to experts. None: they travel unpacked.

        Required if the plugin offers a ``wire`` other than that of the residual stream.
        """
        return None

    def keep_activation(self, x: Tensor, rows: RowGroups | None = None) -> SavedOperand:
        """Saved form of rows ``x`` whose values backward reads, rather than an operand made of them."""
        return SavedOperand((x,), lambda saved: saved[0])


class MatrixRule(ABC):
    """Update of whole matrices, for an optimizer whose update of a part needs the rest of its matrix.

    It holds options only: no state, and nothing that changes. A step has three parts. ``direction`` and ``apply`` are
    elementwise and run where a parameter is stored, on the parts that are there. ``update`` runs between them, on whole
    matrices, once for each matrix in the whole world: on its home, a rank to which the others that store parts of it
    send theirs (:mod:`moefw.runtime.parallel.homes`). Clipping of gradients comes before.
    """

    bucket_bytes: int = 1 << 26
    """Largest size in bytes, fp32, of the matrices that a rank computes between two exchanges, unless one is larger."""

    def takes(self, facts: ParameterFacts) -> bool:
        """Whether the rule updates a parameter. Each tensor named in ``facts`` must then have two dimensions.

        What it does not take, the optimizer that ``OptimizerPlugin.build`` returns updates.
        """
        return facts.role == "matrix" and all(len(shape) == 2 for shape in facts.tensors.values())

    def states(self) -> Sequence[str]:
        """Keys of its states, which have the shape of the parameter: fp32, zero at first."""
        return ()

    def direction(self, grad: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """Input of ``update``, of the shape of ``grad``, fp32. It changes ``states`` in place, and not ``grad``.

        Elementwise: any rows of a parameter may be given alone, on any device.
        """
        return grad

    @abstractmethod
    def update(self, matrices_Bnm: Tensor) -> Tensor:
        """Update ``(B, n, m)``, fp32, of B directions, each a whole matrix. A function of the directions alone.

        The B matrices have nothing to do with each other. ``matrices_Bnm`` may be overwritten.
        """

    @abstractmethod
    def apply(self, parameter: Tensor, update: Tensor, *, lr: float, shape: tuple[int, int]) -> None:
        """Change a part of a matrix in place by the same part of its update: decay, and a step.

        Elementwise. ``shape``: that of the whole matrix. ``lr``: the learning rate of the step.
        """

    def cost(self, shape: tuple[int, int]) -> float:
        """Cost of the update of a matrix, in any unit: homes share it out evenly. The products of a Gram matrix."""
        return float(shape[0] * shape[1] * min(shape))


class MemoryPolicy(ABC):
    """Treats the tensors that regions save for backward.

    Saved-tensor hooks do not stack: a policy's hooks must call :func:`moefw.runtime.memory.dropped.stand_in` first. A
    policy that runs a region again enters the context of the first run (:mod:`moefw.runtime.forward_context`).
    """

    drops_outputs: ClassVar[bool] = False
    """Whether the policy recomputes the outputs of a region, so that nothing else needs to save them."""

    @abstractmethod
    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its saved tensors under the policy. Values and gradients stay bitwise equal.

        A plugin with an ``rtol`` may change each gradient of a layer by this share of its largest value.
        """

    def wrap_movement(self, region: str, finish: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        """``finish``, the second half of a movement, under the policy. It cannot run twice.

        ``finish(pending, *args)`` returns the received batch and a handle. ``again(handle, *args)`` repeats the
        movement and returns the batch. Raises PlanError if the policy does not support movements.
        """
        problem = f"region {region!r} is a movement of rows, which {type(self).__name__} cannot treat."
        raise PlanError(problem, "Name other regions, or a policy that knows how to repeat a movement.")


class LayoutPlan(ABC):
    """Arrangement of ranks in meshes: pure arithmetic, no process groups."""

    world: int

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis by name."""

    @abstractmethod
    def coordinates(self, rank: int) -> Mapping[str, int]:
        """A rank's position on every axis."""

    @abstractmethod
    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` only on ``axes``, which are axes of one mesh, in ascending order.

        In a group over ep and etp, ranks with the same position on ep are adjacent. Dispatchers rely on this.
        """

    @abstractmethod
    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same parameters of mesh ``side`` as ``rank``, in rows of equal length.

        The ranks of a row shard each parameter (FSDP); a row of one rank holds all of it. Ranks ascend along each row
        and along each column.
        """

    def size(self, axis: str) -> int:
        """Number of ranks along an axis; 1 along one that the plan does not have."""
        return self.sizes.get(axis, 1)

    def num_shards(self, side: Side) -> int:
        """Number of ranks that shard each parameter of a mesh; 1: each rank holds all of it."""
        return len(self.copies(0, side)[0])

    def zero(self, side: Side) -> Zero:
        """Stage of ZeRO of the parameters of a mesh, the same on every rank. It matters where there are shards.

        3: weights are gathered for each pass through their unit, and gradients reduced after each micro-batch. 2:
        weights are gathered once a step. 1: so they are, and gradients are reduced once a step.
        """
        return 3


class Layout(ABC):
    """An opened layout plan: this rank's position and its process groups."""

    plan: LayoutPlan
    rank: int
    device: str
    ranks_per_node: int
    """Number of consecutive ranks joined by a fast link: those of a machine, or of a larger NVLink domain."""

    @abstractmethod
    def open(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Process group of ``ranks``, which include this rank; None if it is this rank alone.

        Collective over ``ranks``. Equal ``ranks`` get the same group.
        """

    @abstractmethod
    def host_group(self) -> ProcessGroup | None:
        """Group of all ranks for host tensors, with a timeout that allows hours of waiting for files.

        None in a world of one rank. The first call is collective.
        """

    def group(self, *axes: str) -> ProcessGroup | None:
        """Process group over axes of one mesh. Collective over its ranks."""
        return self.open(self.plan.group(self.rank, axes))

    def size(self, *axes: str) -> int:
        """Number of ranks in ``group(*axes)``."""
        return len(self.plan.group(self.rank, axes))

    def index(self, *axes: str) -> int:
        """This rank's position in ``group(*axes)``."""
        return self.plan.group(self.rank, axes).index(self.rank)
