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
from moefw.runtime.accounting import account
from moefw.runtime.parallel.holders import STAGE
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
    """Operators that ran in one place. ``operators`` and ``nbytes``: number and bytes of all but the products."""

    products: Counter[Product] = Factory(Counter)
    transfers: Counter[Transfer] = Factory(Counter)
    operators: int = 0
    nbytes: int = 0


@final
class Operations(Mode):
    """Dispatch mode that notes the operators of a model by layer, region and pass, in forward and backward.

    A product in backward is a weight gradient if neither operand is a weight and the result has the shape of one.
    """

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.layout = layout
        self._weights: set[frozenset[int]] = set()
        """The two sizes of each matrix among the weights, in either order: a gradient may come transposed."""
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
            return result  # in another fake mode, DTensor computes shapes
        operator = func.overloadpacket
        if operator in _FIRST_FACTOR:
            first = _FIRST_FACTOR[operator]
            self._multiplied(operator, args[first], args[first + 1], result)
        elif operator is torch.ops.moefw.add_wgrad:
            main, grad_RO, x_RI = args[:3]
            shape = grad_RO.shape[-1], x_RI.shape[-1], len(x_RI)
            self._product(operator, grad_RO, shape, groups=prod(main.shape[:-2]), during="wgrad")
        elif operator is _ATTENTION:
            query, key, value = args[:3]
            # Scores are a product over the width of keys; the result is one over as many values.
            self._attended(operator, query, key, value, num_of_query_width=1, num_of_value_width=1)
        elif operator is _ATTENTION_BACKWARD:
            query, key, value = args[1:4]
            # Scores once more, and gradients of queries and keys; gradients of probabilities and of values.
            self._attended(operator, query, key, value, num_of_query_width=3, num_of_value_width=2)
        elif func.namespace in ("c10d", "_c10d_functional"):
            if func is not WAIT:
                self._launched(func, args, kwargs)
        elif operator not in _UNWRITTEN:
            self.moved(_moved(func, args, kwargs, result))
        return result

    def moved(self, nbytes: int) -> None:
        """Note one operator that reads and writes so many bytes."""
        done = self._done_here()
        done.operators += 1
        done.nbytes += nbytes

    def _done_here(self) -> _Done:
        """Record of the running place and phase."""
        places = self.recorder.places
        if account().done_for_step:
            phase = "once"
        elif places.runs_again:
            phase = "recompute"
        else:
            phase = places.here.phase
        return self._done.setdefault((places.here, phase), _Done())

    def _multiplied(self, operator: Any, a: Tensor, b: Tensor, result: Tensor) -> None:
        """Note a product of matrices, ``a`` (..., m, k) with ``b`` (..., k, n), or of groups of them.

        Of a grouped product, one of the three has a dimension of groups and the others have their rows end to end.
        """
        batch = prod(a.shape[:-2])
        groups = max(batch, prod(b.shape[:-2]), prod(result.shape[:-2]))
        of_weights = any(life.of_weights or life.kind in WEIGHTS for life in self.recorder.of([a, b]))
        if not self.recorder.places.in_backward:
            during = "fprop"
        elif not of_weights and frozenset(result.shape[-2:]) in self._weights:
            during = "wgrad"
        else:
            during = "dgrad"
        shape = (batch * a.shape[-2], b.shape[-1], a.shape[-1])
        self._product(operator, a, shape, groups=groups, during=during)

    def _attended(
        self,
        operator: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        num_of_query_width: int,
        num_of_value_width: int,
    ) -> None:
        """Note attention's core: so many products over the width of queries and keys, and over that of values."""
        width = num_of_query_width * query.shape[-1] + num_of_value_width * value.shape[-1]
        shape = prod(query.shape[:-1]), key.shape[-2], width
        during = "fprop" if operator is _ATTENTION else "dgrad"
        self._product(operator, query, shape, groups=prod(query.shape[:-2]), during=during)

    def _product(
        self, operator: Any, operand: Tensor, shape: tuple[int, int, int], *, groups: int, during: str
    ) -> None:
        product = Product(
            operator=str(operator).removeprefix("aten."),
            dtype=str(operand.dtype).removeprefix("torch."),
            shape=shape,
            groups=groups,
            during=during,
        )
        self._done_here().products[product] += 1

    def _launched(self, func: Any, args: Any, kwargs: Any) -> None:
        with _disable_current_modes():  # reading it clones and splits tensors: not the model's work
            collective = collective_of(func, args, kwargs)
        sent = {peer: sum(tensor.nbytes for tensor in tensors) for peer, tensors in collective.to.items()}
        self.sent(collective.kind, dist.get_process_group_ranks(collective.group), sent)

    def sent(self, kind: str, ranks: Sequence[int], nbytes: Mapping[int, int]) -> None:
        """Note one collective over ``ranks``. ``nbytes``: what this rank sends to each, by position in ``ranks``."""
        layout = self.layout
        node_bytes = 0
        network_bytes = 0
        for peer, count in nbytes.items():
            if ranks[peer] == layout.rank:
                continue
            if ranks[peer] // layout.ranks_per_node == layout.rank // layout.ranks_per_node:
                node_bytes += count
            else:
                network_bytes += count
        transfer = Transfer(
            kind=kind, group=self._name(ranks), ranks=len(ranks), node=node_bytes, network=network_bytes
        )
        self._done_here().transfers[transfer] += 1

    def sent_to_all(self, kind: str, ranks: Sequence[int], nbytes: int) -> None:
        """Note one collective over ``ranks`` in which this rank sends as much to each."""
        self.sent(kind, ranks, dict.fromkeys(range(len(ranks)), nbytes))

    def _name(self, ranks: Sequence[int]) -> str:
        """Axes whose group these ranks are; where there are none, the number of ranks."""
        plan = self.layout.plan
        single_axes = [(axis,) for axis in plan.sizes]
        combined_axes = [("ep", "etp"), *COPIES.values(), STAGE]
        for candidates in (single_axes, combined_axes):
            names = [" x ".join(axes) for axes in candidates if plan.group(self.layout.rank, axes) == tuple(ranks)]
            if names:
                return " or ".join(names)
        return f"{len(ranks)} ranks"

    def work(self, layers: Mapping[int | None, int]) -> Iterator[Work]:
        """Yield what was done in each place. ``layers``: the number of layers that each layer stands for."""
        for (place, phase), done in self._done.items():
            yield Work(
                layer=place.layer,
                layers=layers.get(place.layer, 1),
                region=place.region,
                phase=phase,
                products=tuple(evolve(product, times=times) for product, times in done.products.items()),
                transfers=tuple(evolve(transfer, times=times) for transfer, times in done.transfers.items()),
                operators=done.operators,
                nbytes=done.nbytes,
            )


def _moved(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operator reads and writes. A tensor that changes in place is both."""
    if func.name() == _INTO_THE_GATHERED:
        return 2 * sum(map(_nbytes, args[0]))
    written = None if "out" in kwargs else result
    nbytes = sum(map(_nbytes, tensors_in((args, kwargs, written))))
    if func.overloadpacket in _LOOKUPS:
        return nbytes - _nbytes(args[0]) + _nbytes(result)
    return nbytes


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor. An expanded one has no more than its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
