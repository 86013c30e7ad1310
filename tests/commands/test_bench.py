"""``moefw bench tiles`` writes the fastest tiles of those that give the right values; experts use them on that GPU."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from click.testing import CliRunner

import moefw
from moefw.cli import cli
from moefw.commands import bench
from moefw.commands.specs import read as read_spec
from moefw.plugins.gemm.triton import Triton, measure
from moefw.plugins.gemm.triton.chosen import chosen_tiles
from moefw.plugins.gemm.triton.measure import Sizes
from moefw.plugins.gemm.triton.table import Table, read, write
from moefw_kernels.expert_gemm import CANDIDATES, UNTUNED, Tile, Tiles, gated

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES = Sizes(dim=16, expert_dim=24, counts=(5, 0, 3))
LAST = Tiles(**{name: tiles[-1] for name, tiles in CANDIDATES.items()})
SPEC = """
model: {preset: qwen3-moe-tiny}
gemm: {use: triton}
precision: {use: bf16}
train: {micro_batch: 2, seq_len: 128, tokens_per_step: 4096}
run: {device: cuda}
"""


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the name of a GPU be known here."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "an H100")


def clock(fast: Tiles) -> Callable[[Any], float]:
    """Return a clock for which some tiles are faster than others. It calls what it times."""

    def time(call: Any) -> float:
        call()
        (tile,) = call.args
        return 1.0 if tile in fast else 2.0

    return time


@pytest.mark.usefixtures("h100")
def test_the_fastest_tiles_are_written_and_experts_use_them(tmp_path: Path) -> None:
    path = str(tmp_path / "tiles.json")
    write(bench.fastest(SIZES, CPU, clock(LAST)), path)
    assert chosen_tiles(path, GPU) == LAST
    table = read(path)
    assert (table.gpu, table.triton) == ("an H100", triton.__version__)
    assert table.sizes == {"dim": 16, "expert_dim": 24, "experts": 3, "rows": 8}
    assert {name: len(times) for name, times in table.microseconds.items()} == {
        name: len(tiles) for name, tiles in CANDIDATES.items()
    }


@pytest.mark.usefixtures("h100")
def test_a_tile_that_gives_wrong_values_is_told_and_never_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*args: Any, tile: Tile, **others: Any) -> Any:
        h_RH, a_RF = gated(*args, tile=tile, **others)
        return h_RH, a_RF * 2 if tile == LAST.gated else a_RF

    monkeypatch.setattr(measure, "gated", wrong)
    table = bench.fastest(SIZES, CPU, clock(LAST))
    assert table.tiles["gated"] == UNTUNED.gated
    assert table.tiles["down"] == LAST.down
    assert capsys.readouterr().err == f"gated: {list(LAST.gated)} gives wrong values here and is left out\n"


def test_a_product_that_no_tile_gives_rightly_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "gated", lambda *_, **__: (torch.zeros(8, 48), torch.full((8, 24), torch.nan)))
    with pytest.raises(moefw.RunError, match=r"no tile of gemm triton gives the right values of gated here\. Use gemm"):
        bench.fastest(SIZES, CPU, clock(LAST))


def table(**others: Any) -> Table:
    given = {"gpu": "an H100", "triton": triton.__version__, "sizes": {}, "tiles": LAST._asdict(), "microseconds": {}}
    return Table(**{**given, **others})


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("others", [{"gpu": "a B200"}, {"triton": "3.5.0"}])
def test_a_table_for_others_is_ignored_with_a_line(tmp_path: Path, others: dict[str, str]) -> None:
    path = str(tmp_path / "tiles.json")
    write(table(**others), path)
    with pytest.warns(UserWarning, match="here are an H100 and") as told:
        assert chosen_tiles(path, GPU) == UNTUNED
    assert len(told) == 1
    measured = f"{others.get('gpu', 'an H100')} and Triton {others.get('triton', triton.__version__)}"
    assert f"has tiles for {measured};" in str(told[0].message)
    assert "They are ignored: tiles are not tuned." in str(told[0].message)


def test_a_cpu_and_no_table_have_untuned_tiles(tmp_path: Path) -> None:
    path = str(tmp_path / "tiles.json")
    write(table(gpu="a B200"), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen_tiles(path, CPU) == chosen_tiles(None, GPU) == UNTUNED


@pytest.mark.usefixtures("h100")
def test_a_tile_that_there_is_not_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "tiles.json")
    write(table(tiles={**LAST._asdict(), "down": (8, 8, 1, 1)}), path)
    with pytest.raises(moefw.PlanError, match=r"tiles that moefw does not have: down \[8, 8, 1, 1\]"):
        chosen_tiles(path, GPU)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such file or directory"),
        ("{", "it is no table of tiles"),
        ("{}", "it is no table of tiles ('tiles')"),
        (json.dumps({"tiles": {name: [1] for name in CANDIDATES}}), "columns, depth, warps and stages"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_check(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "tiles.json"
    if text is not None:
        path.write_text(text)
    (problem,) = Triton(tiles=str(path)).check(mock.Mock(dims=mock.Mock(model_dim=16, expert_dim=16)))
    assert says in problem.what
    assert "moefw bench tiles SPEC --out FILE" in problem.fix


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a spec, for machines with a Hopper."""
    monkeypatch.setattr("moefw.compose.machine._num_visible_gpus", lambda: 8)
    monkeypatch.setattr("moefw.compose.machine._capability", lambda: "9.0")
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


@pytest.mark.parametrize(
    ("mesh", "counts", "expert_dim"),
    [("{}", 64, 32), ("{experts: {ep: 2}}", 128, 32), ("{experts: {etp: 2}}", 128, 16)],
)
def test_sizes_are_those_of_a_rank_and_a_micro_batch(spec: Path, mesh: str, counts: int, expert_dim: int) -> None:
    """2 x 128 tokens, each with 4 of 16 experts."""
    sizes = bench.sizes_of(read_spec(str(spec), [f"parallel={mesh}", "model.expert_dim=32"]))
    assert (set(sizes.counts), sizes.expert_dim) == ({counts}, expert_dim)


def test_it_refuses_to_measure_without_a_gpu_and_other_gemms(spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiles.json"
    for overrides, says in (([], "torch sees none"), (["gemm.use=grouped"], "gemm: grouped, which has no tiles")):
        result = CliRunner().invoke(cli, ["bench", "tiles", str(spec), *overrides, "--out", str(out)])
        assert result.exit_code
        assert says in str(result.exception)
    assert not out.exists()
