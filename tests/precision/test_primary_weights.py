"""FP8 primary weights: ranks gather codes and scales of the fp32 masters that they shard, and no number changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gathers import Gathers
from moefw.compose.machine import lone_site
from moefw.compose.optimizer import build_optimizer
from moefw.core.errors import ContractError, MoefwError, PlanError
from moefw.core.records import GemmPass
from moefw.core.site import Dims, Machine
from moefw.plugins.precision.quantized import encoders
from moefw.plugins.precision.quantized.blockwise_products import BlockwiseProducts
from moefw.plugins.precision.quantized.fp8_blockwise import FP8Blockwise
from moefw.plugins.precision.quantized.primary import SquareBlocks
from moefw.plugins.precision.quantized.recipe import EmulatedRecipe
from moefw.plugins.precision.quantized.scaled import ScaledRecipe
from moefw.runtime.compute.primary_weights import GatheredWeight, Master
from moefw.runtime.compute.product import linear
from moefw.runtime.naming import by_parameter, canonical_parameters
from moefw.runtime.parallel.local_shards import local
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.training import SMALL
from moefw.training import checkpoint
from moefw.training.checkpoint import Origin
from moefw.training.engine import Engine, StepResult, evaluate
from moefw.training.micro_batches import in_order
from moefw_kernels.quantize import quantize_fp8
from pairwise import each_value

SIZES = {
    "vocab_size": 64,
    "dim": 256,
    "num_layers": 2,
    "num_dense_layers": 1,
    "dense_dim": 512,
    "num_experts": 4,
    "expert_dim": 256,
    "shared_expert_dim": 256,
}
ATTENTION = {**SMALL["attention"], "num_kv_heads": 4, "head_dim": 128}
MOE = {"num_layers": 1, "num_dense_layers": 0, "shared_expert_dim": 0}
TRAIN = {**SMALL["train"], "tokens_per_step": 64, "micro_batch": 1}
ALL = {"dense": {"shard": "all"}, "experts": {"shard": "all"}}
SPLIT = {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}
HYBRID = {"dense": {"shard": 2}, "experts": {"shard": 2}}
POLICIES = {
    "recompute": {"use": "recompute", "regions": ["attention", "experts"]},
    "offload": {"use": "offload", "regions": ["attention", "experts"], "min_bytes": 0},
}


def layer_case(
    primary: str, parallel: Any = ALL, *, world: int = 1, sizes: Any = None, precision: Any = None, **parts: Any
) -> LayerCase:
    recipe = {"use": "fp8-blockwise", "backend": "emulate", "primary_weights": primary, **(precision or {})}
    given: dict[str, Any] = {
        "attention": ATTENTION,
        "parallel": parallel,
        "precision": recipe,
        "train": TRAIN,
        **parts,
    }
    world = dist.get_world_size() if dist.is_initialized() else world
    return whole_model(world, parts=given, plugins=(), sizes={**SIZES, **(sizes or {})})


@dataclass
class Trained:
    results: list[StepResult]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    heldout: float


@contextmanager
def no_clock(*_: object) -> Iterator[None]:
    yield


def trained(
    primary: str,
    parallel: Any,
    *,
    first: int = 0,
    steps: int = 3,
    read: Path | None = None,
    write: Path | None = None,
    **given: Any,
) -> Trained:
    """Train from step ``first``, from a checkpoint or the start; return this rank's tensors, and the results of each step."""
    model, assembly, layout, shared = open_model(layer_case(primary, parallel, **given))
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    if read is not None:
        checkpoint.load(read, model, optimizer)
    engine = Engine(model, optimizer, layout, clip_norm=assembly.spec.train.clip_norm)
    gradients: list[dict[str, Tensor]] = []

    def look(*_: Any) -> None:
        found = {pieces[0].name: parameter.grad for parameter, pieces in by_parameter(model)}
        gradients.append({name: local(grad).clone() for name, grad in found.items() if grad is not None})

    optimizer.register_step_pre_hook(look)
    numbers = range(first, steps)
    results = [engine.step(global_batch(assembly, layout, n), assembly.spec.train.lr, no_clock) for n in numbers]
    if write is not None:
        checkpoint.save(write, steps, model, optimizer, layout, Origin(), keep=1)
    weights = {pieces[0].name: local(parameter.detach()).clone() for parameter, pieces in by_parameter(model)}
    heldout = evaluate(model, global_batch(assembly, layout, 7), layout)
    shared.close()
    return Trained(results, gradients, weights, heldout)


def assert_same(got: list[Trained], wanted: list[Trained]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.results == other.results
        assert one.heldout == other.heldout
        assert one.weights.keys() == other.weights.keys()
        assert len(one.weights) > 10
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
        for grads, others in zip(one.gradients, other.gradients, strict=True):
            assert grads.keys() == others.keys() == one.weights.keys()
            assert all(torch.equal(grads[name], others[name]) for name in grads)


@pytest.mark.parametrize(
    ("world", "parallel", "gemm", "scales"),
    [
        pytest.param(2, ALL, "grouped", "power_of_two", marks=pytest.mark.deep),
        pytest.param(2, ALL, "loop", "power_of_two", marks=pytest.mark.deep),
        pytest.param(2, ALL, "loop", "fp32", marks=pytest.mark.deep),
        (4, SPLIT, "grouped", "fp32"),
        pytest.param(4, SPLIT, "loop", "power_of_two", marks=pytest.mark.deep),
        pytest.param(4, HYBRID, "grouped", "power_of_two", marks=pytest.mark.deep),
    ],
)
def test_training_is_that_of_quantizing_the_gathered_fp32_weight(
    pool: RankPool, world: int, parallel: Any, gemm: str, scales: str
) -> None:
    given: dict[str, Any] = {
        "gemm": {"use": gemm},
        "precision": {"scales": scales},
        "sizes": {"shared_expert_dim": 0},
        "steps": 2,
    }
    wanted = pool.run(partial(trained, **given), world, "fp32", parallel)
    assert_same(pool.run(partial(trained, **given), world, "fp8", parallel), wanted)


@pytest.mark.parametrize(("gemm", "policy"), each_value(("grouped", "loop"), POLICIES))
def test_memory_policies_change_no_bit(pool: RankPool, gemm: str, policy: str) -> None:
    """Recomputed regions gather again, and weights are not offloaded; states of the optimizer rest in bf16."""
    given: dict[str, Any] = {"gemm": {"use": gemm}, "steps": 2, "sizes": MOE}
    states = [{"use": "optimizer-bf16"}]
    wanted = pool.run(partial(trained, memory=states, **given), 2, "fp32", ALL)
    assert_same(pool.run(partial(trained, memory=[POLICIES[policy], *states], **given), 2, "fp8", ALL), wanted)


def test_a_clip_of_logits_scales_masters(pool: RankPool) -> None:
    """Muon multiplies in fp32: a product of bf16 matrices takes many times as long on most CPUs."""
    given: dict[str, Any] = {
        "sizes": MOE,
        "steps": 2,
        "attention": {**ATTENTION, "qk_norm": "none"},
        "train": {**TRAIN, "optimizer": {"use": "muon", "newton_schulz": "fp32", "qk_clip": 0.01}},
    }
    wanted = pool.run(partial(trained, **given), 2, "fp32", ALL)
    assert all((result.largest_logit or 0.0) > 0.01 for result in wanted[0].results)
    assert_same(pool.run(partial(trained, **given), 2, "fp8", ALL), wanted)


def test_checkpoints_are_those_of_fp32_and_resume_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    given: dict[str, Any] = {"sizes": MOE}
    through = pool.run(partial(trained, **given), 2, "fp8", ALL)
    for name in ("fp32", "fp8"):
        pool.run(partial(trained, steps=2, write=tmp_path / name, **given), 2, name, ALL)
    written = [sorted((tmp_path / name / "checkpoints" / "step-2").glob("*.safetensors")) for name in ("fp32", "fp8")]
    assert written[0]
    assert [path.read_bytes() for path in written[0]] == [path.read_bytes() for path in written[1]]
    read = tmp_path / "fp8" / "checkpoints" / "step-2"
    resumed = pool.run(partial(trained, first=2, read=read, **given), 2, "fp8", ALL)
    for one, other in zip(resumed, through, strict=True):
        assert one.results == other.results[2:]
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@dataclass
class Unit:
    numel: int
    sent: int
    held: int
    left: int
    codes: int


def units(primary: str) -> dict[str, Unit]:
    """Gather each unit of GEMMs of a layer; return the bytes sent, and those of its matrices, gathered and resharded."""
    model, *_ = open_model(layer_case(primary))
    layers: Any = model.layers
    found = {}
    for name in ("attention", "moe.shared_expert", "moe.experts"):
        unit: Any = layers[1].get_submodule(name)
        with Gathers() as counted:
            unit.unshard()
        matrices = [parameter for parameter in unit.parameters() if parameter.ndim > 1]
        parts = [part for one in matrices for part in (one.parts if isinstance(one, GatheredWeight) else (one,))]
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}.values()
        held = sum(storage.nbytes() for storage in storages)
        codes = sum(isinstance(one, GatheredWeight) for one in matrices)
        unit.reshard()
        left = sum(storage.nbytes() for storage in storages)
        found[name] = Unit(sum(one.numel() for one in matrices), counted.nbytes, held, left, codes)
    return found


def test_a_unit_gathers_and_holds_codes_and_scales(pool: RankPool) -> None:
    """One byte an element and four a block: 0.2501 of fp32, without the norms of attention."""
    (fp32, *_), (fp8, *_) = pool.run(units, 2, "fp32"), pool.run(units, 2, "fp8")
    for name, unit in fp8.items():
        assert unit.numel == fp32[name].numel > 0
        assert unit.sent <= 0.251 * fp32[name].sent
        assert fp32[name].sent >= 4 * unit.numel // 2
        assert unit.held == unit.numel + unit.numel // (128 * 128) * 4
        assert fp32[name].held == 4 * unit.numel
        assert unit.left == 0
        assert unit.codes > 0
        assert fp32[name].codes == 0


def quantized_whole(primary: str) -> tuple[int, int]:
    """Run a batch forward and backward; return how often weights were quantized whole, and as shards."""
    model, assembly, layout, _ = open_model(layer_case(primary))
    whole, shards = [], []

    def quantize(x: Tensor, **given: Any) -> Any:
        if given["block"] == (128, 128):
            whole.append(x)
        return quantize_fp8(x, **given)

    def encode(codec: SquareBlocks, shard: Tensor) -> Any:
        shards.append(shard)
        return original(codec, shard)

    original = SquareBlocks.encode
    with patch.object(encoders, "quantize_fp8", quantize), patch.object(SquareBlocks, "encode", encode):
        model(global_batch(assembly, layout, 0)[0]).loss_sum.backward()
    return len(whole), len(shards)


def test_shards_are_quantized_once_a_gather_and_gathered_weights_never(pool: RankPool) -> None:
    """A dense layer of seven matrices and an MoE layer of nine, each gathered in forward and in backward."""
    assert pool.run(quantized_whole, 2, "fp32")[0] == (32, 0)
    assert pool.run(quantized_whole, 2, "fp8")[0] == (0, 32)


def masters(keep_bf16: tuple[str, ...]) -> set[str]:
    model, *_ = open_model(layer_case("fp8", precision={"keep_bf16": list(keep_bf16)}))
    found = {piece.name: piece.parameter for piece in canonical_parameters(model)}
    return {name for name, parameter in found.items() if isinstance(cast(Any, parameter).to_local().detach(), Master)}


def test_what_a_recipe_spares_and_what_is_no_matrix_is_gathered_as_before(pool: RankPool) -> None:
    everything, fewer = pool.run(masters, 2, ())[0], pool.run(masters, 2, ("*.attention",))[0]
    assert fewer == {name for name in everything if ".attention." not in name}
    assert len(everything) == (4 + 3) + (4 + 3 + 3 * 4)
    assert not [name for name in everything if "norm" in name or "router" in name or "embed" in name or "head" in name]


def refusal(sizes: Any, given: Any) -> str:
    with pytest.raises(PlanError) as error:
        open_model(layer_case("fp8", sizes=sizes, **given))
    return str(error.value)


@pytest.mark.parametrize(
    ("sizes", "given", "says"),
    [
        (
            {},
            {"attention": {**ATTENTION, "num_kv_heads": 1}},
            "GroupedQueryAttention.k_proj.weight is 128x256: no whole",
        ),
        ({"shared_expert_dim": 320}, {}, "SwiGLU.gate_proj.weight is 320x256"),
        ({"expert_dim": 192}, {"gemm": {"use": "loop"}}, "LoopExperts.gate_up.0 is 384x256"),
        ({"expert_dim": 192}, {}, "GroupedExperts.down is 4x256x192: no whole blocks of 128x128. "),
        ({"num_experts": 3, "expert_dim": 128}, {}, "2 ranks cannot shard 3 experts evenly. Use gemm: loop"),
    ],
)
def test_shards_that_are_no_whole_blocks_are_refused(pool: RankPool, sizes: Any, given: Any, says: str) -> None:
    for message in pool.run(refusal, 2, sizes, given):
        assert says in message
        assert "keep_bf16" in message


def test_without_shared_out_parameters_there_is_nothing_to_gather() -> None:
    with pytest.raises(MoefwError, match=r"precision\.primary_weights: .* shards none\. Shard parameters"):
        layer_case("fp8", {}, world=2).resolve()
    layer_case("fp32", {}, world=2).resolve()


def test_a_rank_that_is_alone_opens_what_others_trained() -> None:
    layer_case("fp8", {}, world=1).resolve()


def test_transformer_engine_takes_no_codes() -> None:
    site = lone_site(Dims(model_dim=128, expert_dim=128, num_experts=4, top_k=2), Machine())
    (problem,) = FP8Blockwise(backend="te", primary_weights="fp8").check(site)
    assert "takes no codes" in problem.what


def gathered(values: Tensor) -> GatheredWeight:
    return GatheredWeight(SquareBlocks(power_of_two=True).encode(values), 128)


def test_matrices_are_cut_and_joined_between_blocks() -> None:
    values, x, grad = torch.randn(512, 256), torch.randn(7, 256), torch.randn(7, 384)
    recipe = EmulatedRecipe(encoders.Blockwise(power_of_two=True), activations="bf16")
    outcomes = []
    for weight in (nn.Parameter(gathered(values)), nn.Parameter(values)):
        given = x.clone().requires_grad_()
        out = linear(given, torch.cat([weight[384:], weight[128:384]]), recipe)
        out.backward(grad)
        assert type(weight.grad) is Tensor
        outcomes.append((out.detach(), given.grad, weight.grad))
    for got, wanted in zip(*outcomes, strict=True):
        assert got is not None
        assert wanted is not None
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("shape", [(256, 384), (2, 128, 256)])
@pytest.mark.parametrize("during", ["fprop", "dgrad"])
def test_operands_that_stay_codes_are_those_of_the_fp32_weight(shape: tuple[int, ...], during: GemmPass) -> None:
    values = torch.randn(shape)
    encoder = encoders.Blockwise(power_of_two=True, primary=SquareBlocks(power_of_two=True))
    recipe = ScaledRecipe(encoder, BlockwiseProducts(), activations="bf16")
    got, wanted = (recipe.quantize(weight, role="weight", during=during) for weight in (gathered(values), values))
    assert (got.shape, got.codes.axis, got.codes.block) == (wanted.shape, wanted.codes.axis, wanted.codes.block)
    assert got.codes.codes.stride() == wanted.codes.codes.stride()
    assert torch.equal(got.codes.codes.view(torch.uint8), wanted.codes.codes.view(torch.uint8))
    assert torch.equal(got.codes.scales, wanted.codes.scales)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w[:64],
        lambda w: w.as_strided((256,), (1,)),
        lambda w: w[:, :128],
        lambda w: w * 2,
        lambda w: w.float() @ w,
    ],
)
def test_a_gathered_weight_has_no_values(use: Any) -> None:
    with pytest.raises(ContractError, match="there are no values"):
        use(gathered(torch.randn(256, 256)))


def test_the_gradient_of_a_gathered_weight_is_plain_fp32() -> None:
    """FSDP2 requests zeros for a weight that did not contribute to the loss."""
    zeros = torch.zeros_like(gathered(torch.randn(128, 256)))
    assert type(zeros) is Tensor
    assert torch.equal(zeros, torch.zeros(128, 256))


def test_a_master_is_written_through_and_its_shards_are_masters() -> None:
    values = torch.randn(256, 128)
    master = Master(values, SquareBlocks(power_of_two=True))
    first, _ = master.detach().chunk(2)
    first.copy_(torch.ones(128, 128))
    first.mul_(2)
    assert isinstance(first, Master)
    assert bool((values[:128] == 2).all())
    assert type(master + 1) is Tensor
    assert type(torch.zeros_like(master)) is Tensor


def codes_made() -> tuple[int, int]:
    """Return how many shards a rank quantizes in two steps of several micro-batches, and how many masters it has."""
    model, assembly, layout, shared = open_model(layer_case("fp8"))
    batches = [replace(batch, loss_scale=torch.ones(())) for batch in global_batch(assembly, layout, 0)]
    assert len(batches) > 1
    masters = [one for one in model.parameters() if isinstance(cast(Any, one).to_local(), Master)]
    made, encode = list[Tensor](), SquareBlocks.encode

    def counted(codec: SquareBlocks, shard: Tensor) -> tuple[Tensor, Tensor]:
        made.append(shard)
        return encode(codec, shard)

    with patch.object(SquareBlocks, "encode", counted):
        for _ in range(2):
            in_order(model)(batches, no_clock)
    shared.close()
    return len(made), len(masters)


def test_a_rank_quantizes_each_shard_once_a_step(pool: RankPool) -> None:
    for made, masters in pool.run(codes_made, 2):
        assert made == 2 * masters > 0
