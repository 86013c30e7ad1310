"""Ranks share codes and scales of frozen weights, gather them as they are, and compute the bits of whole weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_freeze import untimed
from test_frozen_codes import DORA, FOLDERS, coded_weights, folders, losses_of, opened, tree
from torch import Tensor

import checkpoint_cases
import copies
import moefw
from command_here import moefw_says
from gathers import Gathers
from ledger_cases import PEAK, check, check_held
from moefw.compose.assembly import Assembly
from moefw.core.errors import ContractError
from moefw.core.stages import Batch
from moefw.planner import ledger
from moefw.runtime.compute.code_formats import FP8
from moefw.runtime.compute.coded_share import CodedShare
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.runtime.parallel.holders import holdings
from moefw.runtime.parallel.local_shards import all_of, local, whole
from moefw.testing.pool import RankPool
from moefw.training.faults.bad_values import bad_state
from moefw.training.measured import measure
from moefw.training.what_trains import parameters_of
from pairwise import deep, quick
from resolved_specs import resolved

__all__ = ["folders"]  # a fixture

SHARED = {"parallel": {"dense": {"shard": "all"}, "experts": {"shard": "all"}}}
Outcome = tuple[float, dict[str, Tensor]]


def of_ranks(folder: Path, form: str, parts: Mapping[str, Any]) -> Outcome:
    """Loss and whole gradients of a step, of micro-batches of two sequences."""
    world = dist.get_world_size()
    model, engine = opened(folder, form, world=world, **parts)
    sequences = torch.arange(parts["train"]["tokens_per_step"] // 16)
    ids = torch.randint(256, (len(sequences), 17), generator=torch.Generator().manual_seed(0))
    batches = [
        Batch(ids_BS=ids[own, :-1], labels_BS=ids[own, 1:], seeds_B=own)
        for own in sequences.chunk(engine.layout.size("dp"))[engine.layout.index("dp")].split(2)
    ]
    result = engine.step(batches, 0.0, untimed)
    gradients: dict[str, Tensor] = {}
    for holding in holdings(model):
        if holding.parameter.grad is not None:
            grad = whole(holding.parameter.grad)
            gradients |= {piece.name: piece.of(grad).clone() for piece in holding.pieces}
    return result.loss, gradients


def assert_same_bits(found: list[Outcome], wanted: list[Outcome]) -> None:
    for (loss, gradients), (other_loss, others) in zip(found, wanted, strict=True):
        assert loss == other_loss
        assert gradients.keys() == others.keys()
        assert any(grad.any() for grad in gradients.values())
        assert [name for name, grad in gradients.items() if not torch.equal(grad, others[name])] == []


def sized(world: int, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of a spec whose step has a micro-batch of two sequences for each rank."""
    return {**parts, "train": {"tokens_per_step": 32 * world, **parts.get("train", {})}}


WAYS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "loop": {"gemm": {"use": "loop"}},
    "recomputed": {"memory": [{"use": "recompute", "regions": ["layer"]}]},
    "offloaded": {"memory": [{"use": "offload", "regions": ["experts"], "min_bytes": 1}]},
    "dora": {"adapter": DORA},
    "experts alone": {"parallel": {"experts": {"shard": "all"}}},
    "gathered once": {
        "parallel": {"dense": {"shard": "all", "zero": 2}, "experts": {"shard": "all", "zero": 2}},
    },
    "reduced once": {
        "parallel": {"dense": {"shard": "all", "zero": 1}, "experts": {"shard": "all", "zero": 1}},
        "train": {"tokens_per_step": 128},
    },
}


@pytest.mark.parametrize("way", quick(WAYS, "grouped", "loop", "recomputed", "dora"))
@pytest.mark.parametrize("family", ["gpt_oss", "in_nvfp4", *deep("deepseek_v3", "qwen3_moe")])
def test_shared_codes_compute_the_bits_of_whole_ones(pool: RankPool, folders: Path, family: str, way: str) -> None:
    parts = sized(2, {**SHARED, **WAYS[way]})
    found = pool.run(of_ranks, 2, folders / family, "as_stored", parts)
    # Of two ranks, whose sum has no order.
    copies = {**parts, "parallel": {}}
    assert_same_bits(found, pool.run(of_ranks, 2, folders / family, "as_stored", copies))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "3 ranks, unevenly": (3, SHARED),
    "ep 2 with edp 2": (4, {"parallel": {"dense": {"shard": "all"}, "experts": {"ep": 2, "shard": "all"}}}),
    "two copies of two shares": (4, {"parallel": {"dense": {"shard": 2}, "experts": {"shard": 2}}}),
    "tp 2 and etp 2": (4, {"parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"etp": 2, "shard": "all"}}}),
    "merged": (2, {**SHARED, "pipeline": {"use": "merged"}, "train": {"tokens_per_step": 128}}),
    "pp 2": (4, {**SHARED, "parallel": {"pp": 2, **SHARED["parallel"]}, "pipeline": {"use": "1f1b"}}),
}


@pytest.mark.parametrize("layout", quick(LAYOUTS, "3 ranks, unevenly", "ep 2 with edp 2"))
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", *deep("deepseek_v3", "in_nvfp4")])
def test_a_layout_of_shares_computes_with_codes_what_it_does_with_values(
    pool: RankPool, folders: Path, family: str, layout: str
) -> None:
    world, parts = LAYOUTS[layout]
    if (family, layout) == ("deepseek_v3", "tp 2 and etp 2"):
        pytest.skip("half of a weight of 128 columns cuts its blocks of 128 x 128: test_frozen_codes has the refusal")
    found = pool.run(of_ranks, world, folders / family, "as_stored", sized(world, parts))
    assert_same_bits(found, pool.run(of_ranks, world, folders / family, "decoded", sized(world, parts)))


# What is held and sent.


def stored_and_sent(folder: Path) -> dict[str, Any]:
    """Bytes of codes that this rank stores, those that gathering sends, and those that are left after it."""
    world = dist.get_world_size()
    model: Any = opened(folder, "as_stored", world=world, **sized(world, SHARED))[0]
    shares = [local(parameter) for parameter in model.parameters() if isinstance(local(parameter), CodedShare)]
    unit = model.layers[-1].moe.experts
    with Gathers() as counted:
        unit.unshard()
    gathered = coded_weights(unit).values()
    parts = [part for weight in gathered for part in weight.parts]
    factors = sum(parameter.numel() * 4 for parameter in unit.parameters() if parameter.requires_grad)
    biases = sum(each.nbytes for each in unit.parameters() if not each.requires_grad and each.ndim < 3)
    unit.reshard()
    return {
        "stored": sum(part.nbytes for share in shares for part in share.parts),
        "sent": counted.nbytes,
        "of_unit": sum(part.numel() * part.itemsize for part in parts),
        "others": factors + biases,
        "left": sum(part.untyped_storage().nbytes() for part in parts),
    }


@pytest.mark.parametrize("family", FOLDERS)
def test_each_rank_stores_its_part_and_sends_no_values(pool: RankPool, folders: Path, family: str) -> None:
    model, _ = opened(folders / family, "as_stored")
    of_all = sum(weight.bytes_held for weight in coded_weights(model).values())
    for rank in pool.run(stored_and_sent, 2, folders / family):
        assert rank["stored"] == pytest.approx(of_all / 2, rel=0.001)
        assert rank["sent"] == pytest.approx((rank["of_unit"] + rank["others"]) / 2, rel=0.001)
        assert rank["left"] == 0


def sharded(folder: Path, world: int) -> Assembly:
    parts = sized(world, {**SHARED, "precision": {"use": "bf16"}})
    return resolved(json.dumps(tree(folder, "as_stored", **parts)), world=world)


@pytest.mark.parametrize("family", quick(FOLDERS, "deepseek_v3", "in_nvfp4"))
def test_a_plan_of_shared_codes_is_what_is_measured(folders: Path, family: str) -> None:
    check(sharded(folders / family, 2))


@pytest.mark.parametrize("family", quick(FOLDERS, "gpt_oss"))
def test_a_plan_counts_the_padding_of_uneven_shares(folders: Path, family: str) -> None:
    measured, plan = measure(sharded(folders / family, 3)), ledger(sharded(folders / family, 3))
    check_held(plan, measured)
    assert plan.peak is not None
    assert plan.peak.gathered == pytest.approx(measured.peak_held["gathered"], rel=0.001)
    assert plan.peak_bytes == pytest.approx(measured.peak, rel=PEAK)


def counted(folder: Path) -> dict[str, int]:
    """Frozen parameters of the whole model, by kind."""
    world = dist.get_world_size()
    model, engine = opened(folder, "as_stored", world=world, **sized(world, SHARED))
    session: Any = SimpleNamespace(model=model, layout=engine.layout)
    return dict(parameters_of(session).frozen)


def test_shares_without_their_padding_are_the_model(pool: RankPool, folders: Path) -> None:
    (alone,) = pool.run(counted, 1, folders / "qwen3_moe")
    assert alone["experts"] > 0
    assert pool.run(counted, 3, folders / "qwen3_moe") == [alone] * 3


def written_and_read(folder: Path) -> list[bool]:
    """Whether each weight that is written whole is read whole, on this rank."""
    world = dist.get_world_size()
    model = opened(folder, "as_stored", world=world, **sized(world, SHARED))[0]
    alike = []
    for parameter in [each for each in model.parameters() if isinstance(local(each), CodedShare)]:
        with torch.no_grad(), all_of(parameter) as weight:
            assert isinstance(weight, CodedWeight)
            for part in weight.parts:
                part.view(torch.uint8).copy_(torch.arange(part.nbytes).view(part.view(torch.uint8).shape) % 100)
        back = whole(parameter.detach())
        assert isinstance(back, CodedWeight)
        same = [
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(back.parts, weight.parts, strict=True)
        ]
        alike.append(all(same))
    return alike


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_written_whole_is_read_whole(pool: RankPool, folders: Path, world: int) -> None:
    for alike in pool.run(written_and_read, world, folders / "deepseek_v3"):
        assert alike
        assert all(alike)


def test_an_operation_that_needs_values_is_refused() -> None:
    weight = CodedWeight.empty((256, 128), FP8, torch.device("cpu"))
    share = CodedShare.of(weight, 0, 2)
    with pytest.raises(ContractError, match="a rank's share of a weight that is held as codes: there are no values"):
        share.float()


def damaged(folder: Path) -> tuple[str, str]:
    """What this rank says of a model before and after a scale that rank 0 stores becomes NaN."""
    model = opened(folder, "as_stored", world=2, **sized(2, SHARED))[0]
    share = next(local(each) for each in model.parameters() if isinstance(local(each), CodedShare))
    before = bad_state(model)
    if dist.get_rank() == 0:
        share.scales[0, 0] = torch.nan
    after = bad_state(model)
    return "" if before is None else before.what, "" if after is None else after.what


def test_a_damaged_scale_of_a_share_is_named_by_every_rank(pool: RankPool, folders: Path) -> None:
    for before, after in pool.run(damaged, 2, folders / "deepseek_v3"):
        assert before == ""
        assert after.startswith("layers.0.attention.q_a_proj.weight holds")


# Runs and folders.


def test_ranks_that_share_codes_resume_and_export_what_one_rank_would(folders: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a fox jumps over a dog\n" * 200)
    train = {"steps": 4, "checkpoint_every": 2, "keep_checkpoints": 9, "eval_tokens": 64}
    spec = tmp_path / "spec.yaml"
    sections = {"data": {"use": "text", "path": str(text)}, "run": {"dir": str(tmp_path / "run"), "device": "cpu"}}
    spec.write_text(json.dumps(tree(folders / "gpt_oss", "as_stored", train=train, **sections)))
    moefw_says("train", spec)
    alone = losses_of(tmp_path / "run")
    saved = checkpoint_cases.saved(tmp_path / "run" / "checkpoints" / "step-4")
    moefw_says("convert", "export", tmp_path / "run", tmp_path / "alone", "--adapter", "peft")
    shared = "parallel={dense: {shard: all}, experts: {shard: all}}"
    ended = copies.run("moefw", "train", spec, "--resume=2", shared)
    assert ended.returncode == 0, ended.stderr
    assert losses_of(tmp_path / "run") == pytest.approx(alone, rel=1e-5)
    folder = tmp_path / "run" / "checkpoints" / "step-4"
    again = checkpoint_cases.saved(folder)
    assert not [name for name in again if name.startswith("model/") and ".lora_" not in name]
    assert again.keys() == saved.keys()
    whole_run = losses_of(tmp_path / "run")
    ended = copies.run("moefw", "train", spec, "--resume=2", shared)
    assert ended.returncode == 0, ended.stderr
    assert losses_of(tmp_path / "run") == whole_run
    moefw_says("convert", "export", tmp_path / "run", tmp_path / "shared", "--adapter", "peft")
    wanted = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    for name, tensor in load_file(tmp_path / "shared" / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor, wanted.pop(name), rtol=1e-4, atol=1e-6)
    assert not wanted


def saved(folder: Path, out: Path, form: str) -> int:
    """Save a model of which ranks share frozen experts; return how many weights are codes."""
    frozen = {"weights": str(folder), "freeze": ["*.experts.*"], "frozen_weights": form}
    model = moefw.from_pretrained(folder, train=frozen, **SHARED)
    moefw.save_pretrained(model, out)
    return sum(isinstance(local(parameter), CodedShare) for parameter in model.module.parameters())


@pytest.mark.parametrize("family", ["in_nvfp4", "gpt_oss"])
def test_a_folder_of_shared_codes_is_that_of_their_values(
    pool: RankPool, folders: Path, family: str, tmp_path: Path
) -> None:
    assert all(pool.run(saved, 2, folders / family, tmp_path / "as_stored", "as_stored"))
    assert not any(pool.run(saved, 2, folders / family, tmp_path / "decoded", "decoded"))
    written, wanted = (load_file(tmp_path / form / "model.safetensors") for form in ("as_stored", "decoded"))
    assert written.keys() == wanted.keys()
    assert [name for name, values in written.items() if not torch.equal(values, wanted[name])] == []
