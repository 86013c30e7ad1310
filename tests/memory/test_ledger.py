"""The ledger against whole measured steps: memory held, saved bytes of each region under each policy, and the peak."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, frozen
from click.testing import CliRunner

import copies
from command_here import moefw_says
from ledger_cases import (
    CODES_GATHERED,
    LOOPING,
    MODEL,
    ONCE_A_RANK,
    PEAK,
    QUICK,
    SAVED,
    SHARED_OUT,
    SPECS,
    assembly_of,
    check,
    recompute,
)
from memory_cases import qwen3_235b
from moefw import hookimpl
from moefw.commands.plan import plan
from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.core.errors import PlanError
from moefw.core.plugin import DispatcherPlugin
from moefw.core.stages import Batch
from moefw.planner import Ledger, ledger
from moefw.recording.even_routing import EvenChoice
from moefw.recording.fake_tensors import fake_tensor_world
from moefw.recording.recorder import Recorder
from moefw.training.engine import evaluate
from moefw.training.measured import measure
from pairwise import deep, quick

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@pytest.mark.parametrize("name", quick(SPECS, *QUICK))
def test_a_step_holds_what_the_ledger_says(name: str) -> None:
    check(assembly_of(*SPECS[name]))


@pytest.mark.deep
def test_a_rank_of_256_with_some_layers_of_qwen3_235b_holds_what_the_ledger_says() -> None:
    check(qwen3_235b(5))


@pytest.mark.skipif("MOEFW_ALL_LAYERS" not in os.environ, reason="measures 94 layers, half a minute")
def test_a_rank_of_256_with_all_layers_of_qwen3_235b_holds_what_the_ledger_says() -> None:
    check(qwen3_235b(94))


@pytest.mark.parametrize("zero", [3, *deep(1, 2)])
def test_weights_gathered_as_codes_take_fewer_bytes(zero: int) -> None:
    """A recorder does not see the storage of a master that FSDP has cut, so the measured peak lacks these bytes."""
    parallel = {side: {**mesh, "zero": zero} for side, mesh in CODES_GATHERED["parallel"].items()}
    assembly = assembly_of({**CODES_GATHERED, "parallel": parallel}, 4)
    measured, found = measure(assembly), ledger(assembly, micro_batches=2)
    unseen = found.held.parameters - measured.held["parameters"]
    assert found.totals["saved"] == pytest.approx(measured.saved_bytes, rel=SAVED)
    assert found.peak is not None
    gathered = {kind: measured.peak_held.get(kind, 0) for kind in ("gathered", "operands")}
    assert found.peak.gathered == pytest.approx(gathered["gathered"], rel=0.001)
    assert found.peak.operands == pytest.approx(gathered["operands"], rel=0.001)
    assert found.peak_bytes == pytest.approx(measured.peak + unseen, rel=PEAK)


def with_graphs(assembly: Assembly, **train: Any) -> Assembly:
    """Return an assembly whose steps are graphs, which only a machine with a GPU is given."""
    train_spec = evolve(assembly.spec.train, graphs="step", **train)
    return evolve(assembly, spec=evolve(assembly.spec, train=train_spec))


def test_a_graph_of_a_step_keeps_its_memory_while_the_optimizer_updates() -> None:
    """Its update casts gradients to fp32, which takes more than an evaluation of few tokens without operands."""
    train = {"micro_batch": 1, "seq_len": 512, "eval_tokens": 512, "main_gradients": "bfloat16"}
    eager_run = assembly_of({"dispatch": {"use": "alltoall"}, "precision": {"use": "fp32"}, "train": train}, 1)
    eager = ledger(eager_run, micro_batches=2)
    graphed = ledger(with_graphs(eager_run), micro_batches=2)
    assert eager.peak is not None
    assert eager.peak.place != "optimizer"
    assert eager.held.step_passing > 0
    copies_of_batches = graphed.held.batch - eager.held.batch
    assert copies_of_batches == eager.held.batch
    assert graphed.peak_bytes == eager.peak_bytes + copies_of_batches + eager.held.step_passing


STATIC = {"use": "alltoall", "rank_capacity": 2.0, "on_overflow": "rerun", "max_tokens": 512}
EVALUATED: dict[str, tuple[dict[str, Any], int]] = {
    "one rank": ({**ONCE_A_RANK, "dispatch": {"use": "alltoall"}, "parallel": {}}, 1),
    "static rows": ({**ONCE_A_RANK, "dispatch": STATIC}, 4),
    "tokens ahead, recomputed": (
        {
            **ONCE_A_RANK,
            "model": {**MODEL, "num_layers": 4, "mtp_layers": 1},
            "dispatch": {**STATIC, "use": "hybridep", "backend": "torch"},
            "memory": [recompute("layer")],
        },
        4,
    ),
}


def allocated_by_evaluation(assembly: Assembly, num_batches: int) -> int:
    """Return the most bytes that an evaluation of a run allocates at a time, its batches included."""
    shared, recorder = Shared(), Recorder()
    with ExitStack() as stack:
        stack.enter_context(fake_tensor_world(0, assembly.layout.world))
        stack.enter_context(EvenChoice())
        stack.enter_context(recorder)
        stack.callback(shared.close)
        layout = open_layout(assembly, "cpu")
        model = build_model(assembly, layout, torch.device("cpu"), shared, watch=recorder.places)
        held = sum(life.nbytes for life in recorder.alive(recorder.now))
        recorder.start()
        train = assembly.spec.train
        ids = [torch.zeros(train.micro_batch, train.seq_len, dtype=torch.int64) for _ in range(num_batches)]
        batches = [Batch(ids_BS=each, labels_BS=each.clone(), seeds_B=torch.arange(len(each))) for each in ids]
        evaluate(model, batches, layout)
        return recorder.peak_bytes - held


@pytest.mark.parametrize("name", EVALUATED)
def test_a_graph_of_a_step_keeps_its_memory_while_an_evaluation_runs(name: str) -> None:
    run = assembly_of(*EVALUATED[name])
    train = run.spec.train
    num_batches = 3
    eval_tokens = (num_batches - 1) * train.micro_batch * train.seq_len * run.layout.sizes["dp"] + 1
    found = ledger(with_graphs(run, eval_tokens=eval_tokens + train.seq_len), micro_batches=2)
    eager = ledger(run, micro_batches=2)
    assert found.peak is not None
    assert eager.peak is not None
    assert found.peak.place == "evaluation"
    beside_graph = found.peak.passing - eager.peak.passing
    assert beside_graph == pytest.approx(allocated_by_evaluation(run, num_batches), rel=PEAK)


def test_regions_tell_what_policies_spare() -> None:
    plain, treated = (
        ledger(assembly_of({**SHARED_OUT, "memory": memory}, 8))
        for memory in ([], [{"use": "recompute", "regions": ["attention"]}])
    )
    assert treated.totals["without_policies"] == plain.totals["saved"] == plain.totals["without_policies"]
    assert treated.totals["saved"] < plain.totals["saved"]
    core = {row.kind: row for row in treated.regions if row.region == "core_attn"}
    assert {(row.layers, row.saved, row.without_policies > 0) for row in core.values()} == {(1, 0, True), (2, 0, True)}


STATES = {"optimizer-bf16": (2, False), "optimizer-offload": (4, True)}


@pytest.mark.parametrize(
    "policies",
    [[], *deep(["optimizer-bf16"]), ["optimizer-offload", "optimizer-bf16"]],
    ids=str,
)
def test_states_rest_as_policies_say(policies: list[str]) -> None:
    tree = {
        **LOOPING,
        "model": {**LOOPING["model"], "num_experts": 4},
        "parallel": {},
        "memory": [{"use": name} for name in policies],
    }
    held = ledger(assembly_of(tree, 1)).held
    moments = 2 * (held.parameters // 4) * (2 if "optimizer-bf16" in policies else 4)
    on_host = "optimizer-offload" in policies
    assert held.host == (moments if on_host else 0)
    steps = held.optimizer - (0 if on_host else moments)
    assert 0 < steps < 4000


ERRORS = {"missing": PlanError("no library.", "Install it."), "values": RuntimeError("a number is read.")}


@frozen
class Absent(DispatcherPlugin):
    name: ClassVar[str] = "absent"
    error: str

    def build(self, context: Any) -> Any:
        raise ERRORS[self.error]


@pytest.mark.parametrize("error", ERRORS)
def test_what_cannot_run_here_is_unknown_and_the_rest_is_told(tmp_path: Path, error: str) -> None:
    assembly = assembly_of(SHARED_OUT, 8)
    assembly.registry.register(SimpleNamespace(moefw_dispatchers=hookimpl(lambda: [Absent])), "absent", "1")
    found = ledger(evolve(assembly, parts=evolve(assembly.parts, dispatch=Absent(error))), cache=tmp_path)
    assert str(ERRORS[error]) in found.unknown
    assert (found.peak, found.peak_bytes, found.regions) == (None, None, ())
    assert found.held == ledger(assembly).held
    assert not [*tmp_path.iterdir()]


def test_a_ledger_is_measured_once_and_again_when_its_code_or_spec_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(
        "moefw.planner.plans._measured", lambda _, count, __: measured.append(count) or _ledger_of(count)
    )
    assembly, other = assembly_of(SHARED_OUT, 8), assembly_of({**SHARED_OUT, "gemm": {"use": "loop"}}, 8)
    first = ledger(assembly, cache=tmp_path)
    assert ledger(assembly, cache=tmp_path) == first
    assert measured == [2]
    ledger(other, cache=tmp_path)
    ledger(assembly, cache=tmp_path, micro_batches=3)
    assert measured == [2, 2, 3]
    monkeypatch.setattr("moefw.planner.cache.sources", lambda _: iter(["edited"]))
    ledger(assembly, cache=tmp_path)
    assert measured == [2, 2, 3, 2]


def _halved(entry: bytes) -> bytes:
    return entry.replace(b'"saved": 5', b'"saved": 2')


@pytest.mark.fault("a plan in the cache is damaged: {id}", "counts as absent: it is measured and stored again")
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda entry: b"", id="empty"),
        pytest.param(lambda entry: b"{}", id="another object"),
        pytest.param(lambda entry: b"[1]", id="no object"),
        pytest.param(lambda entry: entry[: len(entry) // 2], id="cut"),
        pytest.param(lambda entry: entry.replace(b"saved", b"s\xffved"), id="no text"),
        pytest.param(lambda entry: b"[" * 100_000, id="nested without end"),
        pytest.param(_halved, id="half of a number"),
        pytest.param(lambda entry: json.dumps(json.loads(entry)["data"]).encode(), id="no hash"),
    ],
)
def test_a_damaged_plan_counts_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(
        "moefw.planner.plans._measured", lambda _, count, __: measured.append(count) or _ledger_of(count)
    )
    assembly = assembly_of(SHARED_OUT, 8)
    first = ledger(assembly, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    entry = path.read_bytes()
    path.write_bytes(damage(entry))
    assert path.read_bytes() != entry
    assert ledger(assembly, cache=tmp_path) == first
    assert measured == [2, 2]
    assert path.read_bytes() == entry
    assert [*tmp_path.iterdir()] == [path]


def test_a_cache_without_room_costs_a_measurement_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("moefw.planner.plans._measured", lambda _, count, __: _ledger_of(count))
    monkeypatch.setattr(os, "fsync", no_room)
    assert ledger(assembly_of(SHARED_OUT, 8), cache=tmp_path) == _ledger_of(2)
    assert not [*tmp_path.iterdir()]


def _ledger_of(count: int) -> Ledger:
    held = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers", "batch", "host", "step_passing"), 8)
    peak = {"place": "forward", "operands": 4, "saved": 1, "gathered": 2, "passing": 3, "gradients": -1}
    row = {"kind": "moe", "region": "router", "layers": 2, "saved": 5}
    data = {
        "world": 1,
        "ranks_per_node": 8,
        "stages": 1,
        "position": 0,
        "in_flight": 1,
        "tokens": 4,
        "pools": 0,
        "unknown": "",
        "held": held,
        "peak": peak,
        "regions": [row],
        "work": [],
        "positions": [],
        "flops_per_token": None,
        "modelled": [],
    }
    return Ledger.of_data({**data, "micro_batches": count})


def test_a_plan_from_the_cache_imports_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path))
    measured = moefw_says("plan", QUICKSTART, "--json")
    command = [sys.executable, "-X", "importtime", "-m", "moefw", "plan", str(QUICKSTART), "--json"]
    cached = subprocess.run(command, capture_output=True, text=True)
    assert json.loads(cached.stdout) == json.loads(measured)
    assert " moefw.planner.plans\n" in cached.stderr
    assert " torch\n" not in cached.stderr


def test_plan_prints_one_object_and_reports_what_is_wrong_first() -> None:
    done = CliRunner().invoke(plan, [str(QUICKSTART), "--json"], standalone_mode=False)
    data = json.loads(done.output)
    assert data["ok"]
    assert data["unknown"] == ""
    assert data["peak_bytes"] == sum(
        data["peak"][part] for part in ("operands", "saved", "gathered", "passing", "gradients")
    ) + data["pools"] + sum(data["held"][part] for part in ("parameters", "gradients", "optimizer", "buffers", "batch"))
    refused = CliRunner().invoke(plan, [str(QUICKSTART), "model.top_k=99", "--json"], standalone_mode=False)
    assert refused.return_value == 2
    assert "cannot be chosen" in refused.output


def test_plan_shows_its_tables() -> None:
    shown = CliRunner().invoke(plan, [str(QUICKSTART), "memory=[{use: recompute, regions: [attn_norm]}]"]).output
    for word in ("parameters", "peak", "expert_fc1", "without policies", "the peak is in"):
        assert word in shown


def test_train_writes_what_is_predicted_and_measured(tmp_path: Path) -> None:
    arguments = [
        "train",
        str(QUICKSTART),
        f"run.dir={tmp_path}/run",
        "parallel={}",
        "train.steps=1",
        "train.eval_every=0",
    ]
    (tmp_path / "text.txt").write_text("a fox jumps over a dog\n" * 500)
    small = [
        f"data.path={tmp_path}/text.txt",
        "data.tokenizer=bytes",
        "model.vocab_size=256",
        "model.num_layers=1",
        "train.seq_len=64",
        "train.tokens_per_step=512",
        "train.eval_tokens=512",
        "--ledger",
    ]
    done = copies.run("moefw", *arguments, *small)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert found["predicted"]["peak_bytes"] == pytest.approx(found["measured"]["peak"], rel=PEAK)
