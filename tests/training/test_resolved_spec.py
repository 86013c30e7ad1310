"""A run reports changes of its spec, and its ranks refuse to train on different specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fake_steps import fake_assembly
from moefw.core.errors import PlanError
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL
from moefw.training import versions
from moefw.training.resolved_spec import agree_on_spec, write_resolved
from moefw.training.versions import library_versions


def assembly(**sections: dict[str, Any]) -> Any:
    return fake_assembly({**SMALL, **sections}, 1)


def test_a_resumed_run_says_what_has_changed_since(tmp_path: Path) -> None:
    before, now = (assembly(run={"seed": seed}) for seed in (0, 9))
    assert write_resolved(before, tmp_path) == []
    assert write_resolved(now, tmp_path) == ["run.seed: 0 is 9 now"]
    assert write_resolved(now, tmp_path) == []


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"use": "cosine"}, "train.steps: 20 is 40 now, so the learning rate follows another curve"),
        ({"use": "wsd"}, "train.steps: 20 is 40 now, so the learning rate follows another curve"),
        ({"use": "wsd", "decay_share": 0.0}, "train.steps: 20 is 40 now"),
    ],
    ids=["cosine", "wsd", "constant"],
)
def test_another_length_is_said_to_change_the_learning_rate_where_it_does(
    tmp_path: Path, schedule: dict[str, Any], said: str
) -> None:
    def run_of(steps: int) -> Any:
        return assembly(train={**SMALL["train"], "steps": steps, "schedule": {**schedule, "warmup_steps": 4}})

    write_resolved(run_of(20), tmp_path)
    assert write_resolved(run_of(40), tmp_path) == [said]


@pytest.mark.parametrize("content", [b"run: {seed: 3", b"\xff\xfe", b"- 1", b""])
def test_a_damaged_spec_of_the_run_is_told_and_written_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "spec.yaml").write_bytes(content)
    assert write_resolved(assembly(), tmp_path) == [f"{tmp_path / 'spec.yaml'} was damaged, and is written anew"]
    assert write_resolved(assembly(), tmp_path) == []


def agree(specs: list[dict[str, Any]], versions: list[dict[str, str]] | None = None) -> str:
    rank = dist.get_rank()
    try:
        agree_on_spec(assembly(**specs[rank]), versions[rank] if versions else {})
    except PlanError as error:
        return str(error)
    return "goes on"


def test_ranks_with_different_specs_name_every_key_that_differs(pool: RankPool) -> None:
    specs: list[dict[str, Any]] = [{}, {}, {"run": {"seed": 7, "device": "cpu"}}, {"routing": {"use": "sinkhorn"}}]
    found = pool.run(agree, 4, specs)
    assert found == [found[0]] * 4
    assert "rank 2 differs from rank 0 in spec.run.seed: 7 instead of 3." in found[0]
    assert "rank 3 differs from rank 0 in spec.routing.use: 'sinkhorn' instead of 'topk'." in found[0]
    assert "rank 3 differs from rank 0 in plugin.'routers sinkhorn'" in found[0]
    assert "rank 1" not in found[0]
    assert pool.run(agree, 2, specs) == ["goes on"] * 2


def test_ranks_with_different_libraries_name_each_that_differs(pool: RankPool) -> None:
    """A rank whose driver is not known, as where Linux does not tell, differs too."""
    here = {"torch": "2.13.0", "nccl": "2.29.2", "driver": "580.95.05"}
    of_ranks = [here, here | {"nccl": "2.28.9"}, {"torch": "2.12.1", "nccl": "2.29.2"}]
    found = pool.run(agree, 3, [{}] * 3, of_ranks)
    assert found == [found[0]] * 3
    assert "rank 1 differs from rank 0 in version.nccl: '2.28.9' instead of '2.29.2'." in found[0]
    assert "rank 2 differs from rank 0 in version.torch: '2.12.1' instead of '2.13.0'." in found[0]
    assert "rank 2 differs from rank 0 in version.driver: null instead of '580.95.05'." in found[0]
    assert found[0].count("differs") == 3


def test_versions_of_libraries_are_those_that_this_rank_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library_versions(torch.device("cpu")) == {"torch": torch.__version__}
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 2))
    monkeypatch.setattr(versions, "DRIVER", tmp_path / "version")
    on_gpu = {"torch": torch.__version__, "nccl": "2.29.2"}
    assert library_versions(torch.device("cuda")) == on_gpu
    (tmp_path / "version").write_text("580.95.05\n")
    assert library_versions(torch.device("cuda")) == on_gpu | {"driver": "580.95.05"}
