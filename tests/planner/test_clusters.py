"""Clusters as data: every figure says where it is from, a wrong file says all that is wrong, and plans read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from moefw.commands.plan import plan
from moefw.core.errors import SpecError
from moefw.planner import cluster
from moefw.planner.cluster import Cluster, Gpu, Links, Peaks, Product
from moefw.planner.data_files import Figure
from moefw.planner.overhead import overhead_bytes
from moefw.planner.report import Ledger

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
CLUSTERS = ("b200", "b300", "gb200", "gb300", "h100", "h200")


def figures(value: Any) -> Iterator[Figure]:
    if isinstance(value, Figure):
        yield value
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from figures(getattr(value, field.name))


def test_there_are_the_clusters_of_published_runs() -> None:
    assert tuple(cluster.names()) == CLUSTERS


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_figure_has_a_source_or_says_how_it_was_estimated(name: str) -> None:
    found = [*figures(cluster.read(name))]
    assert len(found) >= 9
    for figure in found:
        assert ("https://" in figure.source) is not bool(figure.estimated), figure


def test_no_two_clusters_have_a_gpu_of_one_name() -> None:
    names = [name for each in CLUSTERS for name in cluster.read(each).gpu.names]
    assert len(names) == len(set(names))
    for name in names:
        assert len([*cluster.with_gpu(name)]) == 1


MINE = Cluster(
    about="two ranks: a laptop",
    gpu=Gpu(
        names=("a processor, 1 thread",),
        peak_tflops=Peaks(bf16=Figure(value=0.2, source="measured: 20 repeats, A/A spread 1 %")),
        memory_gib=Figure(value=8.0, source="measured"),
        memory_tb_per_s=Figure(value=0.01, source="measured"),
        products=(Product(format="fp32", rows=2, columns=3, depth=4, tflops=Figure(value=1e-3, estimated="by eye")),),
    ),
    links=Links(),
    host_launch_us=Figure(value=1.25, source="measured"),
)


def test_a_cluster_that_is_written_is_read_as_the_same(tmp_path: Path) -> None:
    for each in (MINE, *map(cluster.read, CLUSTERS)):
        text = cluster.written(each)
        assert "null" not in text
        (tmp_path / "mine.yaml").write_text(text)
        assert cluster.read(str(tmp_path / "mine.yaml")) == each


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the user's own clusters, with a laptop and with one that is called h100."""
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path))
    folder = cluster.own_folder()
    folder.mkdir()
    for name in ("laptop", "h100"):
        (folder / f"{name}.yaml").write_text(cluster.written(MINE))
    return folder


@pytest.mark.usefixtures("own")
def test_clusters_of_ones_own_have_names_too_but_no_published_one_changes() -> None:
    assert cluster.own_names() == ["laptop"]
    assert cluster.read("laptop") == MINE
    assert cluster.read("h100") != MINE
    assert [*cluster.with_gpu("a processor, 1 thread")] == [("laptop", MINE)]
    with pytest.raises(SpecError, match="Did you mean 'laptop'"):
        cluster.read("laptp")


def test_without_a_place_for_a_cache_there_are_none_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MOEFW_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert cluster.own_names() == []


WRONG = """
about: mine
gpu:
  names: []
  peak_tflops: {bf16: {value: -1, source: a sheet}}
  memory_gib: {value: 80}
  memory_tb_per_s: {value: 3, source: a sheet, estimated: by eye}
  bord_power_w: {value: 700, source: a sheet}
links:
  node: {gb_per_s: {value: fast, source: a sheet}}
host_cores: {value: 0, source: counted}
"""


def test_a_wrong_file_says_all_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(WRONG)
    with pytest.raises(SpecError) as refused:
        cluster.read(str(path))
    said = str(refused.value)
    for where in (
        "mine.yaml:4:",
        "gpu.peak_tflops.bf16.value",
        "gpu.memory_gib",
        "gpu.memory_tb_per_s",
        "Did you mean 'board_power_w'?",
        "links.node.gb_per_s.value",
        "host_cores.value",
    ):
        assert where in said, said


@pytest.mark.parametrize("name", ["h10", "none.yaml"])
def test_a_cluster_that_is_not_there_is_told(name: str) -> None:
    with pytest.raises(SpecError, match=r"Did you mean 'h100'|no such file"):
        cluster.read(name)


def planned(*arguments: str) -> Any:
    return CliRunner().invoke(plan, [str(QUICKSTART), *arguments], standalone_mode=False)


def test_a_plan_says_whether_its_peak_fits_and_of_what_mfu_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path))
    data = json.loads(planned("--cluster", "h100", "--json").output)
    h100 = cluster.read("h100")
    assert data["cluster"] == {
        "name": "h100",
        "memory_bytes": h100.memory_bytes,
        "overhead_bytes": overhead_bytes(h100, Ledger.of_data(data)),
        "fits": True,
        "left_bytes": h100.memory_bytes - data["cluster"]["overhead_bytes"] - data["peak_bytes"],
        "peak_tflops": 989.4,
    }
    text = (cluster.FOLDER / "h100.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("memory_gib: {value: 79.6", "memory_gib: {value: 0.01"))
    shown = planned("--cluster", str(tmp_path / "mine.yaml")).output
    assert "the peak does not fit" in shown
    assert "MFU is of 989.4 TFLOPS, its peak of products of bfloat16" in shown
    refused = planned("--cluster", "h10", "--json")
    assert refused.return_value == 2
    assert "Did you mean" in refused.output
