"""Shards parameters over the ranks that would hold copies, with FSDP2, unit by unit, while the model is built.

Importing this takes a second, so only layouts that shard parameters import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import cache
from typing import TypeVar, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from moefw.core.contracts import Layout, WeightCodec
from moefw.core.records import Side
from moefw.runtime.compute.coded_share import CodedShare
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.runtime.compute.primary_weights import Master
from moefw.runtime.parallel.cuts import even_dim
from moefw.runtime.parallel.local_shards import may_be_codes
from moefw.runtime.parallel.zero import remember, roots

M = TypeVar("M", bound=nn.Module)


@final
class Sharding:
    """Shards parameters as the layout says. Gradients are summed over all copies and never divided."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._mesh = cache(self._open)

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
        """Shard the module's parameters, gather them in ``dtype`` only while it runs, and return the module.

        It runs while its ``forward``, ``logits``, ``log_probs`` or ``extend`` does. In a step, those of ZeRO 1 and 2
        stay gathered (:mod:`moefw.runtime.parallel.zero`).
        Units inside, and the parameters ``apart``, are not included. Gradients are reduced in fp32. With ``codec``,
        matrices that train are gathered as codes and scales. Frozen ones that are held as codes always are. Raises
        PlanError with the unit's ``name`` if the codec cannot encode one.
        """
        mesh = self._mesh(side)
        if mesh is None:
            return module
        shards = mesh.size(-1)
        if codec is not None:
            _become_masters(module, codec, name, shards)
        _become_shares(module, apart, mesh.get_local_rank(mesh.ndim - 1), shards)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
            ignored_params=set(apart),
            # Codes and scales of masters are cut between whole blocks of rows, so along the first dimension. Those of
            # shares are cut already.
            shard_placement_fn=lambda parameter: Shard(
                0 if isinstance(parameter, Master | CodedShare) else even_dim(parameter.shape, shards)
            ),
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        remember(module, self.layout.plan.zero(side))
        for method in ("logits", "log_probs", "extend"):
            if hasattr(module, method):
                register_fsdp_forward_method(module, method)
        return module

    def root(self, model: M, apart: Set[nn.Parameter]) -> M:
        """``model`` with all parameters outside units as one more unit."""
        return self.unit(model, "dense", apart=apart)

    def _open(self, side: Side) -> DeviceMesh | None:
        """Mesh (copies, shard), whose dimensions are named after their groups.

        torch treats meshes with equal ranks and names as equal, and reuses cached data of one for the other, even if
        its world has ended and another one has begun.
        """
        layout = self.layout
        rows = layout.plan.copies(layout.rank, side)
        if len(rows[0]) == 1:
            return None
        own_row = next(row for row in rows if layout.rank in row)
        sharing = layout.open(own_row)
        assert sharing is not None
        if len(rows) == 1:
            return DeviceMesh.from_group(sharing, layout.device, mesh_dim_names=(sharing.group_name,))
        column = own_row.index(layout.rank)
        copies = layout.open(tuple(row[column] for row in rows))
        assert copies is not None
        names = (copies.group_name, sharing.group_name)
        return DeviceMesh.from_group([copies, sharing], layout.device, mesh=rows, mesh_dim_names=names)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep the parameters of the root unit gathered while phases run one by one, outside the model's forward.

    FSDP2 ends each call of backward as if it were that of a whole micro-batch: it reduces what the root unit has, and
    forgets the order of units, by which it gathers the next one ahead. Here a call is one phase. So none is the last
    one before the end of this block, and the root unit reduces in :func:`reduce_pass` alone. Collective.

    A model of which FSDP shards the experts alone has no root unit around them.
    """
    roots(model)
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    model.set_reshard_after_backward(False, recurse=False)
    model.set_requires_gradient_sync(False, recurse=False)
    model.set_is_last_backward(False)
    try:
        yield
        model.set_is_last_backward(True)
        reduce_pass(model)
    finally:
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True, recurse=False)
        model.set_reshard_after_backward(True, recurse=False)
        model.reshard()


def reduce_pass(model: nn.Module, *, with_root: bool = True) -> None:
    """Reduce the gradients of a pass that its backward has left: those of the root unit, and late ones. Collective.

    Late are those that were accumulated after the backward of their units. Call this in :func:`gathered`. Not
    ``with_root``: later passes add to those of the root unit.
    """
    for unit in roots(model):
        is_around_others = unit is model
        if is_around_others:
            unit.set_requires_gradient_sync(with_root, recurse=False)
        unit._get_fsdp_state()._root_post_backward_final_callback()
        if is_around_others:
            unit.set_requires_gradient_sync(False, recurse=False)


def _become_masters(unit: nn.Module, codec: WeightCodec, name: str, shards: int) -> None:
    """Replace the matrices of a unit that may be codes, single or stacked, by masters with ``codec``."""
    for path, module in unit.named_modules():
        for key, parameter in [*module.named_parameters(recurse=False)]:
            if may_be_codes(module, parameter):
                full_name = ".".join(filter(None, (name, path, key)))
                codec.require(full_name, parameter.shape, shards)
                module.register_parameter(key, nn.Parameter(Master(parameter.detach(), codec)))


def _become_shares(unit: nn.Module, apart: Set[nn.Parameter], index: int, count: int) -> None:
    """Replace the parameters of a unit that are held as codes by what rank ``index`` of ``count`` stores of them."""
    for module in unit.modules():
        for key, parameter in [*module.named_parameters(recurse=False)]:
            if isinstance(parameter, CodedWeight) and parameter not in apart:
                share = CodedShare.of(parameter, index, count)
                module.register_parameter(key, nn.Parameter(share, requires_grad=False))
