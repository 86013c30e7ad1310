"""What an optimizer is told of parameters: their roles, which owners say, their meshes, and whole shapes by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, frozen
from torch import nn

import moefw
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.contracts import Named, Router
from moefw.core.errors import ContractError
from moefw.core.records import Canonical, ParameterFacts, TrainedParameters
from moefw.core.site import Machine
from moefw.models.presets import PRESETS, TWIN
from moefw.planner import ledger
from moefw.plugins.optimizers.adamw import AdamW
from moefw.runtime.parallel.trained import trained_parameters
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import open_model, whole_model
from moefw.training.new_run import on_meta
from pairwise import quick
from resolved_specs import refusal, registry, resolved

WORDS = ("norm", "router", "embed", "bias", "sinks")
"""Until version 3.4, AdamW did not decay parameters with one of these words in their name."""
LORA = {"use": "lora", "targets": ["*"]}
DORA = {"use": "dora", "targets": ["attention.*"]}
WEIGHTS = {"weights": "a folder that nobody opens here"}
TWINS = [name for name in PRESETS if name.endswith(TWIN)]
MODELS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"model": {"preset": name}} for name in TWINS},
    "tokens ahead": {"model": {"preset": "deepseek-v3-tiny", "mtp_layers": 2}},
    "tied": {"model": {"preset": "deepseek-v3-tiny", "tie_embeddings": True}},
    "sinkhorn": {"model": {"preset": "qwen3-moe-tiny"}, "routing": {"use": "sinkhorn"}},
    "biased experts, loop": {"model": {"preset": "gpt-oss-20b-tiny"}, "gemm": {"use": "loop"}},
    "lora": {"model": {"preset": "deepseek-v3-tiny"}, "adapter": LORA, "train": WEIGHTS},
    "lora, loop": {
        "model": {"preset": "qwen2-57b-a14b-tiny"},
        "gemm": {"use": "loop"},
        "adapter": LORA,
        "train": WEIGHTS,
    },
    "dora": {"model": {"preset": "qwen2-57b-a14b-tiny"}, "adapter": DORA, "train": WEIGHTS},
}
QUICK = ("qwen3-moe-tiny", "deepseek-v3-tiny", "qwen2-57b-a14b-tiny", "gpt-oss-20b-tiny", "tied", "lora, loop", "dora")
VECTORS_THAT_DECAYED = ("lora_magnitude", "shared_expert.gate")
"""The last parts of canonical names of vectors without a word: magnitudes of DoRA, and gates of shared experts."""


def assembled(tree: Mapping[str, Any]) -> Any:
    spec = {"run": {"device": "cpu"}, **tree}
    return assemble_tree(spec, Marks("roles"), defaults=defaults(), machine=Machine(device="cpu"))


@pytest.mark.parametrize("name", quick(MODELS, *QUICK))
def test_what_decays_is_what_no_word_named_before_except_for_two_kinds_of_vectors(name: str) -> None:
    trained = trained_parameters(on_meta(assembled(MODELS[name])))
    optimizer = AdamW(weight_decay=0.5).build(trained, 1e-3)
    decay = {id(each): group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
    assert len(decay) == len(trained)
    for own_name, facts in trained.facts.items():
        decayed_before = not any(word in own_name for word in WORDS)
        is_vector = any(tensor.endswith(VECTORS_THAT_DECAYED) for tensor in facts.tensors)
        decays = decay[id(trained[own_name])] > 0
        assert decays == (decayed_before and not is_vector), own_name


def test_each_role_is_that_of_its_owner() -> None:
    trained = trained_parameters(on_meta(assembled(MODELS["gpt-oss-20b-tiny"])))
    roles = {
        name: facts.role for name, facts in trained.facts.items() if not name.startswith(("layers.1.", "layers.2."))
    }
    assert roles == {
        "embed.weight": "embedding",
        "layers.0.attention_norm.weight": "norm",
        **{f"layers.0.attention.{each}_proj.weight": "matrix" for each in "qkvo"},
        **{f"layers.0.attention.{each}_proj.bias": "bias" for each in "qkvo"},
        "layers.0.attention.sinks.weight": "vector",
        "layers.0.mlp_norm.weight": "norm",
        "layers.0.moe.router.weight": "router",
        "layers.0.moe.router.bias": "router",
        **{f"layers.0.moe.experts.{each}": "matrix" for each in ("gate_up", "down")},
        **{f"layers.0.moe.experts.{each}_bias": "bias" for each in ("gate_up", "down")},
        "norm.weight": "norm",
        "head.weight": "head",
    }


def test_a_stack_of_experts_is_told_as_its_matrices_gate_and_up_apart() -> None:
    facts = trained_parameters(on_meta(assembled(MODELS["qwen3-moe-tiny"]))).facts["layers.0.moe.experts.gate_up"]
    prefix = "layers.0.moe.experts"
    assert facts.side == "experts"
    assert facts.tensors == {
        f"{prefix}.{expert}.{part}_proj.weight": (128, 256) for expert in range(16) for part in ("gate", "up")
    }


def facts_of(parallel: Mapping[str, Any], world: int) -> dict[str, ParameterFacts]:
    model, *_ = open_model(whole_model(world, parts={"parallel": parallel}, plugins=(), sizes={"vocab_size": 64}))
    return dict(trained_parameters(model).facts)


@pytest.mark.parametrize(
    "parallel",
    [{"dense": {"tp": 2}, "experts": {"etp": 2}}, {"dense": {"shard": "all"}, "experts": {"ep": 2}}],
    ids=["tp, etp", "fsdp, ep"],
)
def test_whole_shapes_and_roles_are_the_same_in_every_layout(pool: RankPool, parallel: Mapping[str, Any]) -> None:
    (alone,) = pool.run(facts_of, 1, {}, 1)
    ranks = pool.run(facts_of, 2, parallel, 2)
    for name, facts in alone.items():
        of_ranks = [rank[name] for rank in ranks]
        assert [evolve(each, tensors={}) for each in of_ranks] == [evolve(facts, tensors={})] * 2
        assert facts.tensors == {tensor: shape for each in of_ranks for tensor, shape in each.tensors.items()}


class Scorer(nn.Module, Router):
    """Somebody else's router: a projection with a norm, of which it says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4)


class Mixed(nn.Module, Named):
    """A module that keeps a matrix and what it calls a head in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(4, 4))

    def canonical(self):
        yield Canonical("inner.weight", self.both, (slice(0, 2),))
        yield Canonical("outer.weight", self.both, (slice(2, 4),), role="head")


class Forgetful(Mixed):
    """A module that names none of its parameters."""

    def canonical(self):
        yield from ()


def test_all_parameters_of_a_router_are_the_routers_and_tables_of_torch_are_embeddings() -> None:
    model = nn.ModuleDict({"router": Scorer(), "table": nn.Embedding(3, 4), "out": nn.Linear(4, 4)})
    roles = {name: facts.role for name, facts in trained_parameters(model).facts.items()}
    of_router = {name for name, role in roles.items() if role == "router"}
    assert of_router == {f"router.{part}.{kind}" for part in ("project", "norm") for kind in ("weight", "bias")}
    assert roles["table.weight"] == "embedding"
    assert (roles["out.weight"], roles["out.bias"]) == ("matrix", "vector")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Mixed, "both holds inner.weight, a matrix, and outer.weight, a head. Put them into two parameters"),
        (Forgetful, "parameters without a canonical name: both. No optimizer is told what they are. Let canonical"),
    ],
)
def test_a_parameter_that_is_two_things_or_has_no_name_is_named(model: type[nn.Module], says: str) -> None:
    with pytest.raises(ContractError, match=says):
        trained_parameters(model())


def test_parameters_without_facts_are_dense_tensors_of_their_own_names() -> None:
    parameters = TrainedParameters({"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(3))})
    assert [*parameters] == ["a", "b"]
    assert parameters.facts["a"] == ParameterFacts(name="a", role="matrix", side="dense", tensors={"a": (2, 3)})
    assert parameters.facts["b"].role == "vector"


class Told:
    """The facts that the optimizers of this process were told."""

    facts: ClassVar[list[Mapping[str, ParameterFacts]]] = []


@frozen
class Asking(moefw.OptimizerPlugin):
    """Remembers what it is told."""

    name: ClassVar[str] = "asking"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(update=("elementwise",))

    def build(self, parameters: TrainedParameters, lr: float) -> Any:
        Told.facts.append(parameters.facts)
        return torch.optim.SGD([*parameters.values()], lr)


def test_a_plan_tells_the_optimizer_what_a_run_does() -> None:
    """Also under FSDP, where it gets stand-ins of the shards' shapes; of layers that did not run it is told nothing."""
    tree = """
model: {vocab_size: 256, dim: 32, num_layers: 6, expert_dim: 16, num_experts: 4}
parallel: {dense: {shard: SHARD}, experts: {ep: RANKS}}
train: {tokens_per_step: 512, micro_batch: 1, seq_len: 64, optimizer: {use: asking}}
"""
    shared_out, alone = (
        resolved(
            tree.replace("SHARD", shard).replace("RANKS", str(ranks)),
            registry=registry(optimizers=[Asking]),
            world=ranks,
            machine=Machine(device="cpu"),
        )
        for shard, ranks in (("all", 2), ("1", 1))
    )
    Told.facts.clear()
    ledger(shared_out)
    (planned,) = Told.facts
    whole = trained_parameters(on_meta(alone)).facts
    assert len(planned) < len(whole)
    for name, facts in planned.items():
        assert evolve(facts, tensors={}) == evolve(whole[name], tensors={})
        assert facts.tensors.items() <= whole[name].tensors.items()


@frozen
class Silent(Asking):
    name: ClassVar[str] = "silent"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers()


@frozen
class WithRegion(Asking):
    """An optimizer of version 3.4, which said the same by offering its states."""

    name: ClassVar[str] = "with-region"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(region=(("optimizer", "bf16"),))


def test_an_optimizer_that_does_not_say_that_it_updates_elementwise_is_refused() -> None:
    problem = refusal("train: {optimizer: {use: silent}}", registry=registry(optimizers=[Silent]))
    assert problem.where == "spec.yaml:1:21 train.optimizer.use"
    assert problem.what.startswith("the assembly needs an update that is elementwise: ranks update the parts of")
    assert "the optimizer silent does not say that its own one is" in problem.what
    assert problem.fix.startswith('Let offers() say update=("elementwise",) if rows or columns alone get')


@pytest.mark.parametrize("plugin", [Asking, WithRegion])
def test_one_that_says_so_is_accepted_also_by_offering_its_states(plugin: type[moefw.OptimizerPlugin]) -> None:
    resolved(f"train: {{optimizer: {{use: {plugin.name}}}}}", registry=registry(optimizers=[plugin]))
