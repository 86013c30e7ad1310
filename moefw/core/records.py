"""Plain records with which parts describe tensors to each other. Importing this imports no torch.

Shapes follow the legend of :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import field, frozen
from attrs.validators import and_, ge, gt, le

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

Role = Literal["input", "weight", "grad"]
GemmPass = Literal["fprop", "dgrad", "wgrad"]
"""One of the products of a layer with a weight: its output, the gradient of its input, or that of its weight."""
Pass = GemmPass
"""Its name for plugins that were written for an API before 4."""
Side = Literal["dense", "experts"]
"""One of the two meshes: ``dense`` for attention, embedding and loss, ``experts`` for the routed experts."""
Zero = Literal[1, 2, 3]
"""A stage of ZeRO: what ranks that shard parameters (FSDP) hold whole while the micro-batches of a step run.

3: nothing; 2: weights; 1: weights and gradients.
"""
ParameterRole = Literal["matrix", "vector", "embedding", "head", "router", "norm", "bias"]
"""What a parameter is in the model, as its owner says. Optimizers treat parameters by it.

``matrix``: the weight of a product. ``vector``: a one-dimensional tensor that is nothing below, such as attention
sinks. ``embedding``: a row for each token id, also where the head is tied to it. ``head``: the weight that makes
logits. ``router``: any parameter of a router. ``norm``: the weight of a norm. ``bias``: what is added to a product.
"""


@frozen
class State:
    """A tensor kept between steps: the fp32 buffer ``name`` of the part's module. ``saved``: held by checkpoints."""

    name: str
    shape: tuple[int, ...]
    saved: bool = True


@frozen
class Shard:
    """Part ``index`` of ``count`` equal parts of a tensor along ``dim``; the ranks of ``axis`` hold the parts."""

    dim: int
    index: int
    count: int
    axis: str

    def of(self, whole: Tensor) -> Tensor:
        """This part of the whole tensor."""
        return whole.chunk(self.count, self.dim)[self.index]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Shape of one part of a tensor with the shape ``whole``."""
        return tuple(size // self.count if dim == self.dim else size for dim, size in enumerate(whole))

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor, given the ``shape`` of one part."""
        return tuple(size * self.count if dim == self.dim else size for dim, size in enumerate(shape))


@frozen
class Stage:
    """Stage ``index`` of the ``count`` stages of a pipeline. The first one embeds, the last one computes the losses."""

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the losses."""
        return self.index == self.count - 1


@frozen
class Action:
    """One pass of a micro-batch through a stage of a pipeline.

    ``F``: forward. ``B``: backward. ``I``, and later ``W``: a backward in two parts, the gradients of inputs and those
    of weights.
    """

    kind: Literal["F", "B", "I", "W"]
    stage: int
    micro_batch: int

    @property
    def passes(self) -> tuple[Action, ...]:
        """Itself, alone."""
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@frozen
class Pair:
    """A forward and the backward of another micro-batch that a rank runs phase by phase, one beside the other.

    One computes while rows of the other travel between ranks.
    """

    forward: Action
    backward: Action

    @property
    def passes(self) -> tuple[Action, ...]:
        """Both passes."""
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


PASSES: Final[Mapping[str, str]] = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
"""The name of each kind of pass: in it a clock counts its time."""
Entry = Action | Pair
"""What a schedule lists: a pass, or a pair of them."""
Order = Sequence[Sequence[Entry]]
"""What each position on pp runs in a step, in order."""


@frozen(eq=False)
class Canonical:
    """A parameter, or its piece ``parameter[index]``, under a name that is the same in every layout.

    ``index``: of numbers, and of slices without a step. ``shard`` is the part of the named tensor that this rank holds;
    None: all of it. ``holders``: the positions on pp that hold copies, which other tokens' gradients reach; empty: this
    one alone. ``adapter_std``: of a parameter of an adapter, which no folder of weights has, the standard deviation of
    its initial values; None: it is of the model. ``role``: what it is in the model; None: a matrix if the named tensor
    has two dimensions or more, else a vector. All parameters of a router have the role ``router``.
    """

    name: str
    parameter: Parameter
    index: tuple[Any, ...] = ()
    shard: Shard | None = None
    holders: tuple[int, ...] = ()
    adapter_std: float | None = None
    role: ParameterRole | None = None

    @property
    def of_adapter(self) -> bool:
        """Whether it belongs to an adapter."""
        return self.adapter_std is not None

    def of(self, like: Tensor) -> Tensor:
        """This piece of a tensor with the parameter's shape: the parameter, its gradient or its moments."""
        return like[self.index] if self.index else like


@frozen(kw_only=True)
class ParameterFacts:
    """What an optimizer is told of a parameter that trains.

    ``name``: that of the parameter in the model on this rank. ``side``: its mesh. ``tensors``: the whole shape of each
    named tensor of which the parameter holds all or a part. Several lie in one parameter where it is a stack, such as
    the matrices of several experts, each with its gate and its up.
    """

    name: str
    role: ParameterRole
    side: Side
    tensors: Mapping[str, tuple[int, ...]]


class TrainedParameters(Mapping[str, "Parameter"]):
    """The parameters that train, by their names in the model. ``facts`` tells of each, under the same name.

    ``facts`` None: each is a dense tensor of its own name, a matrix if it has two dimensions or more, else a vector.
    """

    def __init__(self, parameters: Mapping[str, Parameter], facts: Mapping[str, ParameterFacts] | None = None) -> None:
        self._parameters = dict(parameters)
        if facts is None:
            facts = {name: _plain_facts(name, parameter) for name, parameter in parameters.items()}
        self.facts: Mapping[str, ParameterFacts] = facts

    def __getitem__(self, name: str) -> Parameter:
        """The parameter with this name."""
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        """Iterator over the names."""
        return iter(self._parameters)

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self._parameters)


def _plain_facts(name: str, parameter: Parameter) -> ParameterFacts:
    """Facts of a parameter of which nothing else is known."""
    role: ParameterRole = "matrix" if parameter.dim() > 1 else "vector"
    return ParameterFacts(name=name, role=role, side="dense", tensors={name: tuple(parameter.shape)})


LogitPart = Literal["query", "key", "lone_query", "other"]
"""What rows make of a head: queries, keys, queries that meet keys of all heads, or what no logit depends on."""


@frozen(kw_only=True)
class HeadRows:
    """Which rows of a named tensor make which heads: each of ``heads`` has an equal share of the rows, in order.

    ``parts``: of the rows of each head, in order, what they make and how many do. Query heads that share a key are
    neighbours.
    """

    heads: int
    parts: tuple[tuple[LogitPart, int], ...]


@frozen(kw_only=True)
class QKClip:
    """Clip of attention logits that an optimizer asks for (QK-Clip; Kimi K2, arXiv 2507.20534 section 2.1).

    Where the largest logit S of a head is above ``threshold``, its weights are scaled so that it is at ``threshold``:
    by g = threshold / S. Queries take g^alpha, their keys g^(1 - alpha).
    """

    threshold: float = field(validator=gt(0.0))
    alpha: float = field(default=0.5, validator=and_(ge(0.0), le(1.0)))


@frozen(kw_only=True)
class AdaptedWeight:
    """A weight beside which an adapter may train, as this rank holds it: of one matrix, or of a stack for experts.

    ``name``: its name in its layer, such as ``attention.q_proj`` or ``moe.experts.gate_up_proj``. ``shape``: ``(O, I)``
    of this rank's part of one matrix; ``shard``: which part that is, of its outputs (dim 0) or of its inputs (dim 1);
    None: all of it. ``experts``: the numbers of the experts that have such a matrix; None: it belongs to no expert.
    ``outputs``: where the outputs of several weights of a model lie in one matrix, such as those of gate and up, by
    name. ``computed``: the only outputs that are computed here; None: all.
    """

    name: str
    shape: tuple[int, int]
    shard: Shard | None = None
    experts: range | None = None
    outputs: Mapping[str, slice] | None = None
    computed: slice | None = None

    @property
    def of_inputs(self) -> Shard | None:
        """Part of the inputs that this rank has; None: all of them."""
        return self.shard if self.shard is not None and self.shard.dim == 1 else None

    @property
    def of_outputs(self) -> Shard | None:
        """Part of the outputs that this rank has; None: all of them."""
        return self.shard if self.shard is not None and self.shard.dim == 0 else None

    @property
    def leaf(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """Data about the rows of an input or a gradient that a recipe may use in addition to their values."""

    ends_e: Tensor | None = None
    """int32 on the device: the end of each expert's group of rows. None: one group."""
    keys_R: Tensor | None = None
    """int64: the key from which the random draws for a row start, on any rank. None: nothing is drawn."""
    sizes: tuple[int, ...] | None = None
    """Number of rows in each group: the differences of ``ends_e``. None: unknown to the host."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedOperand:
    """Saved form of a tensor between forward and backward: tensors to save, and a function that makes its operand.

    ``operand`` holds no reference to a tensor, so that memory policies can free the tensors that they drop.
    """

    tensors: tuple[Tensor, ...]
    operand: Callable[[Sequence[Tensor]], Any]
