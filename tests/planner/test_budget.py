"""GPU-hours and the price of a number of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import say
from moefw.planner import cluster
from moefw.planner.budget import Budget
from moefw.planner.data_files import Figure
from small_spec import small_spec


def budget(**others: Any) -> Budget:
    of_1412 = {"tokens": 1e12, "tokens_per_s_per_gpu": 1412.0, "gpus": 1024, "usd_per_gpu_hour": None}
    return Budget(**{**of_1412, **others})


def test_gpu_hours_are_tokens_over_the_speed_of_a_gpu() -> None:
    assert budget().gpu_hours == pytest.approx(196_726.47)
    assert budget().days == pytest.approx(196_726.47 / 1024 / 24, rel=1e-6)
    assert budget(gpus=2048).gpu_hours == budget().gpu_hours
    assert budget(gpus=2048).days == budget().days / 2


def test_the_price_is_that_of_the_cluster_with_its_source() -> None:
    price = Figure(value=2.5, source="a cloud, May 2026")
    assert budget(usd_per_gpu_hour=price).usd == pytest.approx(2.5 * 196_726.47, rel=1e-6)
    assert budget(usd_per_gpu_hour=price).in_words() == (
        "1e+12 tokens at 1,412 a second and GPU take 196,726 GPU-hours: 8 days of 1,024 GPUs\n"
        "they cost 491,816 USD at 2.5 an hour (a cloud, May 2026)"
    )
    assert budget().usd is None
    assert budget().in_words().endswith("their price is unknown: no cluster with a price was named")


def test_plan_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path))
    asked = ("plan", small_spec(tmp_path, ranks=2), "--tokens", "7.2e6", "--tokens-per-s-per-gpu", 1000)
    price = cluster.read("h100").usd_per_gpu_hour
    assert price is not None
    assert json.loads(say(*asked, "--cluster", "h100", "--json").out)["budget"] == {
        "tokens": 7.2e6,
        "tokens_per_s_per_gpu": 1000.0,
        "gpus": 2,
        "gpu_hours": 2.0,
        "days": 1 / 24,
        "usd_per_gpu_hour": price.value,
        "usd": 2 * price.value,
    }
    assert "7.2e+06 tokens at 1,000 a second and GPU take 2 GPU-hours: 0.0417 days of 2 GPUs" in say(*asked).out


def test_their_speed_is_the_predicted_one_unless_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path))
    said = json.loads(say("plan", small_spec(tmp_path), "--tokens", 10, "--cluster", "h100", "--json").out)
    assert said["budget"]["tokens_per_s_per_gpu"] == said["time"]["tokens_per_s_per_gpu"]


def test_tokens_without_a_speed_and_a_speed_without_tokens_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path))
    spec = small_spec(tmp_path)
    assert (
        "--tokens: their speed is unknown, without a time of a step. Add --cluster"
        in say("plan", spec, "--tokens", 10).err
    )
    said = say("plan", spec, "--tokens-per-s-per-gpu", 10)
    assert said.code == 2
    assert "--tokens-per-s-per-gpu is the speed of --tokens" in said.err


@pytest.mark.parametrize("option", ["--tokens", "--tokens-per-s-per-gpu"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, option: str, value: str) -> None:
    said = say("plan", small_spec(tmp_path), "--tokens", 10, option, value)
    assert said.code == 2
    assert f"Invalid value for '{option}': {value} is no finite number." in said.err
