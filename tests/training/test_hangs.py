"""Whole runs in which a rank hangs or exits: it is named in one message, stacks are kept, and no process is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from copies import Copy
from pairwise import deep
from run_cases import TORCHRUN, end, environment_in, spec, train

TIMEOUT = "run.timeout_s=6"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment_in(tmp_path_factory.mktemp("environment"))


@pytest.mark.fault(
    "one rank of a run blocks in its data source", "named with step, phase and what the others wait in; stacks are kept"
)
def test_a_rank_that_blocks_in_its_data_source_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    path = spec(tmp_path, ranks=2, source="faulty")
    code, said, _ = end(train(environment, path, "data.fault=block", "data.rank=1", TIMEOUT))
    assert code == 1
    (line,) = said
    assert line.startswith("error: rank 1 (")
    assert "(run.timeout_s allows 6): step 6, data; rank 0 waits in all_reduce of ranks 0 and 1. " in line
    assert "in _block" in (tmp_path / "run" / "stacks" / "rank-1.txt").read_text()
    assert "in all_reduce" in (tmp_path / "run" / "stacks" / "rank-0.txt").read_text()


@pytest.mark.fault("a rank of a pipeline blocks", "named, and what the other stage waits in")
def test_a_rank_of_a_pipeline_that_blocks_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    path = spec(tmp_path, ranks=2, source="faulty")
    pipeline = ("model.num_layers=2", "parallel={pp: 2}")
    code, said, seconds = end(train(environment, path, *pipeline, "data.fault=block", "data.rank=1", TIMEOUT))
    assert code == 1
    (line,) = said
    assert line.startswith("error: rank 1 (")
    assert "(run.timeout_s allows 6): step 2, data; rank 0 waits in recv of ranks 0 and 1. " in line
    assert seconds < 6 + 5 + 8  # the limit, five seconds, and the start


@pytest.mark.fault("a run of one rank blocks ({id})", "named with step and phase; stacks are kept")
@pytest.mark.parametrize(
    ("at", "place"),
    [
        (33, "step 2, data"),
        pytest.param(0, "preparing data: text.txt", marks=pytest.mark.deep),
        pytest.param(9, "step 1, data", marks=pytest.mark.deep),
    ],
)
def test_a_single_rank_that_blocks_in_its_data_source_is_named(
    tmp_path: Path, environment: dict[str, str], at: int, place: str
) -> None:
    path = spec(tmp_path, ranks=1, source="faulty")
    code, said, _ = end(train(environment, path, "data.fault=block", f"data.at={at}", TIMEOUT))
    assert code == 1
    (line,) = said
    assert f"(run.timeout_s allows 6): {place}. The stacks of the ranks are in {tmp_path}/run/stacks. " in line
    assert "in _block" in (tmp_path / "run" / "stacks" / "rank-0.txt").read_text()


@pytest.mark.fault("a rank of a run gets no memory", "named, with what the plan says of it")
def test_a_rank_without_memory_is_told_the_plan(tmp_path: Path, environment: dict[str, str]) -> None:
    path = spec(tmp_path, ranks=2, source="faulty")
    code, said, _ = end(train(environment, path, "data.fault=all memory", "data.rank=1"))
    assert code == 1
    (line,) = said
    assert "ran out of memory at step 6, data. The plan of each of 2 ranks: saved for backward 0.3 MiB, " in line


@pytest.mark.fault("rank {id} is stopped under torchrun", "named; stacks of the others are kept")
@pytest.mark.parametrize("rank", deep(0, 1))
def test_under_torchrun_a_stopped_rank_is_named(tmp_path: Path, environment: dict[str, str], rank: int) -> None:
    path = spec(tmp_path, ranks=2, source="faulty")
    fault = ("data.fault=stop", f"data.rank={rank}")
    _, said, _ = end(Copy([*TORCHRUN, "train", path, *fault, TIMEOUT], env=environment))
    (line,) = (line for line in said if line.startswith("error: "))
    assert line.startswith(f"error: rank {rank} (")
    assert f"; its process is stopped; rank {1 - rank} waits in all_reduce of ranks 0 and 1. " in line
    assert "in train" in (tmp_path / "run" / "stacks" / f"rank-{1 - rank}.txt").read_text()


@pytest.mark.fault("a rank leaves with code 0 under torchrun", "named")
def test_under_torchrun_a_rank_that_leaves_without_a_word_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    path = spec(tmp_path, ranks=2, source="faulty")
    torchrun = [*TORCHRUN, "train", path, "data.fault=leave with 0", "data.rank=1"]
    _, said, _ = end(Copy(torchrun, env=environment))
    (line,) = (line for line in said if line.startswith("error: "))
    assert line.startswith("error: rank 1 (")
    assert " left without a word, last heard of at " in line
