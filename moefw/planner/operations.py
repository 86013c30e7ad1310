"""The operators of a recorded micro-batch: matrix products, bytes of all others, collectives.

They are those of the backends that run here: an emulated recipe has the products and casts of its emulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, final

import torch
import torch.distributed as dist
from attrs import Factory, define, evolve
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from moefw.core.contracts import Layout
from moefw.planner.report import Product, Transfer, Work
from moefw.recording.collectives import WAIT, collective_of
from moefw.recording.patches import Mode, holds_dtensor
from moefw.recording.places import Place
from moefw.recording.recorder import WEIGHTS, Recorder
from moefw.recording.tensors import tensors_in
from moefw.runtime.compute.for_step import is_done_for_step
from moefw.runtime.parallel.gradients import STAGE
from moefw.runtime.parallel.meshes import COPIES

aten = torch.ops.aten
_FIRST_FACTOR: Final[Mapping[Any, int]] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten._grouped_mm, aten._scaled_mm, aten._scaled_grouped_mm), 0),
    **dict.fromkeys((aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_), 1),
}
"""Operators that multiply two matrices, or groups of them, and the position of the first one."""
_ATTENTION: Final = aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD: Final = aten._scaled_dot_product_flash_attention_for_cpu_backward
_UNWRITTEN: Final = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
_INTO_THE_GATHERED: Final = "fsdp::all_gather_copy_in"
"""Writes of its output, which has room for all ranks, only the place of this rank."""
_LOOKUPS: Final = (aten.embedding, aten.gather, aten.index, aten.index_select)
"""Operators that read of their first tensor only what they return."""


@define
class _Done:
    """What is done in one place."""

    products: Counter[Product] = Factory(Counter)
    transfers: Counter[Transfer] = Factory(Counter)
    operators: int = 0
    nbytes: int = 0


@final
class Operations(Mode):
    """Dispatch mode that notes the operators of a model by layer, region and pass, in forward and backward.

    Of two operands in backward that are no weights, a product of the shape of a weight is its gradient.
    """

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.layout = recorder, layout
        self._weights: set[frozenset[int]] = set()
        self._fake = active_fake_mode()
        self._done: dict[tuple[Place, str], _Done] = {}

    def learn_weights(self, model: nn.Module) -> None:
        """Remember the shapes of the model's weights."""
        self._weights = {frozenset(parameter.shape[-2:]) for parameter in model.parameters() if parameter.dim() > 1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note it."""
        if holds_dtensor(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or func.namespace == "prim" or active_fake_mode() is not self._fake:
            return result
        operator = func.overloadpacket
        if operator in _FIRST_FACTOR:
            at = _FIRST_FACTOR[operator]
            self._multiplied(operator, args[at], args[at + 1], result)
        elif operator is torch.ops.moefw.add_wgrad:
            main, grad_RO, x_RI = args[:3]
            shape = grad_RO.shape[-1], x_RI.shape[-1], len(x_RI)
            self._product(operator, grad_RO, shape, prod(main.shape[:-2]), "wgrad")
        elif operator is _ATTENTION:
            self._attended(operator, *args[:3], over_width=(1, 1))
        elif operator is _ATTENTION_BACKWARD:
            self._attended(operator, *args[1:4], over_width=(3, 2))
        elif func.namespace in ("c10d", "_c10d_functional"):
            if func is not WAIT:
                self._launched(func, args, kwargs)
        elif operator not in _UNWRITTEN:
            self.moved(_moved(func, args, kwargs, result))
        return result

    def moved(self, nbytes: int) -> None:
        """Note one operator that reads and writes so many bytes."""
        here = self._here()
        here.operators += 1
        here.nbytes += nbytes

    def _here(self) -> _Done:
        places = self.recorder.places
        phase = "once" if is_done_for_step() else "recompute" if places.runs_again else places.here.phase
        return self._done.setdefault((places.here, phase), _Done())

    def _multiplied(self, operator: Any, a: Tensor, b: Tensor, result: Tensor) -> None:
        batch = prod(a.shape[:-2])
        groups = max(batch, prod(b.shape[:-2]), prod(result.shape[:-2]))
        backward = self.recorder.places.in_backward
        of_weights = any(life.of_weights or life.kind in WEIGHTS for life in self.recorder.of([a, b]))
        is_wgrad = backward and not of_weights and frozenset(result.shape[-2:]) in self._weights
        during = "wgrad" if is_wgrad else "dgrad" if backward else "fprop"
        self._product(operator, a, (batch * a.shape[-2], b.shape[-1], a.shape[-1]), groups, during)

    def _attended(
        self, operator: Any, query: Tensor, key: Tensor, value: Tensor, *, over_width: tuple[int, int]
    ) -> None:
        """Note attention's core. ``over_width``: the number of its products over the widths of query and value."""
        width = over_width[0] * query.shape[-1] + over_width[1] * value.shape[-1]
        shape = prod(query.shape[:-1]), key.shape[-2], width
        self._product(operator, query, shape, prod(query.shape[:-2]), "fprop" if operator is _ATTENTION else "dgrad")

    def _product(self, operator: Any, like: Tensor, shape: tuple[int, int, int], groups: int, during: str) -> None:
        dtype = str(like.dtype).removeprefix("torch.")
        self._here().products[Product(str(operator).removeprefix("aten."), dtype, shape, groups, during)] += 1

    def _launched(self, func: Any, args: Any, kwargs: Any) -> None:
        with _disable_current_modes():
            collective = collective_of(func, args, kwargs)
        sent = {peer: sum(tensor.nbytes for tensor in tensors) for peer, tensors in collective.to.items()}
        self.sent(collective.kind, dist.get_process_group_ranks(collective.group), sent)

    def sent(self, kind: str, ranks: Sequence[int], nbytes: Mapping[int, int]) -> None:
        """Note one collective over ``ranks``. ``nbytes``: what this rank sends to each, by position in ``ranks``."""
        layout, links = self.layout, Counter[bool]()
        for peer, count in nbytes.items():
            if ranks[peer] != layout.rank:
                links[ranks[peer] // layout.ranks_per_node == layout.rank // layout.ranks_per_node] += count
        self._here().transfers[Transfer(kind, self._name(ranks), len(ranks), links[True], links[False])] += 1

    def sent_to_all(self, kind: str, ranks: Sequence[int], nbytes: int) -> None:
        """Note one collective over ``ranks`` in which this rank sends as much to each."""
        self.sent(kind, ranks, dict.fromkeys(range(len(ranks)), nbytes))

    def _name(self, ranks: Sequence[int]) -> str:
        """Return the axes whose group these ranks are; where there are none, the number of ranks."""
        plan, rank = self.layout.plan, self.layout.rank
        for names in ([(axis,) for axis in plan.sizes], [("ep", "etp"), *COPIES.values(), STAGE]):
            found = [" x ".join(axes) for axes in names if plan.group(rank, axes) == tuple(ranks)]
            if found:
                return " or ".join(found)
        return f"{len(ranks)} ranks"

    def work(self, layers: Mapping[int | None, int]) -> Iterator[Work]:
        """Yield what was done in each place. ``layers``: the number of layers that each layer stands for."""
        for (place, phase), done in self._done.items():
            yield Work(
                layer=place.layer,
                layers=layers.get(place.layer, 1),
                region=place.region,
                phase=phase,
                products=tuple(evolve(one, times=times) for one, times in done.products.items()),
                transfers=tuple(evolve(one, times=times) for one, times in done.transfers.items()),
                operators=done.operators,
                nbytes=done.nbytes,
            )


def _moved(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes. A tensor that changes in place is both."""
    if func.name() == _INTO_THE_GATHERED:
        return 2 * sum(map(_nbytes, args[0]))
    written = None if "out" in kwargs else result
    nbytes = sum(map(_nbytes, tensors_in((args, kwargs, written))))
    return nbytes - _nbytes(args[0]) + _nbytes(result) if func.overloadpacket in _LOOKUPS else nbytes


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; those of the storage where an expanded one has fewer."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
