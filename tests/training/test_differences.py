"""What a run does not carry on from a checkpoint: states start fresh or are dropped, and it says so with counts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checkpoint_cases
from checkpoint_cases import Tiny, everything, tiny
from command_here import complaint, moefw_says
from moefw.cli import main
from moefw.compose.optimizer import build_optimizer
from moefw.core.errors import CheckpointError
from moefw.plugins.optimizers.adamw import AdamW
from moefw.runtime.naming import state_tensors
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.optimizer_memory_policy_case import give_gradients
from moefw.testing.suites.runs import open_model, whole_model
from moefw.training import checkpoint
from moefw.training.checkpoint.optimizer_keys import keys_kept
from moefw.training.checkpoint.reading import opened
from pairwise import each_value

ADAMW = {"optimizer exp_avg": 2, "optimizer exp_avg_sq": 2, "optimizer step": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of step 4 with the states of AdamW."""
    (folder,) = checkpoint_cases.save(tmp_path / "run", 4)
    return folder


def with_sgd(momentum: float = 0.9) -> tuple[Tiny, torch.optim.Optimizer]:
    model = Tiny()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


class TestAnotherOptimizer:
    """The states of another optimizer are not carried along, and never silently."""

    @pytest.mark.parametrize(("momentum", "keeps"), [(0.9, "momentum_buffer"), (0.0, "no state")])
    def test_it_is_refused_with_both_lists_of_states(self, folder: Path, momentum: float, keeps: str) -> None:
        model, optimizer = with_sgd(momentum)
        with pytest.raises(CheckpointError) as refused:
            checkpoint.load(folder, model, optimizer)
        assert str(refused.value) == (
            f"{folder} is a checkpoint of another optimizer: it keeps exp_avg, exp_avg_sq, step of embed (and of 1 more), "
            f"and this one {keeps}. Use the optimizer, and the memory policies of its states, that it was "
            "trained with (train.optimizer and memory in spec.yaml of the run's folder), or train on from its weights, "
            "with fresh states of this one: train.fresh_optimizer=true."
        )
        assert not model.embed.any()

    def test_it_begins_with_fresh_states_if_it_may(self, folder: Path) -> None:
        model, optimizer = with_sgd()
        loaded = checkpoint.load(folder, model, optimizer, fresh_optimizer=True)
        assert model.embed.equal(tiny(1.0)[0].embed)
        assert not optimizer.state
        assert loaded.differences.counts() == {"fresh": {}, "dropped": ADAMW}

    def test_a_checkpoint_without_states_is_of_another_optimizer_unless_it_is_of_step_0(self, tmp_path: Path) -> None:
        layout = checkpoint_cases.layout_alone()
        for step in (0, 1):
            checkpoint.save(tmp_path, step, *with_sgd(0.0), layout, checkpoint.Origin(), keep=2)
        with pytest.raises(
            CheckpointError, match=r"no state of embed \(and of 1 more\), and this one exp_avg, exp_avg_sq, step"
        ):
            checkpoint.load(tmp_path / "checkpoints" / "step-1", *tiny())
        loaded = checkpoint.load(tmp_path / "checkpoints" / "step-0", *tiny())
        assert not loaded.differences.fresh_optimizer

    def test_the_same_optimizer_goes_on_also_where_another_one_may(self, folder: Path) -> None:
        model, optimizer = tiny()
        loaded = checkpoint.load(folder, model, optimizer, fresh_optimizer=True)
        saved, here = everything(*tiny(1.0)), everything(model, optimizer)
        assert saved.keys() == here.keys()
        assert all(saved[name].equal(here[name]) for name in saved)
        assert loaded.differences.counts() == {"fresh": {}, "dropped": {}}

    def test_all_that_is_wrong_is_said_at_once(self, folder: Path) -> None:
        model, optimizer = with_sgd()
        model.norm = nn.Parameter(torch.zeros(5))
        model.gate = nn.Parameter(torch.zeros(1))
        with pytest.raises(CheckpointError) as refused:
            checkpoint.load(folder, model, optimizer)
        of_model, of_optimizer = map(str, refused.value.problems)
        assert "another model: it lacks parameter gate; parameter norm is (3,) there and (5,) here." in of_model
        assert "another optimizer: it keeps exp_avg" in of_optimizer

    def test_all_ranks_begin_afresh_if_one_has_another_optimizer(self, pool: RankPool, folder: Path) -> None:
        assert pool.run(load_on_unlike_ranks, 2, folder) == [(False, ADAMW)] * 2


def load_on_unlike_ranks(folder: Path) -> tuple[bool, dict[str, int]]:
    """Load with AdamW on the first rank and SGD on the second; return whether there are states, and what is dropped."""
    model, optimizer = tiny() if dist.get_rank() == 0 else with_sgd()
    loaded = checkpoint.load(folder, model, optimizer, fresh_optimizer=True, group=dist.group.WORLD)
    return bool(optimizer.state), loaded.differences.counts()["dropped"]


@pytest.mark.parametrize("make", [tiny, with_sgd, lambda: with_sgd(0.0)], ids=["adamw", "momentum", "sgd"])
def test_asking_for_the_keys_of_an_optimizer_changes_nothing_and_tells_those_of_its_first_step(
    make: Callable[[], tuple[Tiny, torch.optim.Optimizer]],
) -> None:
    model, optimizer = make()
    parameters = [group["params"] for group in optimizer.param_groups]
    keys = keys_kept(optimizer)
    assert not optimizer.state
    assert not any(parameter.any() or parameter.grad is not None for parameter in model.parameters())
    assert all(group["params"] is own for group, own in zip(optimizer.param_groups, parameters, strict=True))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made = {parameter: optimizer.state.get(parameter, {}).keys() for parameter in model.parameters()}
    assert keys == made == keys_kept(optimizer)


LAYOUTS: Mapping[str, dict[str, Any]] = {"ep": {"experts": {"ep": 2}}, "pp": {"pp": 2}}
BIAS = {"routing": {"score": "sigmoid", "balance": [{"kind": "expert_bias", "rate": 0.01}]}}
NO_BIAS = {"routing": {"score": "sigmoid", "balance": []}}
DELAYED = {"use": "fp8-tensor", "backend": "emulate", "scaling": "delayed", "history": 3}


def recipe(**options: Any) -> dict[str, Any]:
    return {**BIAS, "precision": {**DELAYED, **options}}


CHANGES: Mapping[str, tuple[dict[str, Any], dict[str, Any], set[str], set[str]]] = {
    "a rule of balance begins": (NO_BIAS, BIAS, {"expert_bias"}, set()),
    "a rule of balance ends": (BIAS, NO_BIAS, set(), {"expert_bias"}),
    "a recipe begins": (BIAS, recipe(), {"history", "scale"}, set()),
    "a recipe ends": (recipe(), BIAS, set(), {"history", "scale"}),
    "a history grows": (recipe(), recipe(history=5), {"history"}, {"history"}),
}


def case(world: int, parts: dict[str, Any]) -> LayerCase:
    return whole_model(world, parts=parts, plugins=(), sizes={"vocab_size": 64})


def save_case(run_dir: Path, layer_case: LayerCase) -> None:
    """Save step 1 of a model whose states are all ones."""
    model, assembly, layout, shared = open_model(layer_case)
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    give_gradients(model, 0)
    optimizer.step()
    for state in state_tensors(model).values():
        state.fill_(1.0)
    checkpoint.save(run_dir, 1, model, optimizer, layout, checkpoint.Origin(), keep=1)
    shared.close()


def load_case(folder: Path, layer_case: LayerCase) -> tuple[dict[str, dict[str, int]], dict[str, bool]]:
    """Load into a new model; return the counts of what is not carried on, and which states come from the checkpoint."""
    model, assembly, layout, shared = open_model(layer_case)
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    new = {name: state.clone() for name, state in state_tensors(model).items()}
    loaded = checkpoint.load(folder, model, optimizer, group=layout.host_group())
    from_there = {name: bool(state.eq(1.0).all()) for name, state in state_tensors(model).items()}
    unchanged = {name: state.equal(new[name]) for name, state in state_tensors(model).items()}
    assert all(from_there[name] or unchanged[name] for name in new)
    shared.close()
    return loaded.differences.counts(), from_there


@pytest.mark.parametrize(("change", "layout"), each_value(CHANGES, LAYOUTS))
def test_states_of_parts_start_fresh_or_are_dropped_with_their_number_on_all_ranks(
    pool: RankPool, tmp_path: Path, change: str, layout: str
) -> None:
    before, now, fresh, dropped = CHANGES[change]
    save_case(tmp_path, case(1, before))
    folder = tmp_path / "checkpoints" / "step-1"
    (told,) = {
        json.dumps(counts)
        for counts, _ in pool.run(load_case, 2, folder, case(2, {**now, "parallel": LAYOUTS[layout]}))
    }
    counts = json.loads(told)
    assert (counts["fresh"].keys(), counts["dropped"].keys()) == (fresh, dropped)
    alone, from_there = load_case(folder, case(1, now))
    assert counts == alone
    saved = [name.removeprefix("state/") for name in opened(folder).tensors if name.startswith("state/")]
    for kind in dropped:
        assert counts["dropped"][kind] == sum(name.endswith(f".{kind}") for name in saved)
    for kind in fresh:
        assert counts["fresh"][kind] == sum(name.endswith(f".{kind}") for name in from_there)
    carried_on = {name for name, is_from_there in from_there.items() if is_from_there and name in saved}
    assert carried_on == {name for name in from_there if name in saved and name.rpartition(".")[2] not in fresh}


def test_a_run_says_what_it_does_not_carry_on_and_records_it(
    write_spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From AdamW to SGD and from an expert bias to none: the next steps have the learning rates that they would have."""
    spec = write_spec()
    bias = 'routing={"score": "sigmoid", "balance": [{"kind": "expert_bias", "rate": 0.01}]}'
    schedule = "train.schedule={use: cosine, warmup_steps: 4}"
    moefw_says("train", spec, bias, schedule)

    def sgd(self: AdamW, parameters: Mapping[str, Any], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters.values(), lr=lr, momentum=0.9)

    monkeypatch.setattr(AdamW, "build", sgd)
    again = ["train", spec, schedule, "routing={balance: []}", "train.steps=4", "--resume"]
    assert "step-2 is a checkpoint of another optimizer: it keeps exp_avg, exp_avg_sq, step of " in complaint(*again)
    said = moefw_says(*again, "train.fresh_optimizer=true")
    run = spec.parent / "run"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (resumed,) = [event for event in events if event["event"] == "resume"]
    assert resumed["fresh"] == {}
    assert resumed["dropped"].keys() == {"expert_bias", "optimizer exp_avg", "optimizer exp_avg_sq", "optimizer step"}
    assert "expert_bias of step-2 is dropped, 1 tensor: it has no place here" in said
    assert "states of this one start fresh, while steps and the learning rate go on" in said
    assert f"optimizer exp_avg of {resumed['dropped']['optimizer exp_avg']} tensors" in said
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] / 3e-3 for line in lines] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert "note: expert_bias starts fresh in 1 tensor" in noted("eval", run, bias)


def noted(*arguments: object) -> str:
    """Return the lines on stderr of a command that succeeds."""
    with redirect_stderr(io.StringIO()) as err, redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 0
    return err.getvalue()
