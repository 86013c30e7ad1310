"""Two plans beside each other: what differs in spec, memory, work and time, and how sure the faster one is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

from command_line import say
from moefw.planner.time import likeness
from small_spec import small_spec


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))


def test_a_spec_is_compared_with_itself_and_another_value(tmp_path: Path) -> None:
    spec = small_spec(tmp_path)
    asked = ("plan", spec, "--cluster", "h100", "--compare", "train.micro_batch=4")
    data = json.loads(say(*asked, "--json").out)
    assert data["ok"]
    assert data["differences"] == [["train.micro_batch", "2", "4"]]
    assert data["asked"] == [str(spec), f"{spec} train.micro_batch=4"]
    one, other = data["predictions"]
    assert one == {
        key: value
        for key, value in json.loads(say("plan", spec, "--cluster", "h100", "--json").out).items()
        if key in one
    } | {"try": []}
    assert data["speed"] == pytest.approx(other["time"]["tokens_per_s_per_gpu"] / one["time"]["tokens_per_s_per_gpu"])
    assert data["speed"] > 1.5  # half the launches for the same tokens
    shown = say(*asked).out
    assert f"B trains {data['speed']:.3g} times the tokens a second and GPU of A" in shown
    assert shown.count("the peak fits") == 2


def test_two_specs_are_compared_without_a_cluster_and_overrides_are_of_both(tmp_path: Path) -> None:
    one = small_spec(tmp_path, name="one")
    two = small_spec(tmp_path, name="seq_len=32", seq_len=32)  # a file, and no value
    shown = say("plan", one, "train.micro_batch=4", "--compare", two, "--compare", "gemm.use=loop").out
    lines = [line.split() for line in shown.splitlines()]
    assert ["train.seq_len", "64", "32"] in lines
    assert ["gemm.use", "grouped", "loop"] in lines
    assert not any(line[:1] == ["train.micro_batch"] for line in lines)
    assert "memory of a rank" in shown
    assert "work of a rank that has most, in a step" in shown
    assert "seconds" not in shown


def test_a_spec_beside_itself_differs_in_nothing_and_neither_is_faster(tmp_path: Path) -> None:
    spec = small_spec(tmp_path)
    shown = say("plan", spec, "--cluster", "h100", "--compare", spec).out
    assert "the specs are the same, but for run.dir" in shown
    assert "which of both is faster is not known" in shown


def test_work_is_compared_at_the_positions_that_have_most_wherever_memory_peaks(tmp_path: Path) -> None:
    """The peak of GPipe is at the last position, which has the head, and that of 1F1B at the first."""
    spec = tmp_path / "spec.yaml"
    tree = {
        "model": {"preset": "qwen3-moe-tiny", "num_layers": 4, "vocab_size": 512},
        "precision": {"use": "bf16"},
        "parallel": {"pp": 2},
        "train": {"micro_batch": 4, "tokens_per_step": 8192, "seq_len": 128},
    }
    spec.write_text(json.dumps(tree))
    gpipe, other = "pipeline={use: gpipe}", "pipeline={use: 1f1b}"
    plans = [json.loads(say("plan", spec, "--world", "2", asked, "--json").out) for asked in (gpipe, other)]
    assert [plan["position"] for plan in plans] == [1, 0]
    shown = say("plan", spec, "--world", "2", gpipe, "--compare", other).out
    (row,) = (line.split() for line in shown.splitlines() if line.startswith("products of forward"))
    assert row[-1] == "0"


def test_what_a_plan_takes_for_granted_is_told_of_each_plan(tmp_path: Path) -> None:
    spec = small_spec(tmp_path)
    shown = say(
        "plan", spec, "parallel.experts.ep=2", "--cluster", "h100", "--skew", "1.5", "--compare", "train.micro_batch=4"
    ).out
    data = json.loads(say("plan", spec, "parallel.experts.ep=2", "--cluster", "h100", "--skew", "1.5", "--json").out)
    for note in (*data["notes"], *data["time"]["notes"]):
        assert f"A: {note}" in shown
    assert shown.count("the error bar is of even routing") == 2


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    spec = small_spec(tmp_path)
    assert "are two specs" in say("plan", spec, "--compare", "a.yaml", "--compare", "b.yaml").err
    assert "neither --tokens nor --picture" in say("plan", spec, "--compare", "a=1", "--tokens", 1e9).err
    (problem,) = json.loads(say("plan", spec, "--compare", "train.micro_batch=0", "--json").out)["problems"]
    assert "train.micro_batch" in problem["where"]


def test_errors_of_one_model_and_software_partly_cancel_in_a_ratio() -> None:
    rows = likeness.held_out()
    own = rows[0].inputs
    alone = likeness.bar(own, rows).percent
    other_model = evolve(own, hidden=7168)
    same = likeness.ratio_percent(own, evolve(own, tp=2), rows)
    assert likeness.LEAST <= same < likeness.ratio_percent(own, other_model, rows)
    assert likeness.ratio_percent(own, other_model, rows) > alone
    far = evolve(own, gpus=2**20)
    assert likeness.ratio_percent(own, far, rows) > same
    assert likeness.ratio_percent(far, far, rows) == same


def test_a_ratio_is_a_quantile_over_pairs_of_layouts() -> None:
    rows = likeness.held_out()
    own = rows[0].inputs
    errors = (0.0, 0.1, 0.1, 0.1)
    pairs = [likeness.HeldOut(str(number), own, error) for number, error in enumerate(errors)]
    assert likeness.ratio_percent(own, own, pairs) == pytest.approx(10.0)
    one_layout = [evolve(row, layout="one") for row in pairs[:3]] + [evolve(pairs[3], error=0.0)]
    assert likeness.ratio_percent(own, own, one_layout) == pytest.approx(100 * (1.1 ** (2 / 3) - 1))
