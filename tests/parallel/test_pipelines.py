"""Stages of a pipeline train as the whole model does, do everything once, and hold what their schedule says.

That a backward in two parts runs custom Functions twice, and recompute again, is pytorch issues 166577 and 174017.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve

from fake_steps import fake_assembly
from layout_runs import WEIGHTS
from ledger_cases import PEAK, UPDATE
from memory_cases import recompute
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.optimizer import build_optimizer
from moefw.compose.registry import Registry
from moefw.core.errors import PluginError
from moefw.core.records import Action
from moefw.core.stages import Batch
from moefw.planner.measurement.alike import alike_positions
from moefw.planner.measurement.measure import measure as measure_plan
from moefw.planner.measurement.measure import measure_at
from moefw.planner.measurement.stages_without_peers import SENT
from moefw.planner.report import Held, Ledger, Peak
from moefw.recording.fake_tensors import fake_tensor_world
from moefw.runtime.naming import initialise
from moefw.runtime.pipeline.player import Player
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import Trained, global_batch, open_model, train, whole_model
from moefw.testing.training import SMALL
from moefw.testing.variants import variants
from moefw.training import checkpoint, micro_batches
from moefw.training.engine import Engine, evaluate
from moefw.training.generate import Reader
from moefw.training.measured import Measured, measure, measure_here
from pairwise import deep, each_value, quick

SCHEDULES = [one.label for one in variants(Registry())["pipeline"] if "merged" not in one.label]
"""Those of several stages, whose passes run one behind another."""
MICRO_BATCHES = 4
SIZES = {"vocab_size": 64, "num_layers": 4, "mtp_layers": 1, "num_dense_layers": 0}
ADAM = {"use": "adamw", "eps": 1e-6}
TRAIN = {**SMALL["train"], "micro_batch": 1, "tokens_per_step": MICRO_BATCHES * 16, "optimizer": ADAM}
ROUTING = {
    "use": "topk",
    "score": "sigmoid",
    "balance": [{"kind": "expert_bias", "rate": 0.01}, {"kind": "aux_loss", "coeff": 0.1}, {"kind": "z_loss"}],
}
RECOMPUTE = [recompute("mlp_norm", "router", "expert_fc1")]


def parts(schedule: str | None, ranks: int = 2, **more: Any) -> dict[str, Any]:
    """Return the parts of a model in stages; None: in one."""
    split = {} if schedule is None else {"parallel": {"pp": ranks}, "pipeline": {"use": schedule}}
    return {"routing": ROUTING, "train": TRAIN, **split, **more}


def spec(schedule: str | None, **more: Any) -> dict[str, Any]:
    return {**SMALL, "model": {**SMALL["model"], **SIZES}, **parts(schedule), **more}


def measured(tree: Mapping[str, Any]) -> Measured:
    """Return the measured step of this rank."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return measure_here(fake_assembly(dict(tree), world), micro_batches=MICRO_BATCHES)


def done(pool: RankPool, schedule: str | None, *, ep: int = 1, **given: Any) -> tuple[Counter[Any], Counter[Any]]:
    """Return the products and the transfers of a step of all ranks, in all layers. One stage is measured once."""
    key = repr((ep, given))
    if schedule is not None or key not in _IN_ONE:
        found = _done(pool, schedule, ep, given)
        return found if schedule is not None else _IN_ONE.setdefault(key, found)
    return _IN_ONE[key]


_IN_ONE: dict[str, tuple[Counter[Any], Counter[Any]]] = {}


def _done(pool: RankPool, schedule: str | None, ep: int, given: Mapping[str, Any]) -> tuple[Counter[Any], Counter[Any]]:
    stages = 1 if schedule is None else 2
    train = {**TRAIN, "tokens_per_step": ep * TRAIN["tokens_per_step"]}
    tree = spec(schedule, train=train, parallel={"pp": stages, "experts": {"ep": ep}}, **given)
    products, transfers = Counter[Any](), Counter[Any]()
    for rank in pool.run(measured, stages * ep, tree):
        for work in rank.work:
            products.update({(work.phase, evolve(one, times=1)): work.layers * one.times for one in work.products})
            for one in work.transfers:
                transfers[work.phase, one.kind] += work.layers * one.times
    return products, transfers


@pytest.mark.parametrize(
    ("schedule", "memory"),
    [
        *each_value(("interleaved", "zero-bubble", "dualpipe-v"), [RECOMPUTE, []]),
        *(
            pytest.param(schedule, memory, marks=pytest.mark.deep)
            for schedule in ("gpipe", "1f1b", "zbv")
            for memory in ([], RECOMPUTE)
        ),
    ],
)
def test_every_product_is_computed_once_a_micro_batch(
    pool: RankPool, schedule: str, memory: list[dict[str, Any]]
) -> None:
    """Forwards, gradients of inputs and of weights, and what is recomputed, of each expert and each matrix."""
    products, transfers = done(pool, schedule, memory=memory)
    assert products == done(pool, None, memory=memory)[0]
    sent = {"gpipe": 1, "1f1b": 1, "zero-bubble": 1, "interleaved": 3, "zbv": 2, "dualpipe-v": 2}[schedule]
    assert transfers["forward", SENT] == transfers["backward", SENT] == sent * MICRO_BATCHES


@pytest.mark.parametrize("schedule", deep(*SCHEDULES))
def test_every_collective_runs_once_a_micro_batch(pool: RankPool, schedule: str) -> None:
    products, transfers = done(pool, schedule, ep=2, memory=RECOMPUTE)
    alone, collectives = done(pool, None, ep=2, memory=RECOMPUTE)
    assert products == alone
    assert of_micro_batches(collectives)
    assert of_micro_batches(transfers) == of_micro_batches(collectives)


def of_micro_batches(transfers: Counter[Any]) -> dict[Any, int]:
    """Collectives without what stages send, and without those that end a step, in which stages share sums, too."""
    return {key: times for key, times in transfers.items() if key[0] not in UPDATE and key[1] != SENT}


def trained(pool: RankPool, world: int, steps: int, **given: Any) -> list[Trained]:
    return pool.run(train, world, whole_model(world, parts=given, plugins=(), sizes=SIZES), steps)


def assert_results_alike(found: list[Trained], alone: Trained) -> None:
    for rank in found:
        for got, wanted in zip(rank.results, alone.results, strict=True):
            assert got.loss == pytest.approx(wanted.loss, rel=2e-6)
            assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-6)
            assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=5e-6)
            assert got.router_entropy_L == pytest.approx(wanted.router_entropy_L, rel=2e-6)
            assert got.layers == wanted.layers
            assert got.aux_losses == pytest.approx(wanted.aux_losses, rel=2e-6)
            assert got.load_LE == wanted.load_LE
            assert got.counts == wanted.counts
            assert got.tokens == wanted.tokens


def assert_alike(found: list[Trained], alone: Trained) -> None:
    assert_results_alike(found, alone)
    last = {name: tensor for rank in found for name, tensor in rank.last.items()}
    assert last.keys() == alone.last.keys()
    assert max((last[name] - weight).abs().max() for name, weight in alone.last.items()) <= WEIGHTS
    states = {name: tensor for rank in found for name, tensor in rank.state.items()}
    assert states.keys() == alone.state.keys()
    assert all(torch.equal(states[name], tensor) for name, tensor in alone.state.items())


@pytest.mark.parametrize(("schedule", "memory"), each_value(SCHEDULES, [RECOMPUTE, []]))
def test_statistics_losses_and_biases_of_routers_are_those_of_one_stage(
    pool: RankPool, schedule: str, memory: list[dict[str, Any]]
) -> None:
    (alone,) = trained(pool, 1, 2, **parts(None))
    assert_alike(trained(pool, 2, 2, **parts(schedule, memory=memory)), alone)


def test_a_region_that_runs_again_saves_what_its_weight_gradients_need_later(pool: RankPool) -> None:
    """A GEMM whose weight FSDP gathers saves other tensors if its weight gradient has a pass of its own."""
    train = {**TRAIN, "tokens_per_step": 2 * TRAIN["tokens_per_step"]}
    (alone,) = trained(pool, 1, 2, **parts(None, train=train))
    sharded = parts("zero-bubble", train=train, memory=[recompute("attention")])
    sharded["parallel"] = {"pp": 2, "dense": {"shard": "all"}}
    assert_results_alike(trained(pool, 4, 2, **sharded), alone)


def test_every_stage_runs_again_without_budgets_where_rows_of_one_overflow(pool: RankPool) -> None:
    dispatch = {"use": "hybridep", "backend": "torch", "rank_capacity": 0.5, "on_overflow": "rerun"}
    (alone,) = trained(pool, 1, 2, **parts(None, dispatch=dispatch))
    assert alone.results[0].counts["overflow"] > 0
    assert_alike(trained(pool, 2, 2, **parts("1f1b", dispatch=dispatch)), alone)


@contextmanager
def nothing() -> Any:
    yield


def played(schedule: str, ranks: int) -> tuple[list[Action], int]:
    """Return what this rank ran of a step, and the most micro-batches whose graphs it held."""
    given = parts(schedule, ranks, train={**TRAIN, "tokens_per_step": 2 * TRAIN["tokens_per_step"]})
    sizes = {**SIZES, "num_layers": 8}
    model, assembly, layout, shared = open_model(whole_model(ranks, parts=given, plugins=(), sizes=sizes))
    batches = [replace(batch, loss_scale=torch.tensor(1.0)) for batch in global_batch(assembly, layout, 0)]
    player, ran, held = Player(model, batches), list[Action](), [0]

    @contextmanager
    def noted(action: Action, partner: Action | None) -> Any:
        yield
        ran.append(action)
        held.append(sum(bool(in_flight._calls) for in_flight in player._in_flight.values()))

    for _ in player.play(noted):
        pass
    shared.close()
    return ran, max(held)


@pytest.mark.parametrize("ranks", [2, *deep(4)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_runs_the_listed_passes_and_holds_as_many_graphs_as_the_schedule_says(
    pool: RankPool, schedule: str, ranks: int
) -> None:
    plugin = fake_assembly(spec(schedule, pipeline={"use": schedule}), 2).parts.pipeline
    count, chunks = 2 * MICRO_BATCHES, plugin.chunks
    for rank, (ran, held) in enumerate(pool.run(played, ranks, schedule, ranks)):
        assert ran == list(plugin.order(ranks, count)[rank])
        most = {
            "gpipe": count,
            "1f1b": ranks - rank,
            "zero-bubble": ranks - rank,
            "interleaved": 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1,
            "zbv": 2 * ranks,
            "dualpipe-v": 2 * ranks + 1,
        }
        assert held == most[schedule]


def test_a_model_that_offers_stages_and_has_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefw.plugins.models.decoder.Decoder.build", lambda *_: torch.nn.Linear(1, 1))
    assembly = fake_assembly(spec("1f1b"), 2)
    with (
        fake_tensor_world(0, 2),
        pytest.raises(PluginError, match="model 'decoder' builds a Linear, which has no stages"),
    ):
        build_model(assembly, open_layout(assembly, "cpu"), torch.device("cpu"), Shared())


def stamped() -> list[str]:
    """Return what this rank says of its progress in a step."""
    model, assembly, layout, shared = open_model(whole_model(2, parts=parts("zero-bubble"), plugins=(), sizes=SIZES))
    said, engine = list[str](), Engine(model, torch.optim.SGD(model.parameters()), layout, clip_norm=None)
    before, micro_batches.stamp = micro_batches.stamp, said.append
    try:
        engine.step(global_batch(assembly, layout, 0), 0.0, lambda *_: nothing())
    finally:
        micro_batches.stamp = before
    shared.close()
    return said


def test_a_rank_that_makes_no_progress_is_told_with_pass_micro_batch_and_stage(pool: RankPool) -> None:
    for rank, said in enumerate(pool.run(stamped, 2)):
        assert f"forward of micro-batch 3 of 4 in stage {rank} of 2" in said
        assert f"weight gradients of micro-batch 4 of 4 in stage {rank} of 2" in said
        assert len(said) == 3 * MICRO_BATCHES


def logits_of(tree: Mapping[str, Any], seed: int) -> tuple[float, torch.Tensor, list[int]]:
    """Return the loss of an evaluation, logits of a batch, and greedy tokens behind a prompt."""
    assembly = fake_assembly(dict(tree), dist.get_world_size() if dist.is_initialized() else 1)
    layout, shared = open_layout(assembly, "cpu"), Shared()
    model: Any = build_model(assembly, layout, torch.device("cpu"), shared)
    initialise(model, seed=seed, std=model.init_std)
    batches = global_batch(assembly, layout, 0)
    loss = evaluate(model, batches, layout)
    model.eval()
    ids = batches[0].ids_BS
    with torch.no_grad():
        logits, _ = model.logits(Batch(ids_BS=ids, labels_BS=ids))
        read, text = Reader(model, 16), ids[0, :5].tolist()
        for _ in range(4):
            text.append(int(read(text).argmax()))
    shared.close()
    return loss, logits, text


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", *deep("1f1b")])
def test_evaluation_and_text_are_those_of_one_stage(pool: RankPool, schedule: str) -> None:
    tree = {"model": {**SMALL["model"], **SIZES, "tie_embeddings": True, "num_layers": 5}}
    ((loss, logits, text),) = pool.run(logits_of, 1, {**spec(None), **tree}, 3)
    for got, got_logits, got_text in pool.run(logits_of, 2, {**spec(schedule), **tree}, 3):
        assert got == pytest.approx(loss, rel=1e-6)
        assert torch.equal(got_logits, logits)
        assert got_text == text


def saved_and_resumed(given: Mapping[str, Any], world: int, folder: Path, run: str) -> list[float]:
    """Train two steps: ``whole``, up to a checkpoint (``first``), or from it (``second``). Return losses and norms."""
    model, assembly, layout, shared = open_model(whole_model(world, parts=given, plugins=(), sizes=SIZES))
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    engine, found = Engine(model, optimizer, layout, clip_norm=1.0), list[float]()
    group = layout.host_group()
    if run == "second":
        checkpoint.load(folder / "checkpoints" / "step-1", model, optimizer, group=group)
    for step in {"whole": (0, 1), "first": (0,), "second": (1,)}[run]:
        result = engine.step(global_batch(assembly, layout, step), 1e-3, lambda *_: nothing())
        found += [result.loss, result.grad_norm]
    if run == "first":
        origin = checkpoint.Origin(world=world, plugins=(), tokenizer="", sequences=0)
        checkpoint.save(folder, 1, model, optimizer, layout, origin, keep=1)
    shared.close()
    return found


@pytest.mark.parametrize("schedule", ["zbv", *deep("gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe-v")])
def test_a_checkpoint_goes_on_bit_for_bit_and_in_another_pipeline(
    pool: RankPool, tmp_path: Path, schedule: str
) -> None:
    sizes = {"parallel": {"pp": 2, "dense": {"shard": "all"}}} if schedule == "zbv" else {}
    world = 4 if sizes else 2
    given = parts(schedule, **sizes)
    given["train"] = {**TRAIN, "tokens_per_step": world // 2 * TRAIN["tokens_per_step"]}
    whole = pool.run(saved_and_resumed, world, given, world, tmp_path, "whole")
    pool.run(saved_and_resumed, world, given, world, tmp_path, "first")
    assert pool.run(saved_and_resumed, world, given, world, tmp_path, "second") == [found[2:] for found in whole]
    other = {**given, "parallel": {"pp": 4}, "pipeline": {"use": "1f1b", "layout": "Et|tt|tm|L"}}
    for there, ranks in ((other, 4), ({**given, "parallel": {}, "pipeline": {"use": "1f1b"}}, 1)):
        for found in pool.run(saved_and_resumed, ranks, there, ranks, tmp_path, "second"):
            assert found == pytest.approx(whole[0][2:], rel=2e-6)


PLANNED: Mapping[str, tuple[int, int, Mapping[str, Any]]] = {
    "gpipe": (4, 4, {"parallel": {"pp": 4}}),
    "1f1b": (2, 4, {"parallel": {"pp": 2}}),
    "interleaved": (2, 4, {"parallel": {"pp": 2}}),
    "zero-bubble": (2, 4, {"parallel": {"pp": 2}}),
    "1f1b, sharded": (4, 3, {"parallel": {"pp": 2, "dense": {"shard": "all"}, "experts": {"ep": 2}}}),
    "1f1b, gathered and reduced once": (
        4,
        3,
        {
            "parallel": {"pp": 2, "dense": {"shard": "all", "zero": 1}, "experts": {"ep": 2}},
        },
    ),
    "1f1b, gathered once": (
        4,
        3,
        {"parallel": {"pp": 2, "dense": {"shard": "all", "zero": 2}, "experts": {"ep": 2}}},
    ),
    "interleaved, merged": (
        2,
        4,
        {
            "model": {**SMALL["model"], **SIZES, "num_layers": 28},
            "parallel": {"pp": 2},
            "pipeline": {"use": "interleaved", "merged": True},
        },
    ),
    "1f1b, recomputed": (4, 4, {"parallel": {"pp": 2, "dense": {"tp": 2}, "experts": {"ep": 2}}, "memory": RECOMPUTE}),
}
ROUGHLY = 0.02
"""FSDP's order of gathering is taken from one micro-batch. What weight gradients wait for is taken for all that a
micro-batch saves."""


@pytest.mark.parametrize("name", quick(PLANNED, "interleaved"))
def test_the_plan_counts_the_micro_batches_that_a_stage_has_in_flight(name: str) -> None:
    world, count, given = PLANNED[name]
    schedule, _, also = name.partition(", ")
    assembly = fake_assembly({**spec(None), "pipeline": {"use": schedule}, **given}, world)
    places = assembly.layout.sizes["pp"]
    for position in {0, places - 1} - ({places - 1} if also else {0}):
        step = measure(assembly, rank=position * world // places, micro_batches=count)
        found = measure_at(assembly, count, position)
        within = ROUGHLY if "sharded" in also or schedule in ("gpipe", "zero-bubble") else PEAK
        assert found.peak_bytes == pytest.approx(step.peak, rel=within), (position, found.peak)


def test_the_plan_is_of_the_stage_that_needs_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that are alike are measured once, where most is in flight."""
    tree = {**spec("1f1b"), "parallel": {"pp": 4}, "pipeline": {"use": "1f1b", "layout": "Et|t|t|tmL"}}
    assembly = fake_assembly(tree, 4)
    assert alike_positions(assembly, 4) == {0: [0], 1: [1, 2], 3: [3]}
    peaks = {0: 5, 1: 9, 3: 7}
    monkeypatch.setattr(
        "moefw.planner.measurement.measure._under_policies",
        lambda *given: SimpleNamespace(ledger=_told(given[2], peaks[given[2]])),
    )
    assert measure_plan(assembly, 4).position == 1


def _told(position: int, peak_bytes: int) -> Ledger:
    """Return a ledger of nothing but a peak."""
    held = Held(parameters=0, gradients=0, optimizer=0, buffers=0, batch=0, host=0, step_passing=0)
    peak = Peak(place="", operands=0, saved=peak_bytes, gathered=0, passing=0)
    return Ledger(world=4, micro_batches=4, tokens=1, held=held, stages=4, position=position, peak=peak)
