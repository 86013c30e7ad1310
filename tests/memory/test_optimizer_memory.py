"""Optimizer states in bf16, in 8 bits and off the device, in whole runs: layouts, resuming, losses, refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

import moefw
from checkpoint_cases import saved
from moefw.compose.optimizer import build_optimizer
from moefw.plugins.memory.offload import OptimizerOffload
from moefw.plugins.memory.offload.buffers import STATES, host_memory
from moefw.plugins.memory.optimizer_8bit import Optimizer8bit
from moefw.plugins.memory.optimizer_bf16 import OptimizerBF16
from moefw.testing.pool import RankPool
from moefw.testing.suites.optimizer_memory_policy import OptimizerMemoryPolicySuite
from moefw.testing.suites.optimizer_memory_policy_case import give_gradients
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.suites.watch import same_bits
from moefw.testing.training import SMALL, short_run
from moefw.training import checkpoint
from moefw.training.checkpoint import Origin
from moefw.training.engine import Engine
from pairwise import deep, each_value

CPU = torch.device("cpu")
Memory = Sequence[Mapping[str, Any]]
SIZES: Mapping[str, int] = {"vocab_size": 64, "expert_dim": 32, "shared_expert_dim": 32}
"""Two ranks of tp or etp have whole blocks of 16 columns."""

BF16: Memory = [{"use": "optimizer-bf16"}]
BITS: Memory = [{"use": "optimizer-8bit", "block": 16}]
UP: Memory = [{"use": "optimizer-offload", "bucket_bytes": 2048}]
DOWN: Memory = [{"use": "optimizer-offload", "update": "host", "bucket_bytes": 2048}]
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one rank": (1, {}),
    "ep 2": (2, {"experts": {"ep": 2}}),
    "all sharded": (2, {"dense": {"shard": "all"}, "experts": {"shard": "all"}}),
    "tp 2, etp 2": (2, {"dense": {"tp": 2}, "experts": {"etp": 2}}),
    "ep 2, sharded": (4, {"dense": {"shard": 2}, "experts": {"ep": 2, "shard": 2}}),
}


def trained(tree: Mapping[str, Any], world: int, steps: range, folder: str) -> None:
    """Take steps with given gradients, from the checkpoint before them if there is one, and save the next one."""
    parts = {"gemm": {"use": "grouped"}, **tree}
    model, assembly, layout, shared = open_model(whole_model(world, parts=parts, plugins=(), sizes=SIZES))
    optimizer = build_optimizer(assembly, model, layout, CPU, shared)
    if steps.start:
        checkpoint.load(Path(folder) / "checkpoints" / f"step-{steps.start}", model, optimizer)
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
    checkpoint.save(Path(folder), steps.stop, model, optimizer, layout, Origin(), keep=9)
    shared.close()


def run(pool: RankPool, folder: Path, memory: Memory, layout: str, steps: range, **parts: Any) -> dict[str, Tensor]:
    world, parallel = LAYOUTS[layout]
    pool.run(trained, world, {"memory": memory, "parallel": parallel, **parts}, world, steps, str(folder))
    return saved(folder / "checkpoints" / f"step-{steps.stop}")


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    return [name for name in one.keys() | other.keys() if not same_bits(one[name], other[name])]


@pytest.mark.parametrize(("memory", "layout"), each_value((UP, DOWN), ("one rank", "tp 2, etp 2", "ep 2, sharded")))
def test_offload_changes_no_bit(pool: RankPool, tmp_path: Path, memory: Memory, layout: str) -> None:
    plain = run(pool, tmp_path / "plain", [], layout, range(3))
    assert differing(plain, run(pool, tmp_path / "moved", memory, layout, range(3))) == []


@pytest.mark.parametrize("gemm", ["grouped", *deep("loop")])
@pytest.mark.parametrize(("memory", "dtype"), [(BF16, torch.bfloat16), (BITS, torch.uint8)], ids=["bf16", "8bit"])
def test_no_layout_changes_a_bit_of_rounded_states(
    pool: RankPool, tmp_path: Path, memory: Memory, dtype: torch.dtype, gemm: str
) -> None:
    alone, *others = (run(pool, tmp_path / name, memory, name, range(3), gemm={"use": gemm}) for name in LAYOUTS)
    assert alone["optimizer/exp_avg_sq/head.weight"].dtype is dtype
    for other in others:
        assert differing(alone, other) == []


def test_a_checkpoint_holds_codes_and_scales_of_matrices_and_fp32_states_of_vectors(
    pool: RankPool, tmp_path: Path
) -> None:
    held = run(pool, tmp_path, BITS, "tp 2, etp 2", range(1))
    down = "layers.1.moe.experts.0.down_proj.weight"
    num_rows, num_columns = held[f"model/{down}"].shape
    for key in ("exp_avg", "exp_avg_sq"):
        assert held[f"optimizer/{key}/{down}"].dtype is torch.uint8
        scales = held[f"optimizer/{key}_scale/{down}"]
        assert scales.dtype is torch.float32
        assert scales.shape == (num_rows, num_columns // 16)
        assert held[f"optimizer/{key}/norm.weight"].dtype is torch.float32
        assert f"optimizer/{key}_scale/norm.weight" not in held


@pytest.mark.parametrize(
    "memory",
    [[*BF16, *UP], [*DOWN, *BITS], *deep([*UP, *BF16], [*DOWN, *BF16], [*BITS, *UP])],
    ids=["bf16 up", "down 8bit", "up bf16", "down bf16", "8bit up"],
)
def test_rounded_states_off_the_device_are_the_same_bits(pool: RankPool, tmp_path: Path, memory: Memory) -> None:
    on_device = [policy for policy in memory if policy["use"] != "optimizer-offload"]
    for layout in ("one rank", "all sharded"):
        plain = run(pool, tmp_path / f"plain {layout}", on_device, layout, range(3))
        assert differing(plain, run(pool, tmp_path / f"moved {layout}", memory, layout, range(3))) == []


@pytest.mark.parametrize(
    "memory",
    [*deep(BF16, UP, [*UP, *BITS], BITS), [*DOWN, *BF16]],
    ids=["bf16", "offload", "offloaded 8bit", "8bit", "offloaded bf16"],
)
def test_a_resumed_run_goes_on_bit_for_bit_in_any_layout(pool: RankPool, tmp_path: Path, memory: Memory) -> None:
    through = run(pool, tmp_path / "through", memory, "one rank", range(4))
    legs = {"all sharded": range(2), "tp 2, etp 2": range(2, 3), "ep 2": range(3, 4)}
    for layout, steps in legs.items():
        resumed = run(pool, tmp_path / "legs", memory, layout, steps)
    assert differing(through, resumed) == []


MUON = {"train": {**SMALL["train"], "optimizer": {"use": "muon", "bucket_bytes": 1}}}
"""Each matrix by itself, so that no layout rounds differently."""
MOVED = [
    (DOWN, "ep 2, sharded"),
    pytest.param(UP, "tp 2, etp 2", marks=pytest.mark.deep),
    pytest.param(DOWN, "one rank", marks=pytest.mark.deep),
]


@pytest.mark.parametrize(("memory", "layout"), MOVED)
def test_offload_changes_no_bit_of_muon(pool: RankPool, tmp_path: Path, memory: Memory, layout: str) -> None:
    plain = run(pool, tmp_path / "plain", [], layout, range(3), **MUON)
    assert "optimizer/momentum_buffer/layers.0.attention.q_proj.weight" in plain
    assert differing(plain, run(pool, tmp_path / "moved", memory, layout, range(3), **MUON)) == []


@pytest.mark.parametrize(
    "memory",
    [BITS, *deep([], BF16, UP, [*BITS, *UP], [*DOWN, *BF16])],
    ids=["8bit", "plain", "bf16", "offload", "offloaded 8bit", "offloaded bf16"],
)
def test_muon_goes_on_bit_for_bit_in_any_layout(pool: RankPool, tmp_path: Path, memory: Memory) -> None:
    through = run(pool, tmp_path / "through", memory, "one rank", range(4), **MUON)
    legs = {"all sharded": range(2), "tp 2, etp 2": range(2, 3), "ep 2, sharded": range(3, 4)}
    for layout, steps in legs.items():
        resumed = run(pool, tmp_path / "legs", memory, layout, steps, **MUON)
    # PyTorch's AdamW rounds parts of a norm otherwise, which are shorter than a vector of the CPU.
    assert [name for name in differing(through, resumed) if "norm" not in name] == []
    states = {through[name].dtype for name in through if name.startswith("optimizer/momentum_buffer/")}
    rounded = {"optimizer-bf16": torch.bfloat16, "optimizer-8bit": torch.uint8}
    assert states == {next((rounded[each["use"]] for each in memory if each["use"] in rounded), torch.float32)}


def test_states_are_rounded_to_nearest_where_a_run_goes_on_in_bf16_and_widened_back(
    pool: RankPool, tmp_path: Path
) -> None:
    wide = run(pool, tmp_path, [], "ep 2", range(2))
    narrow = run(pool, tmp_path, [*BF16, *UP], "all sharded", range(2, 2))
    moments = [name for name in wide if name.startswith("optimizer/exp_avg")]
    assert moments
    for name in moments:
        assert same_bits(narrow[name], wide[name].bfloat16())
    again = run(pool, tmp_path, [], "one rank", range(2, 2))
    for name in moments:
        assert same_bits(again[name], narrow[name].float())
    assert [name for name in differing(wide, again) if name not in moments] == []


def test_other_seeds_round_otherwise(pool: RankPool, tmp_path: Path) -> None:
    one = run(pool, tmp_path / "one", BF16, "one rank", range(1))
    other = run(pool, tmp_path / "other", BF16, "one rank", range(1), run={"device": "cpu", "seed": 4})
    assert "optimizer/exp_avg/embed.weight" in differing(one, other)


def losses(memory: Memory, beta2: float) -> list[float]:
    """Return the losses of 30 steps that memorize one batch."""
    train = {**SMALL["train"], "lr": 1e-2, "optimizer": {"use": "adamw", "beta2": beta2}}
    case = whole_model(1, parts={"memory": memory, "train": train}, plugins=(), sizes={"num_layers": 2})
    model, assembly, layout, shared = open_model(case)
    engine = Engine(model, build_optimizer(assembly, model, layout, CPU, shared), layout, clip_norm=1.0)
    batches = global_batch(assembly, layout, 0)[:2]
    return [engine.step(batches, train["lr"], lambda *_: nullcontext()).loss for _ in range(30)]


@pytest.mark.parametrize("beta2", [*deep(0.95), 0.999])
def test_rounded_states_train_like_fp32(pool: RankPool, beta2: float) -> None:
    eight_bits = [{"use": "optimizer-8bit"}]
    (plain,), (bf16,), (bits,) = (pool.run(losses, 1, memory, beta2) for memory in ([], BF16, eight_bits))
    assert plain[-1] < 0.01 * plain[0]
    # nats; the first loss is 4.1
    assert bf16[-1] == pytest.approx(plain[-1], abs=5e-3)
    assert bits[-1] == pytest.approx(plain[-1], abs=1e-2)


@frozen
class Stubborn(moefw.OptimizerPlugin):
    """An optimizer that declares nothing about its states."""

    name = "stubborn"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(update=("elementwise",))

    def build(self, parameters: Mapping[str, Any], lr: float) -> Any:
        return torch.optim.SGD(parameters.values(), lr=lr)


def refusal(memory: Memory, optimizer: str = "adamw") -> str:
    train = {**SMALL["train"], "optimizer": {"use": optimizer}}
    with pytest.raises(moefw.MoefwError) as caught:
        whole_model(1, parts={"memory": memory, "train": train}, plugins=(Stubborn,)).assemble()
    return str(caught.value)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ([*BF16, *BF16], "optimizer-bf16 and optimizer-bf16 both treat region 'optimizer'. Name it once."),
        ([*BF16, *BITS], "optimizer-8bit and optimizer-bf16 both store region 'optimizer' in a format of their own."),
        ([{"use": "optimizer-8bit", "block": 48}], "is 48; it must be a power of two from 16 to 4096"),
        ([{"use": "optimizer-8bit", "block": 8}], "is 8; it must be"),
        ([*UP, *DOWN], "optimizer-offload and optimizer-offload both treat region 'optimizer'."),
        ([{"use": "optimizer-bf16", "regions": ["optimizer"]}], "'regions' is not an option here."),
        ([{"use": "optimizer-bf16", "rounding": "up"}], "'up'"),
        ([{"use": "optimizer-offload", "bucket_bytes": 0}], "bucket_bytes"),
        (
            [{"use": "recompute", "regions": ["optimizer"]}],
            "adamw offers optimizer=bf16 or optimizer=8bit or optimizer=offload",
        ),
    ],
)
def test_what_cannot_be_is_refused(memory: Memory, says: str) -> None:
    assert says in refusal(memory)


def refused_on_ranks(pool: RankPool, error: type[Exception], call: Any, world: int, *arguments: Any) -> str:
    """Return the message with which all ranks refuse a call."""
    with pytest.raises(Exception, match=error.__name__) as caught:
        pool.run(call, world, *arguments)
    return str(caught.value)


def test_experts_cut_inside_blocks_are_refused_by_check() -> None:
    parallel = {"experts": {"etp": 2}}
    for memory, fix in (
        ([{"use": "optimizer-8bit"}], "block: 32"),
        ([{"use": "optimizer-8bit", "block": 64}], "block: 32"),
    ):
        parts = {"memory": memory, "parallel": parallel}
        with pytest.raises(moefw.PlanError) as caught:
            whole_model(2, parts=parts, plugins=(), sizes={"expert_dim": 64}).assemble()
        said = str(caught.value)
        assert "memory[0].block: " in said
        assert "etp: 2, cuts the 64 columns of the experts' down projections into parts of 32." in said
        assert said.endswith(f"Use {fix}, or split columns over fewer ranks.")
    fits = {"memory": [{"use": "optimizer-8bit", "block": 32}], "parallel": parallel}
    whole_model(2, parts=fits, plugins=(), sizes={"expert_dim": 64}).assemble()


def test_matrices_cut_inside_blocks_are_refused_by_name_when_the_optimizer_is_built(
    pool: RankPool, tmp_path: Path
) -> None:
    tree = {"memory": [{"use": "optimizer-8bit", "block": 32}], "parallel": {"dense": {"tp": 2}}}
    said = refused_on_ranks(pool, moefw.PlanError, trained, 2, tree, 2, range(1), str(tmp_path))
    assert "blocks of 32 values of a row have one scale, and a rank stores parts of blocks: columns" in said
    assert "of the 32 of layers.0.attention.o_proj.weight and of layers.1.attention.o_proj.weight" in said
    assert "Use block: 16, or split columns over fewer ranks." in said


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (BITS, [], "exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, step of embed.weight"),
        (BF16, BITS, "exp_avg, exp_avg_sq, step of embed.weight"),
        (BITS, [{"use": "optimizer-8bit", "block": 32}], "is (64, 2) there and (64, 1) here"),
    ],
    ids=["8bit to fp32", "bf16 to 8bit", "another block"],
)
def test_codes_go_on_as_codes_alone(pool: RankPool, tmp_path: Path, before: Memory, after: Memory, kept: str) -> None:
    run(pool, tmp_path, before, "one rank", range(1))
    tree = {"memory": after, "parallel": {}}
    said = refused_on_ranks(pool, moefw.CheckpointError, trained, 1, tree, 1, range(1, 2), str(tmp_path))
    assert kept in said
    assert "Use the optimizer, and the memory policies of its states, that it was trained with" in said


@pytest.mark.parametrize("memory", [BF16, BITS, UP], ids=["bf16", "8bit", "offload"])
def test_an_optimizer_that_does_not_offer_its_states_is_refused_a_policy(memory: Memory) -> None:
    said = refusal(memory, "stubborn")
    assert f"{memory[0]['use']} needs region optimizer to allow {memory[0]['use'].split('-')[1]}" in said
    assert said.endswith("Use an optimizer that offers it, or take the policy out.")


def test_host_memory_that_cannot_be_had_is_told() -> None:
    with pytest.raises(moefw.RunError, match=r"for states of the optimizer cannot be had .* Add optimizer-bf16"):
        host_memory(pinned=False, words=STATES)(1 << 62)


def test_regions_of_activations_and_of_the_optimizer_go_together(pool: RankPool) -> None:
    again = {"use": "recompute", "regions": ["experts"]}
    moved = {"use": "offload", "regions": ["attention"], "min_bytes": 0}
    tree = {**SMALL, "model": {**SMALL["model"], "vocab_size": 64}, "parallel": {"dense": {"shard": "all"}}}
    plain = pool.run(short_run, 2, tree, 3)[0]
    treated = pool.run(short_run, 2, {**tree, "memory": [again, moved, *DOWN]}, 3)[0]
    assert [one.loss for one in plain.results] == [one.loss for one in treated.results]
    assert differing(plain.last, treated.last) == []


class TestOptimizerBF16(OptimizerMemoryPolicySuite):
    plugin = OptimizerBF16


@pytest.mark.deep
class TestOptimizerBF16ToNearest(TestOptimizerBF16):
    options = {"rounding": "nearest"}


class TestOptimizer8bit(OptimizerMemoryPolicySuite):
    plugin = Optimizer8bit


@pytest.mark.deep
class TestOptimizer8bitToNearest(TestOptimizer8bit):
    options = {"rounding": "nearest"}


class TestOptimizerOffload(OptimizerMemoryPolicySuite):
    plugin = OptimizerOffload
    rtol = None
    options = {"bucket_bytes": 4096}


class TestOptimizerOffloadUpdatedOnTheHost(TestOptimizerOffload):
    options = {"update": "host", "bucket_bytes": 4096}
