"""What parts tell each other of tensors: plain records. Importing this imports no torch.

Shapes follow the legend of :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

Role = Literal["input", "weight", "grad"]
Pass = Literal["fprop", "dgrad", "wgrad"]
Side = Literal["dense", "experts"]
"""One of the two meshes: that of attention, embedding and loss, or that of the routed experts."""
Movement = Literal["plan", "dispatch", "combine", "combine_backward", "dispatch_backward"]


@frozen
class State:
    """A tensor that a part keeps between steps: an fp32 buffer of that name on the part's module."""

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
        """Return this part of the whole tensor."""
        return whole.chunk(self.count, self.dim)[self.index]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a part of a tensor of the shape ``whole``."""
        return tuple(size // self.count if dim == self.dim else size for dim, size in enumerate(whole))

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor, of which ``shape`` is a part's."""
        return tuple(size * self.count if dim == self.dim else size for dim, size in enumerate(shape))


@frozen(eq=False)
class Canonical:
    """A parameter, or the piece ``parameter[index]`` of one, under a name that no layout changes.

    ``shard`` says which part of the named tensor this rank holds; None: all of it.
    """

    name: str
    parameter: Parameter
    index: tuple[Any, ...] = ()
    shard: Shard | None = None

    def of(self, like: Tensor) -> Tensor:
        """Return this piece of a tensor shaped like the parameter: itself, its gradient, its moments."""
        return like[self.index] if self.index else like


@frozen(eq=False)
class RowGroups:
    """What a recipe may know of the rows of an input or a gradient, beside their values."""

    ends_e: Tensor | None = None
    """int32 on the device: where each group of rows ends, an expert's. None: one group."""
    keys_R: Tensor | None = None
    """int64: from which the random draws for a row start, whatever rank it is on. None: nothing is drawn."""
    sizes: tuple[int, ...] | None = None
    """How many rows each group has, where the host knows it: the differences of ``ends_e``."""


@frozen(eq=False)
class SavedOperand:
    """What stands for a tensor between forward and backward: tensors to save, and how to make its operand of them.

    ``operand`` holds on to no tensor itself: what a memory policy drops must be free.
    """

    tensors: tuple[Tensor, ...]
    operand: Callable[[Sequence[Tensor]], Any]


@frozen
class Sent:
    """Bytes from one rank to another: rows, and everything else (counts, expert ids, routing weights)."""

    payload: int = 0
    metadata: int = 0

    def __add__(self, other: Sent) -> Sent:
        """Add both kinds."""
        return Sent(self.payload + other.payload, self.metadata + other.metadata)


@frozen
class Traffic:
    """What one rank sends in one layer: for each movement, ``sent[movement][peer]``; nothing to itself.

    Peers are positions in the dispatcher's group. A collective counts as what must leave each rank whatever the
    algorithm: an all-gather sends the rank's own part to each peer, a reduce-scatter each peer's part of its own.
    """

    rank: int
    sent: Mapping[Movement, Sequence[Sent]]

    def __attrs_post_init__(self) -> None:
        assert all(peers[self.rank] == Sent() for peers in self.sent.values()), "what stays here is not sent"
