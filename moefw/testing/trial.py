"""MoE layers to try a combination of plugins on: tokens, skew, empties; run on every rank, held against the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefw.core.assembly import Assembly
from moefw.core.build import ModelContext, Shared
from moefw.core.layer import MoELayer
from moefw.core.naming import canonical_parameters, expert_parameters, initialise
from moefw.core.resolve import assemble_tree
from moefw.core.site import Machine
from moefw.core.source import Marks, Tree, read_yaml
from moefw.core.stages import Batch
from moefw.models.modules import SwiGLU
from moefw.testing.oracle import Rule, Truth, dense_moe

DEFAULTS = Path(__file__).parent.parent / "defaults.yaml"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One MoE layer and its tokens. ``tokens`` holds each rank's number of tokens; ``skew`` shapes the routing.

    ``skew`` "one": every token prefers expert 0; "starved": no token prefers the last expert; "even": by chance.
    """

    tokens: tuple[int, ...] = (5,)
    num_experts: int = 4
    top_k: int = 2
    dim: int = 8
    expert_dim: int = 12
    skew: str = "even"
    masked: bool = False
    shared: bool = False
    seed: int = 0
    parts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.tokens)

    @property
    def valid_tokens(self) -> int:
        """The tokens that are not padding, over all ranks."""
        return sum(int(self.mask(rank).sum()) for rank in range(self.world))

    def mask(self, rank: int) -> Tensor:
        """Return which tokens of a rank are valid, bool (T)."""
        mask_T = torch.ones(self.tokens[rank], dtype=torch.bool)
        if self.masked:
            mask_T[::3] = False
        return mask_T

    def draw(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return a rank's tokens and the probe that its output is multiplied with, fp32 (T, D)."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        x_TD, probe_TD = torch.randn(2, self.tokens[rank], self.dim, generator=generator)
        x_TD[:, 0] = x_TD[:, 0].abs() + 1.0
        return x_TD, probe_TD

    def tree(self) -> Tree:
        """Return the spec of the trial as plain data."""
        sizes = {"dim": self.dim, "expert_dim": self.expert_dim, "num_experts": self.num_experts, "top_k": self.top_k}
        shared_dim = self.expert_dim if self.shared else 0
        model = {"num_layers": 1, "num_heads": 2, "head_dim": 4, "shared_expert_dim": shared_dim, **sizes}
        train = {"tokens_per_step": 16 * self.world, "micro_batch": 1, "seq_len": 16}
        return {"model": model, "train": train, "run": {"device": "cpu"}, **self.parts}

    def assemble(self) -> Assembly:
        """Resolve the trial's spec. Raises what resolve raises."""
        problems: list[Any] = []
        defaults = read_yaml(DEFAULTS.read_text(), Marks("defaults"), problems)
        machine = Machine(device="cpu")
        return assemble_tree(self.tree(), Marks("trial"), defaults=defaults, world=self.world, machine=machine)


@dataclass(kw_only=True)
class Outcome:
    """What one rank computed: its output, its gradients (dense ones are still this rank's share), its counts."""

    out_TD: Tensor
    tokens_per_expert: Tensor
    grads: dict[str, Tensor]
    shares: dict[str, Tensor]


def build_layer(trial: Trial) -> tuple[MoELayer, Shared]:
    """Return the MoE layer of a trial on this rank, initialised by name."""
    assembly = trial.assemble()
    layout = assembly.parts.parallel.build(assembly.layout, "cpu")
    shared = Shared()
    context = ModelContext(assembly, layout, torch.device("cpu"), shared)
    precision = context.at(0).precision
    assert precision is not None
    expert = SwiGLU(trial.dim, trial.expert_dim, precision) if trial.shared else None
    layer = context.moe_layer(0, shared_expert=expert)
    initialise(layer, seed=trial.seed, std=lambda name: 1.0 if name.startswith("router") else 0.3)
    _skew(layer.router, trial)
    return layer, shared


@torch.no_grad()
def _skew(router: nn.Module, trial: Trial) -> None:
    weight: Any = router.weight
    if trial.skew == "one":
        weight[0, 0] += 20.0
    elif trial.skew == "starved":
        weight[-1, 0] -= 20.0


def solve(trial: Trial) -> Outcome:
    """Run the layer of a trial forward and backward on this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    layer, shared = build_layer(trial)
    x_TD, probe_TD = trial.draw(rank)
    x_TD.requires_grad_()
    mask_BS = trial.mask(rank).unsqueeze(0) if trial.masked else None
    scale = torch.tensor(1.0 / max(1, trial.valid_tokens))
    ids = torch.zeros(1, len(x_TD), dtype=torch.int64)
    batch = Batch(ids_BS=ids, labels_BS=ids, mask_BS=mask_BS, loss_scale=scale)
    dtype = torch.bfloat16 if trial.parts.get("precision", {}).get("use") == "bf16" else torch.float32
    out_TD, stats = layer(x_TD.to(dtype), batch)
    (out_TD.float() * probe_TD).sum().backward()
    shared.close()
    outcome = Outcome(out_TD=out_TD.detach(), tokens_per_expert=stats.stats["tokens_per_expert"], grads={}, shares={})
    assert x_TD.grad is not None
    outcome.grads["x"] = x_TD.grad
    experts = expert_parameters(layer)
    for piece in canonical_parameters(layer):
        grad = piece.parameter.grad
        grad = torch.zeros_like(piece.parameter) if grad is None else grad
        (outcome.grads if piece.parameter in experts else outcome.shares)[piece.name] = piece.of(grad).clone()
    return outcome


def truth(trial: Trial, rule: Rule, bias_E: Tensor | None = None) -> Truth:
    """Return the oracle's answer to a trial over the tokens of all ranks, in rank order."""
    alone, shared = build_layer(_alone(trial))
    shared.close()
    parameters = {piece.name: piece.of(piece.parameter.detach()) for piece in canonical_parameters(alone)}
    drawn = [trial.draw(rank) for rank in range(trial.world)]
    x_TD, probe_TD = (torch.cat(tensors) for tensors in zip(*drawn, strict=True))
    mask_T = torch.cat([trial.mask(rank) for rank in range(trial.world)])
    pieces = trial.tokens
    return dense_moe(
        parameters, x_TD, probe_TD, rule, bias_E=bias_E, mask_T=mask_T, micro_batches=pieces, shared=trial.shared
    )


def _alone(trial: Trial) -> Trial:
    """The same layer on one rank; its tokens do not matter."""
    parts = {key: value for key, value in trial.parts.items() if key != "parallel"}
    return Trial(**{**trial.__dict__, "tokens": (1,), "parts": parts})


def assert_matches(outcomes: Sequence[Outcome], wanted: Truth, *, rtol: float) -> None:
    """Hold outputs, counts and every gradient of all ranks against the oracle, by name."""
    got = {"out": torch.cat([outcome.out_TD.double() for outcome in outcomes])}
    got["tokens_per_expert"] = torch.stack([outcome.tokens_per_expert for outcome in outcomes]).sum(0).double()
    got["x"] = torch.cat([outcome.grads.pop("x").double() for outcome in outcomes])
    for outcome in outcomes:
        for name, grad in outcome.grads.items():
            got[name] = got.get(name, torch.zeros(())) + grad.double()
    for name in outcomes[0].shares:
        got[name] = torch.stack([outcome.shares[name] for outcome in outcomes]).double().sum(0)
    expected = {"out": wanted.out_TD, "tokens_per_expert": wanted.tokens_per_expert, **wanted.grads}
    missing = expected.keys() ^ got.keys()
    assert not missing, f"gradients without a counterpart: {sorted(missing)}"
    for name, value in expected.items():
        assert not got[name].isnan().any(), f"{name} holds NaN"
        scale = value.abs().max().clamp_min(1e-3) if value.numel() else 1.0
        worst = ((got[name] - value).abs().max() / scale).item() if value.numel() else 0.0
        assert worst <= rtol, f"{name} differs from the oracle by {worst:.2e} of its largest value (allowed {rtol:.0e})"
