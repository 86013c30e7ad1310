"""The experts that a run chose are recorded and replayed, for the same tokens, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from command_here import complaint, moefw_says
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.optimizer import build_optimizer
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import DataError
from moefw.core.stages import Batch
from moefw.runtime.naming import initialise
from moefw.runtime.replayed_routes import DIFFERING, GIVEN
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL
from moefw.training.engine import Engine, StepResult
from moefw.training.routes.file import AGAIN, Wanted, drop_after
from moefw.training.routes.recorder import Recorder
from moefw.training.routes.replay import Replay
from pairwise import each_value
from run_cases import losses
from small_spec import small_spec

WANTED = Wanted(layers=(1, 2), num_experts=8, top_k=2, sequences=16, seq_len=16)
STEPS = (1, 2)
MODEL = {**SMALL["model"], "vocab_size": 62}
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one rank": (1, {}),
    "cp 2, ep 2": (2, {"dense": {"cp": 2}, "experts": {"ep": 2}}),
    "dp 2, tp 2, ep 4": (4, {"dense": {"tp": 2}, "experts": {"ep": 4}}),
    "pp 3": (3, {"pp": 3}),
}


def trained(recorded: Path, replayed: Path | None, parallel: Mapping[str, Any], seed: int = 0) -> list[float]:
    """Train on tokens that depend on the step alone, record routes and perhaps replay some; return losses. Collective."""
    return [result.loss for result in steps_of(recorded, replayed, parallel, seed)]


def steps_of(recorded: Path, replayed: Path | None, parallel: Mapping[str, Any], seed: int = 0) -> list[StepResult]:
    """The results of these steps."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    assembly = assemble_tree(
        {**SMALL, "model": MODEL, "parallel": parallel}, Marks("replay"), defaults=defaults(), world=world
    )
    layout, shared, device = open_layout(assembly, "cpu"), Shared(), torch.device("cpu")
    model: Any = build_model(assembly, layout, device, shared)
    initialise(model, seed=seed, std=model.init_std)
    optimizer = build_optimizer(assembly, model, layout, device, shared)
    engine, found = Engine(model, optimizer, layout, clip_norm=1.0, keep_routes=True), []
    for step in STEPS:
        mine = tokens(step).chunk(layout.size("dp"))[layout.index("dp")]
        batches = batches_of(mine)
        if replayed is not None:
            batches = Replay(replayed, WANTED, layout).given(step, batches)
        result = engine.step(batches, 1e-3, lambda *_: nullcontext())
        Recorder(recorded, layout, tuple(assembly.layers), assembly.site.dims.top_k).record(
            step, batches, result.routes
        )
        found.append(result)
    shared.close()
    return found


def batches_of(windows: Tensor) -> list[Batch]:
    return [Batch(ids_BS=part[:, :-1], labels_BS=part[:, 1:]) for part in windows.split(2)]


def alone(folder: Path) -> Replay:
    """Return the replay of a folder on one rank."""
    assembly = assemble_tree(SMALL, Marks("replay"), defaults=defaults(), world=1)
    return Replay(folder, WANTED, open_layout(assembly, "cpu"))


def tokens(step: int) -> Tensor:
    return torch.randint(61, (16, 17), generator=torch.Generator().manual_seed(step))


def routes_in(folder: Path) -> dict[str, Tensor]:
    files = {step: load_file(folder / f"step-{step}.safetensors") for step in STEPS}
    return {f"{step} {name}": tensor for step, file in files.items() for name, tensor in file.items()}


def same(one: Path, other: Path) -> bool:
    first, second = routes_in(one), routes_in(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def recorded(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[float]]]:
    """Routes and losses by layout."""
    folders = {name: tmp_path_factory.mktemp("routes") for name in LAYOUTS}
    return {
        name: (folders[name], pool.run(trained, world, folders[name], None, parallel)[0])
        for name, (world, parallel) in LAYOUTS.items()
    }


@pytest.mark.parametrize(
    ("there", "here"),
    [("one rank", "one rank"), *each_value(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1])],
)
def test_routes_of_any_layout_are_replayed_in_any_other(
    pool: RankPool, recorded: dict[str, tuple[Path, list[float]]], there: str, here: str, tmp_path: Path
) -> None:
    (routes, wanted), (world, parallel) = recorded[there], LAYOUTS[here]
    found = pool.run(trained, world, tmp_path, routes, parallel)[0]
    assert same(tmp_path, routes)
    assert found == wanted if here == there else found == pytest.approx(wanted, rel=1e-5)


def test_choices_follow_the_file_and_not_the_weights(
    recorded: dict[str, tuple[Path, list[float]]], tmp_path: Path
) -> None:
    routes, _ = recorded["dp 2, tp 2, ep 4"]
    trained(tmp_path / "free", None, {}, seed=4)
    trained(tmp_path / "replayed", routes, {}, seed=4)
    assert not same(tmp_path / "free", routes)
    assert same(tmp_path / "replayed", routes)


def counted(recorded: Path, replayed: Path, parallel: Mapping[str, Any], seed: int) -> list[tuple[float, float]]:
    """How many choices were given, and differ, in each step."""
    counts = [step.counts for step in steps_of(recorded, replayed, parallel, seed)]
    return [(each[GIVEN], each[DIFFERING]) for each in counts]


@pytest.mark.parametrize("layout", ["one rank", "cp 2, ep 2", "pp 3"])
def test_choices_that_a_router_would_not_have_made_are_counted(
    pool: RankPool, recorded: dict[str, tuple[Path, list[float]]], layout: str, tmp_path: Path
) -> None:
    routes, _ = recorded["one rank"]
    world, parallel = LAYOUTS[layout]
    choices = 2.0 * 2 * 16 * 16  # of two layers, for two experts of each token
    first, *_ = pool.run(counted, world, tmp_path, routes, parallel, 0)[0]
    assert first == (choices, 0.0)
    for given, differing in pool.run(counted, world, tmp_path, routes, parallel, 4)[0]:
        assert given == choices
        assert 0.5 * choices < differing < choices  # other weights: two of eight experts agree by chance


def in_layer_2(edit: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda file: file.update({"layer.2": edit(file["layer.2"]).contiguous()})


def with_ids(*ids: int) -> Callable[[dict[str, Tensor]], object]:
    def edit(routes: Tensor) -> Tensor:
        routes[3, 5] = torch.tensor(ids)
        return routes

    return in_layer_2(edit)


WRONG: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda file: file.pop("layer.1"), "lacks layer.1."),
    (lambda file: file.update({"layer.0": file["layer.1"].clone()}), "holds layer.0, and the model has no such layer"),
    (in_layer_2(Tensor.long), "layer.2 is I64 [16, 16, 2], not I16 [16, 16, 2]."),
    (in_layer_2(lambda routes: routes[:, 1:]), "layer.2 is I16 [16, 15, 2], not I16 [16, 16, 2]."),
    (with_ids(8, 0), "layer 2 of step 2: sequence 3, position 5 has an id outside of the 8 experts: [8, 0]."),
    (with_ids(-2, 0), "layer 2 of step 2: sequence 3, position 5 has an id outside of the 8 experts: [-2, 0]."),
    (with_ids(4, 4), "layer 2 of step 2: sequence 3, position 5 has an expert twice: [4, 4]."),
    (
        lambda file: file.update({"ids_sha256": file["ids_sha256"].roll(1, 0)}),
        "sequence 0 of step 2 holds other tokens",
    ),
]


@pytest.mark.parametrize(("damage", "says"), WRONG)
def test_a_wrong_file_is_named_with_its_step_and_layer(
    recorded: dict[str, tuple[Path, list[float]]],
    damage: Callable[[dict[str, Tensor]], object],
    says: str,
    tmp_path: Path,
) -> None:
    for step in STEPS:
        file = load_file(recorded["one rank"][0] / f"step-{step}.safetensors")
        if step == 2:
            damage(file)
        save_file(file, tmp_path / f"step-{step}.safetensors")
    replay = alone(tmp_path)
    assert replay.given(1, batches_of(tokens(1)))[0].routes is not None
    with pytest.raises(DataError) as caught:
        replay.given(2, batches_of(tokens(2)))
    assert says in str(caught.value)
    assert str(tmp_path / "step-2.safetensors") in str(caught.value)


def test_a_dropped_choice_is_replayed_as_one(recorded: dict[str, tuple[Path, list[float]]], tmp_path: Path) -> None:
    for step in STEPS:
        file = load_file(recorded["one rank"][0] / f"step-{step}.safetensors")
        with_ids(-1, -1)(file)
        save_file(file, tmp_path / f"step-{step}.safetensors")
    trained(tmp_path / "out", tmp_path, {})
    assert same(tmp_path / "out", tmp_path)


def test_runs_record_and_replay(tmp_path: Path) -> None:
    spec, routes = small_spec(tmp_path), tmp_path / "run" / "routes"
    again = ["train", spec, f"train.replay_routes={routes}", f"run.dir={tmp_path}/again"]
    moefw_says("train", spec, "train.record_routes=true")
    moefw_says(*again, "train.record_routes=true", "train.checkpoint_every=1")
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    assert same(tmp_path / "again" / "routes", routes)
    assert f"{routes}/step-3.safetensors is missing." in complaint(*again, "train.steps=3", "--resume")
    assert "sequence 0 of step 2 holds other tokens" in complaint(*again, "run.seed=1", "--resume=1")
    over = f"train.replay_routes={tmp_path}/again/routes"
    assert "would write over" in complaint(*again, over, "train.record_routes=true", "--resume=1")


def test_a_run_that_goes_back_forgets_later_steps(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        (tmp_path / f"step-{step}.safetensors").touch()
    drop_after(tmp_path, 9)
    assert [path.name for path in tmp_path.iterdir()] == ["step-9.safetensors"]


def test_a_run_that_goes_back_leaves_files_that_are_none_of_its_own(tmp_path: Path) -> None:
    names = {f"step-{what}.safetensors" for what in ("copy", "11-copy", "011", "1_1", "٣", "")} | {
        "step-11.safetensors.bak"
    }
    for name in names:
        (tmp_path / name).touch()
    drop_after(tmp_path, 0)
    assert {path.name for path in tmp_path.iterdir()} == names


def test_every_file_is_checked_before_the_first_step(tmp_path: Path) -> None:
    torch.save({"layer.1": torch.ones(1)}, tmp_path / "step-1.safetensors")
    with pytest.raises(DataError) as caught:
        alone(tmp_path).check(range(1, 3))
    first, second = map(str, caught.value.problems)
    assert "step-1.safetensors is no whole safetensors file" in first
    assert "step-2.safetensors is missing." in second


def test_many_missing_or_wrong_files_are_told_in_a_few_lines(tmp_path: Path) -> None:
    for step in (*range(1, 21), 30):
        (tmp_path / f"step-{step}.safetensors").touch()
    with pytest.raises(DataError) as caught:
        alone(tmp_path).check(range(1, 100_001))
    problems = [*map(str, caught.value.problems)]
    assert [problem.split(" is ")[0] for problem in problems[:8]] == [
        f"{tmp_path}/step-{step}.safetensors" for step in range(1, 9)
    ]
    assert problems[8:] == [
        f"21 files in {tmp_path} are wrong; the first 8 are named. {AGAIN}",
        f"{tmp_path} has no file of steps 21-29 and 31-100000: 99,979 of 100,000 are missing. {AGAIN}",
    ]
