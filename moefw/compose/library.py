"""MoE layers for a model and a training loop of one's own: the parts of a spec, without the rest of a run.

What the engine does in a step is left to the caller, who has a method for each piece: auxiliary losses are a tensor to
add (:class:`LayerOutput`), :meth:`Layer.average_gradients` averages over ranks, and :meth:`Layer.update` advances the
state of the router. What only the engine can do is refused when the layer is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Never, Self, TypedDict, Unpack, final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.build import ModelParts, Shared, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.devices import Device, device_here
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.router_steps import RouterSteps, mean_scale
from moefw.compose.spec.source import KeyPath, Marks, Tree
from moefw.core.contracts import Layout
from moefw.core.errors import ContractError, PlanError, Problem, SpecError, nearest
from moefw.core.plugin import Plugin
from moefw.core.records import Side
from moefw.core.stages import Batch, LayerStats, tensor_dataclass
from moefw.models import lone_layers
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.compute.row_keys import keyed
from moefw.runtime.forward_context import forward_with
from moefw.runtime.layer import Returning, Sent
from moefw.runtime.naming import expert_parameters, initialise
from moefw.runtime.parallel.gradients import Gradients
from moefw.runtime.phases import straight

SIDES: Sequence[Side] = ("dense", "experts")


@tensor_dataclass
class LayerOutput:
    """Result of a layer's forward, for the tokens of this rank."""

    out: Tensor
    """Like the layer's input; 0 for masked tokens."""
    losses: Tensor
    """Scalar, fp32: the sum of the router's auxiliary losses, each ``coefficient * mean over the valid tokens``. Add it
    to a loss that is a mean over these tokens. 0 in evaluation, and without such losses."""
    stats: LayerStats
    """What the router has counted, such as ``stats.stats["tokens_per_expert"]`` (E)."""


@final
class Layer(nn.Module):
    """An MoE layer: a module from tokens to tokens. See :func:`build_layer`."""

    def __init__(self, parts: ModelParts, number: int, shared: Shared) -> None:
        super().__init__()
        context = parts.at(number)
        recipe = context.recipe("moe.experts")
        self.dim = context.site.dims.model_dim
        self.layout: Layout = parts.layout
        self.moe = parts.moe_layer(number)
        self._shared = shared
        self._dtype = recipe.residual_dtype
        self._draws = recipe.draws
        router: Any = self.moe.router
        for state in router.state_spec():
            # Part of state_dict(), as there is no checkpoint of ours.
            router.register_buffer(state.name, router.get_buffer(state.name))
        self._steps = RouterSteps({number: router}, self.layout, warns=True)

        def send(tokens_and_batch: tuple[Tensor, Batch]) -> Sent:
            return self.moe.send(*tokens_and_batch)

        def collect(returning: Returning) -> tuple[Tensor, LayerStats]:
            return self.moe.collect(returning), returning.stats

        # In phases, which memory policies treat, as the block of a model runs the layer.
        self._run = straight(context.layer(self.moe.phases(send, collect)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> LayerOutput:
        """Output for tokens ``(T, D)`` or ``(B, S, D)``. Collective over the ranks that share experts.

        ``mask``: bool ``(T)`` or ``(B, S)``, False for padding, which is not routed and not counted; None: all tokens
        are valid. A loss over sequences takes the rows of ``(B, S, D)``, or ``(T, D)`` as one sequence. In training,
        random draws start from PyTorch's generator of the device. ``x`` is cast to the dtype of the recipe's residual
        stream, and the output back. Raises ContractError for other shapes, and for dtypes of whole numbers.
        """
        self._require(x, mask)
        batch = self._batch(x, mask)
        losses: list[Tensor] = []
        with forward_with(aux_losses=losses):
            out_TD, stats = self._run((x.reshape(-1, self.dim).to(self._dtype), batch))
        if self.training:
            self._steps.add({self.moe.number: stats})
        zero = torch.zeros((), device=x.device)
        return LayerOutput(out=out_TD.to(x.dtype).view_as(x), losses=sum(losses, zero).float(), stats=stats)

    def _require(self, x: Tensor, mask: Tensor | None) -> None:
        """Raise ContractError for tokens or a mask of another shape or dtype."""
        if x.dim() not in (2, 3) or x.shape[-1] != self.dim:
            what = f"an MoE layer of dim {self.dim} got tokens of shape {tuple(x.shape)}."
            raise ContractError(what, f"Hand over (T, {self.dim}) or (B, S, {self.dim}).")
        if not x.is_floating_point():
            raise ContractError(f"an MoE layer got tokens of {x.dtype}.", "Hand over embeddings in torch.float32, say.")
        if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != torch.bool):
            what = f"the mask of tokens of shape {tuple(x.shape)} is {tuple(mask.shape)} {mask.dtype}."
            raise ContractError(what, f"Hand over {tuple(x.shape[:-1])} torch.bool: False for padding.")

    def _batch(self, x: Tensor, mask: Tensor | None) -> Batch:
        """Batch of the tokens: each row of ``(B, S, D)`` is a sequence. Its ids are no token ids."""
        rows = (1, len(x)) if x.dim() == 2 else tuple(x.shape[:2])
        ids_BS = torch.zeros(rows, dtype=torch.int64, device=x.device)
        mask_BS = None if mask is None else mask.reshape(rows)
        if not self.training:
            return Batch(ids_BS=ids_BS, labels_BS=ids_BS, mask_BS=mask_BS)
        batch = Batch(
            ids_BS=ids_BS,
            labels_BS=ids_BS,
            mask_BS=mask_BS,
            loss_scale=mean_scale(ids_BS, mask_BS),
            seeds_B=torch.randint(2**62, rows[:1], device=x.device),
        )
        return keyed(batch) if self._draws else batch

    def update(self) -> None:
        """Advance the router's state, such as an expert bias, by all forwards in training since the last update.

        Call it after each step of the optimizer. Collective over all ranks. Raises ContractError before a forward in
        training.
        """
        self._steps.update()

    def expert_parameters(self) -> list[nn.Parameter]:
        """Parameters of the experts that this rank holds. With an ep above 1, other ranks hold other experts."""
        experts = expert_parameters(self.moe)
        return [parameter for parameter in self.parameters() if parameter in experts]

    def average_gradients(self) -> None:
        """Average each parameter's gradient over all ranks, as DDP and FSDP do with others. Collective over all ranks.

        The gradient of an expert that one rank holds is already a sum over the tokens of the ranks that share experts.
        A parameter without a gradient gets zeros, unless it is frozen.
        """
        Gradients(self.moe, self.layout).average()

    def close(self) -> None:
        """Free what exists once in the process, such as buffers of a dispatcher. Collective. May be called twice."""
        self._shared.close()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the layer, but for the dtypes of its router: scores that are rounded choose other experts."""
        router = self.moe.router
        before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in router.state_dict().items():
            if tensor.dtype != before[name].dtype:
                owner, _, own = name.rpartition(".")
                held = getattr(router.get_submodule(owner), own)
                held.data = before[name].to(tensor.device)
        return self

    def __reduce_ex__(self, protocol: Any) -> Never:
        """Raise ContractError: process groups and functions of this process are no data."""
        fix = "Save layer.state_dict(), build a layer of the same sizes and sections, and use load_state_dict()."
        raise ContractError("an MoE layer cannot be pickled, as torch.save(layer) does.", fix)

    def __deepcopy__(self, memo: Any) -> Never:
        """Raise ContractError: regions under a memory policy would go on to use the original's weights."""
        raise ContractError("an MoE layer cannot be copied.", "Build a second one, and use load_state_dict().")


class Sections(TypedDict, total=False):
    """Sections of a spec that a layer depends on, each with the default of a spec."""

    routing: Mapping[str, Any]
    dispatch: Mapping[str, Any]
    gemm: Mapping[str, Any]
    precision: Mapping[str, Any]
    memory: Sequence[Mapping[str, Any]]
    parallel: Mapping[str, Any]


def build_layer(
    *,
    dim: int,
    expert_dim: int,
    num_experts: int,
    top_k: int,
    device: Device = "cpu",
    seed: int | None = None,
    init_std: float = 0.02,
    **sections: Unpack[Sections],
) -> Layer:
    """MoE layer of SwiGLU experts, in training mode. Collective in an initialised world, else on one rank.

    ``sections``: those of a spec, ``routing``, ``dispatch``, ``gemm``, ``precision``, ``memory`` and ``parallel``, such
    as ``dispatch={"use": "alltoall"}``. ``device``: what ``torch.device`` takes; a GPU must be the current one.
    Parameters are fp32, drawn from a normal distribution of ``init_std`` by ``seed`` and name, the same on every
    layout. ``seed`` None: one that PyTorch's generator of the CPU draws, on rank 0, as for any module of PyTorch, so
    that layers differ, and ``torch.manual_seed`` repeats them.

    Raises SpecError, PluginError or PlanError with every problem, also for what needs the engine of ``moefw train``,
    such as a loss over all layers or delayed scaling.
    """
    sizes = {"dim": dim, "expert_dim": expert_dim, "num_experts": num_experts, "top_k": top_k}
    place = device_here(device)
    (layer,) = build_layers(assemble_layers("build_layer()", sizes, sections, place), place)
    drawn = int(torch.randint(2**62, ())) if seed is None else seed
    agreed = everywhere(drawn, layer.layout.host_group())[0]
    initialise(layer.moe, seed=agreed, std=lambda name: 0.0 if name.endswith(".bias") else init_std)
    return layer


@frozen
class _Arguments(Marks):
    """Places in the arguments of a function, in which sizes are no section of their own."""

    def where(self, path: KeyPath) -> str:
        """``build_layer() top_k`` for the path of an argument."""
        return Marks.where(self, path[1:] if path[0] in ("model", "run") else path)


def build_layers(assembly: Assembly, device: torch.device) -> Iterator[Layer]:
    """Layers of the same sizes, not initialised, that share one layout and one dispatcher.

    Each is built when it is asked for.
    """
    shared = Shared()
    parts = ModelParts(assembly, open_layout(assembly, device.type), device, shared)
    return (Layer(parts, number, shared) for number in assembly.layers)


def assemble_layers(caller: str, sizes: Mapping[str, Any], sections: Sections, device: torch.device) -> Assembly:
    """Assembly of layers of these sizes. Raises SpecError, PluginError or PlanError with every problem."""
    _require_sections(caller, sections)
    world = dist.get_world_size() if dist.is_initialized() else 1
    tree: Tree = {
        "model": {"use": lone_layers.LoneLayers.name, **sizes},
        # No part of a layer reads these.
        "train": {"tokens_per_step": 16 * world, "micro_batch": 1, "seq_len": 16},
        "run": {"device": device.type},
        **sections,
    }
    registry = Registry([lone_layers])
    assembly = assemble_tree(tree, _Arguments(caller), defaults=defaults(), registry=registry, world=world)
    _require_no_engine(caller, assembly)
    return assembly


def _require_sections(caller: str, sections: Sections) -> None:
    """Raise SpecError for each argument that is no section of a layer."""
    known = Sections.__annotations__
    unknown = (name for name in sections if name not in known)
    problems = [Problem(f"{name!r} is no argument of {caller}.", nearest(name, known), caller) for name in unknown]
    if problems:
        raise SpecError(problems)


def _require_no_engine(caller: str, assembly: Assembly) -> None:
    """Raise PlanError with everything that only a whole run has, or can do."""
    problems = []
    if any("budget" in layer.facts for layer in assembly.layers.values()):
        what = "a budget of rows that overflows is lifted in a second run of the step, which a layer cannot start."
        problems.append(Problem(what, "Use on_overflow: drop, or leave rank_capacity out.", f"{caller} dispatch"))
    if any(assembly.layout.num_shards(side) > 1 for side in SIDES):
        what = "the parameters of a layer alone are not sharded: FSDP gathers them for a model as a whole."
        fix = "Leave shard out, and apply fully_shard to the parameters of your model."
        problems.append(Problem(what, fix, f"{caller} parallel"))
    own = _regions(assembly)
    for index, policy in enumerate(assembly.parts.memory):
        elsewhere = sorted(set(policy.regions) - own)
        if elsewhere:
            what = f"a layer alone has no region {' or '.join(elsewhere)}."
            problems.append(Problem(what, f"Known: {', '.join(sorted(own))}.", f"{caller} memory[{index}].regions"))
    if problems:
        raise PlanError(problems)


def _regions(assembly: Assembly) -> set[str]:
    """Regions inside the layers: of the layers themselves, and of their experts."""
    parts: Sequence[Plugin] = (assembly.parts.model, assembly.parts.gemm)
    return {region for part in parts for region, _ in part.offers(assembly.site).get("region", ())}
