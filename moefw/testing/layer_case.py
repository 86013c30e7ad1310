"""Layer cases: small MoE layers for combinations of plugins, run on every rank and compared with the oracle."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, evolve
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.build import ModelParts, Shared, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks, Tree
from moefw.core.contracts import Layout
from moefw.core.plugin import Plugin
from moefw.core.records import Canonical
from moefw.core.site import Activation, Machine
from moefw.core.stages import Batch, ExpertBatch, LayerStats, Routing
from moefw.models.mlp import SwiGLU
from moefw.runtime.compute.row_keys import SALT
from moefw.runtime.layer import MoELayer, Returning, Sent
from moefw.runtime.naming import by_parameter, canonical_parameters, draw, expert_parameters, initialise
from moefw.runtime.parallel.local_shards import all_of, is_shared_out, whole
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.runtime.phases import straight
from moefw.testing.announce import with_plugins
from moefw.testing.oracle import Rule, Truth, dense_moe
from moefw.testing.poisoned import poisoned_memory
from moefw.testing.variants import NO_FOLDER, trains_beside_a_folder
from moefw_kernels.random import token_keys, uniform


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """One MoE layer and its tokens. ``tokens`` holds each rank's number of tokens; ``skew`` shapes the routing.

    ``skew`` "one": every token prefers expert 0; "starved": no token prefers the last expert; "even": random; "exact":
    random, but a logit is one feature of its token, and so has the same bits with any number of tokens on a rank.
    ``clamped``: the activation is that of gpt-oss. ``adapter_scale``: the factor of ``B A`` of adapters, if
    there are any.
    """

    tokens: tuple[int, ...] = (5,)
    num_experts: int = 4
    top_k: int = 2
    dim: int = 8
    expert_dim: int = 16
    skew: str = "even"
    masked: bool = False
    shared: bool = False
    clamped: bool = False
    biased_experts: bool = False
    adapter_scale: float = 0.0
    row_alignment: int = 1
    seed: int = 0
    parts: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[type[Plugin], ...] = ()
    """Declarations of plugins that are not installed."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.tokens)

    @property
    def activation(self) -> Activation:
        """The activation of the experts, a function of gate and up.

        Only in fp32 is the limit within reach: elsewhere, coarse rounding decides whether a gradient is zero.
        """
        if not self.clamped:
            return Activation()
        is_fp32 = self.parts.get("precision", {"use": "fp32"})["use"] == "fp32"
        return Activation(kind="clamped_swiglu", limit=0.7 if is_fp32 else 1e3)

    @property
    def valid_tokens(self) -> int:
        """The tokens that are not padding, over all ranks."""
        return sum(int(self.mask(rank).sum()) for rank in range(self.world))

    def mask(self, rank: int) -> Tensor:
        """Which tokens of a rank are valid, bool (T)."""
        mask_T = torch.ones(self.tokens[rank], dtype=torch.bool)
        if self.masked:
            mask_T[::3] = False
        return mask_T

    def seeds(self, rank: int) -> Tensor:
        """Seed of a rank's one sequence, int64 (1)."""
        return torch.tensor([self.seed * 1000 + rank])

    def keys(self, rank: int) -> Tensor:
        """Keys of a rank's tokens, int64 (T)."""
        return token_keys(self.seeds(rank), torch.arange(self.tokens[rank]), salt=SALT)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tokens: that of the precision recipe's residual stream."""
        choice = json.dumps(self.parts.get("precision"), sort_keys=True, default=repr)
        return _residual_dtype(_Recipe(choice, self.plugins, self))

    def draw(self, rank: int) -> tuple[Tensor, Tensor]:
        """A rank's tokens and the probe that its output is multiplied with, both (T, D) in ``dtype``."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        x_TD, probe_TD = torch.randn(2, self.tokens[rank], self.dim, generator=generator)
        x_TD[:, 0] = x_TD[:, 0].abs() + 1.0
        return x_TD.to(self.dtype), probe_TD.to(self.dtype)

    def places(self, rank: int) -> Tensor | None:
        """Where in the micro-batch a rank's tokens are, int64 (T); None: no other rank of cp or tp shares it."""
        sharing = self.resolve().layout.group(rank, ("cp", "tp"))
        if len(sharing) == 1:
            return None
        before = sum(self.tokens[other] for other in sharing if other < rank)
        return before + torch.arange(self.tokens[rank])

    def batch(self, rank: int) -> Batch:
        """A rank's micro-batch of one sequence, or its part of it."""
        ids = torch.zeros(1, self.tokens[rank], dtype=torch.int64)
        return Batch(
            ids_BS=ids,
            labels_BS=ids,
            mask_BS=self.mask(rank).unsqueeze(0) if self.masked else None,
            places_S=self.places(rank),
            loss_scale=torch.tensor(1.0 / max(1, self.valid_tokens)),
            seeds_B=self.seeds(rank),
            keys_T=self.keys(rank),
        )

    def tree(self) -> Tree:
        """Spec of the layer case as plain data."""
        sizes = {"dim": self.dim, "expert_dim": self.expert_dim, "num_experts": self.num_experts, "top_k": self.top_k}
        shared_dim = self.expert_dim if self.shared else 0
        formula: Tree = {"activation": asdict(self.activation)} if self.clamped else {}
        formula |= {"biased_experts": True} if self.biased_experts else {}
        model = {"num_layers": 1, "shared_expert_dim": shared_dim, **sizes, **formula}
        train = {"tokens_per_step": 16 * self.world, "micro_batch": 1, "seq_len": 16}
        attention = {"use": "gqa", "num_heads": 2, "head_dim": 4}
        spec = {"model": model, "attention": attention, "train": train, "run": {"device": "cpu"}, **self.parts}
        if trains_beside_a_folder(self.parts):
            spec["train"] = {**spec["train"], "weights": NO_FOLDER}
        return spec

    def resolve(self) -> Assembly:
        """Resolve the layer case's spec without changes. Raises the errors of resolve."""
        return assemble_tree(
            self.tree(),
            Marks("layer case"),
            defaults=defaults(),
            registry=_registry(self.plugins),
            world=self.world,
            machine=Machine(device="cpu"),
        )

    def assemble(self) -> Assembly:
        """Resolve the spec, then replace the negotiated ``row_alignment`` by its own. Raises the errors of resolve."""
        assembly = self.resolve()
        layers = {
            number: evolve(layer, facts={**layer.facts, "row_alignment": self.row_alignment})
            for number, layer in assembly.layers.items()
        }
        return evolve(assembly, layers=layers)


@cache
def _registry(plugins: tuple[type[Plugin], ...]) -> Registry:
    """Registry of installed plugins and these. Cached: finding plugins takes longer than resolving a spec."""
    return with_plugins(plugins)


@dataclass(frozen=True)
class _Recipe:
    """A choice of a precision, as a cache key, and a layer case with this choice."""

    choice: str
    plugins: tuple[type[Plugin], ...]
    layer_case: LayerCase = field(compare=False)


@cache
def _residual_dtype(recipe: _Recipe) -> torch.dtype:
    """Dtype of the residual stream, built as on one rank: a process may draw the tokens of any rank."""
    assembly = _alone(recipe.layer_case).resolve()
    layout = open_layout(assembly, "cpu")
    layout.rank = 0
    precision = ModelParts(assembly, layout, torch.device("cpu"), Shared()).precision
    dtype: torch.dtype = precision.residual_dtype
    return dtype


@dataclass(kw_only=True)
class Outcome:
    """Results of one rank: its output, counts and gradients. ``shares``: its share of the dense gradients."""

    out_TD: Tensor
    tokens_per_expert: Tensor
    grads: dict[str, Tensor]
    shares: dict[str, Tensor]


def build_layer(layer_case: LayerCase) -> tuple[MoELayer, Shared]:
    """MoE layer of a layer case on this rank, initialised by name."""
    assembly = layer_case.assemble()
    layout = open_layout(assembly, "cpu")
    shared = Shared()
    context = ModelParts(assembly, layout, torch.device("cpu"), shared)
    precision = context.at(0).recipe("moe.shared_expert")
    shared_expert = None
    if layer_case.shared:
        shared_expert = SwiGLU(
            layer_case.dim,
            layer_case.expert_dim,
            precision,
            _not_split(layout),
            layer_case.activation,
            adapted=("moe.shared_expert", context.at(0).adapter),
        )
    layer = context.moe_layer(0, shared_expert=shared_expert)

    def send(tokens_and_batch: tuple[Tensor, Batch]) -> Sent:
        return layer.send(*tokens_and_batch)

    def collect(returning: Returning) -> tuple[Tensor, LayerStats]:
        return layer.collect(returning), returning.stats

    # As a block runs the layer: in phases, which memory policies treat, rather than by its own forward.
    run = straight(context.at(0).layer(layer.phases(send, collect)))

    def forward(x_TD: Tensor, batch: Batch) -> tuple[Tensor, LayerStats]:
        outputs: tuple[Tensor, LayerStats] = run((x_TD, batch))
        return outputs

    layer.forward = forward  # type: ignore[method-assign]
    std = min(0.3, 4.8 / math.sqrt(layer_case.dim))  # scores of wide rows must not saturate, which would make ties
    initialise(layer, seed=layer_case.seed, std=lambda _: std)
    _skew(layer.router, layer_case)
    _draw_adapters(layer, layer_case)
    return layer, shared


def _not_split(layout: Layout) -> TensorParallel:
    """No tensor parallelism: with unequal numbers of tokens per rank, a shared expert must be whole."""
    tp = TensorParallel(layout)
    tp.size = 1
    tp.index = 0
    tp.group = None
    return tp


@torch.no_grad()
def _draw_adapters(layer: nn.Module, layer_case: LayerCase) -> None:
    """Give both factors of adapters random values: one that is zero would hide what is wrong with the other."""
    for parameter, pieces in by_parameter(layer):
        if pieces[0].of_adapter:
            with all_of(parameter) as values:
                for piece in pieces:
                    part = piece.of(values)
                    shape = piece.shard.whole(part.shape) if piece.shard else part.shape
                    drawn = draw(piece.name, shape, 0.2, seed=layer_case.seed)
                    part.copy_(piece.shard.of(drawn) if piece.shard else drawn)


@torch.no_grad()
def _skew(router: nn.Module, layer_case: LayerCase) -> None:
    """Change a router's weight for the skew of a layer case; routers without such a weight stay as they are.

    Feature 0 of every token is at least 1 (:meth:`LayerCase.draw`), so it moves the logits of all tokens one way.
    """
    weight: Any = getattr(router, "weight", None)
    if getattr(weight, "shape", None) != (layer_case.num_experts, layer_case.dim):
        return
    if layer_case.skew == "one":
        weight[0, 0] += 5.0
    elif layer_case.skew == "starved":
        weight[-1, 0] -= 5.0
    elif layer_case.skew == "exact":
        weight.copy_(torch.eye(*weight.shape).roll(1, 1))


def routed(layer_case: LayerCase, layer: MoELayer) -> tuple[Tensor, Tensor, Routing]:
    """This rank's tokens, its probe, and their routing."""
    x_TD, probe_TD = layer_case.draw(this_rank())
    ids = torch.zeros(1, len(x_TD), dtype=torch.int64)
    return x_TD, probe_TD, layer.router(x_TD, Batch(ids_BS=ids, labels_BS=ids))


def received(layer_case: LayerCase) -> ExpertBatch:
    """Rows that this rank's experts receive."""
    layer, shared = build_layer(layer_case)
    x_TD, _, routing = routed(layer_case, layer)
    batch, _ = layer.dispatcher.dispatch(x_TD, routing.weights_TK, layer.dispatcher.plan(routing))
    shared.close()
    return batch


def this_rank() -> int:
    """This process's rank; 0 without a world."""
    return dist.get_rank() if dist.is_initialized() else 0


@poisoned_memory()
def solve(layer_case: LayerCase) -> Outcome:
    """Run the layer of a layer case forward and backward on this rank; uninitialised memory reads as NaN."""
    layer, shared = build_layer(layer_case)
    x_TD, probe_TD = layer_case.draw(this_rank())
    x_TD.requires_grad_()
    batch = layer_case.batch(this_rank())
    out_TD, stats = layer(x_TD, batch)
    (out_TD * probe_TD).sum(dtype=torch.float32).backward()
    shared.close()
    outcome = Outcome(out_TD=out_TD.detach(), tokens_per_expert=stats.stats["tokens_per_expert"], grads={}, shares={})
    assert x_TD.grad is not None
    outcome.grads["x"] = x_TD.grad
    experts = expert_parameters(layer)
    for parameter, pieces in by_parameter(layer):
        grad = _share(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for piece in pieces:
            grads = outcome.grads if parameter in experts else outcome.shares
            grads[piece.name] = whole_piece(piece, piece.of(grad)).clone()
    return outcome


def _share(grad: Tensor) -> Tensor:
    """This rank's share of a gradient; an equal share if the gradient is already reduced and sharded."""
    return whole(grad) / grad.device_mesh.size() if is_shared_out(grad) else grad


def whole_piece(piece: Canonical, part: Tensor) -> Tensor:
    """Whole tensor of a piece, zero where this rank has no part of it."""
    if piece.shard is None:
        return part
    whole = part.new_zeros(piece.shard.whole(part.shape))
    piece.shard.of(whole).copy_(part)
    return whole


def truth(layer_case: LayerCase, rule: Rule, **state: Tensor) -> Truth:
    """The oracle's answer to a layer case over the tokens of all ranks, in rank order.

    ``state``: router state and drops, the keyword arguments of :func:`dense_moe`. By default, the load of the last
    global batch is even.
    """
    drawn = [layer_case.draw(rank) for rank in range(layer_case.world)]
    x_TD, probe_TD = (torch.cat(tensors) for tensors in zip(*drawn, strict=True))
    mask_T = torch.cat([layer_case.mask(rank) for rank in range(layer_case.world)])
    eps: float = layer_case.parts.get("routing", {}).get("jitter", 0.0)
    drawn_TD = torch.cat([_uniform(layer_case, rank) for rank in range(layer_case.world)])
    jitter_TD = 1.0 + eps * (2.0 * drawn_TD - 1.0)
    state = {"load_E": torch.ones(layer_case.num_experts), "jitter_TD": jitter_TD, **state}
    lengths = _micro_batch_lengths(layer_case)
    return dense_moe(
        parameters_of(layer_case),
        x_TD,
        probe_TD,
        rule,
        mask_T=mask_T,
        micro_batches=lengths,
        sequences=lengths,
        ranks=layer_case.tokens,
        shared=layer_case.shared,
        clamp=layer_case.activation.clamp,
        adapter_scale=layer_case.adapter_scale,
        **state,
    )


def _micro_batch_lengths(layer_case: LayerCase) -> list[int]:
    """Number of tokens of each micro-batch. Ranks along cp and tp have parts of the same one."""
    plan = layer_case.resolve().layout
    groups = sorted({plan.group(rank, ("cp", "tp")) for rank in range(plan.world)})
    assert [rank for group in groups for rank in group] == list(range(plan.world)), "parts are with neighbours"
    return [sum(layer_case.tokens[rank] for rank in group) for group in groups]


def parameters_of(layer_case: LayerCase) -> dict[str, Tensor]:
    """Every parameter of the layer case's layer, whole, by canonical name. Needs a process without a world."""
    alone, shared = build_layer(_alone(layer_case))
    shared.close()
    return {piece.name: piece.of(piece.parameter.detach()) for piece in canonical_parameters(alone)}


def _uniform(layer_case: LayerCase, rank: int) -> Tensor:
    """Random numbers from which a router makes the jitter of a rank's tokens, in [0, 1), (T, D)."""
    draws = layer_case.batch(rank).draws
    assert draws is not None
    return uniform(token_keys(*draws, salt=0), layer_case.dim)


def _alone(layer_case: LayerCase) -> LayerCase:
    """Case with the layer on one rank, and one token."""
    parts = {key: value for key, value in layer_case.parts.items() if key != "parallel"}
    return replace(layer_case, tokens=(1,), parts=parts)


def assert_matches(outcomes: Sequence[Outcome], expected: Truth, *, rtol: float, floor: float = 1e-2) -> None:
    """Assert that outputs, counts and every gradient of all ranks equal the oracle's, by name.

    The largest error is at most ``rtol`` times the tensor's largest value, or times ``floor`` of the largest gradient
    if that is larger.
    """
    got = {"out": torch.cat([outcome.out_TD.double() for outcome in outcomes])}
    got["tokens_per_expert"] = torch.stack([outcome.tokens_per_expert for outcome in outcomes]).sum(0).double()
    got["x"] = torch.cat([outcome.grads.pop("x").double() for outcome in outcomes])
    for outcome in outcomes:
        for name, grad in outcome.grads.items():
            got[name] = got.get(name, torch.zeros(())) + grad.double()
    for name in outcomes[0].shares:
        got[name] = torch.stack([outcome.shares[name] for outcome in outcomes]).double().sum(0)
    by_name = {"out": expected.out_TD, "tokens_per_expert": expected.tokens_per_expert, **expected.grads}
    missing = by_name.keys() ^ got.keys()
    assert not missing, f"gradients without a counterpart: {sorted(missing)}"
    least_scale = floor * max(1e-3, *map(_largest, expected.grads.values()))
    for name, value in by_name.items():
        assert not got[name].isnan().any(), f"{name} holds NaN"
        scale = max(_largest(value), least_scale)
        worst = _largest(got[name] - value) / scale
        assert worst <= rtol, f"{name} differs from the oracle by {worst:.2e} of its largest value (allowed {rtol:.0e})"


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
