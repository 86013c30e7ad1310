"""The search: composed ledgers against whole ones, its space, its order, and what it says where nothing fits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from attrs import evolve, frozen
from click.testing import CliRunner, Result

from moefw import hookimpl
from moefw.commands import tune as commands
from moefw.commands.check import check
from moefw.commands.tune import tune
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import MoefwError, PlanError
from moefw.planner import cluster as clusters
from moefw.planner import ledger
from moefw.planner.data_files import Figure
from moefw.planner.measurement.measure import measure
from moefw.planner.report import Ledger
from moefw.planner.time.likeness import Inputs, error_of_ratio, held_out
from moefw.planner.time.software import Software
from moefw.planner.tune.candidates import OUTCOMES, Candidate
from moefw.planner.tune.compose import Composer
from moefw.planner.tune.excerpts import Excerpts, _stages
from moefw.planner.tune.ranking import percent_below_ties, tied
from moefw.planner.tune.reasons import impossible, reasons
from moefw.planner.tune.search import Search, Where
from moefw.planner.tune.settings import MEMORY, MICRO_BATCH, PIPELINE, Settings, with_settings
from moefw.planner.tune.space import BY_DEFAULT, space_of
from moefw.plugins.pipelines.one_stage import OneForwardOneBackward

TREE: Mapping[str, Any] = {
    "model": {"preset": "qwen3-moe-tiny", "num_layers": 4},
    "precision": {"use": "bf16"},
    "train": {"tokens_per_step": 65536, "micro_batch": 2},
    "parallel": {"pp": 2, "experts": {"ep": 4}, "ranks_per_node": 8},
}
WORLD = 16
PP, EP = ("parallel", "pp"), ("parallel", "experts", "ep")
SHARDED: Settings = {("parallel", "dense", "shard"): "all", ("parallel", "experts", "shard"): "all"}
ZERO_1: Settings = {**SHARDED, ("parallel", "dense", "zero"): 1, ("parallel", "experts", "zero"): 1}
MERGED: Settings = {PIPELINE: {"use": "interleaved", "chunks": 2, "merged": True}}


@frozen
class OfAnother(OneForwardOneBackward):
    """A schedule of a third party."""

    name: ClassVar[str] = "of-another"


def search_of(
    vary: tuple[str, ...] = BY_DEFAULT,
    cache: Path | None = None,
    gib: float | None = None,
    runs: Software = Software(),  # noqa: B008 - it is frozen
    keep: tuple[str, ...] = (),
    pipeline: Mapping[str, Any] | None = None,
    skew: float | None = None,
) -> Search:
    """Search around ``TREE``, with a schedule of a third party. ``gib``: memory of a GPU. ``skew``: of its memory.

    ``pipeline``: the schedule of the spec itself.
    """
    tree = dict(TREE) if pipeline is None else {**TREE, "pipeline": pipeline}
    registry = Registry([SimpleNamespace(moefw_pipelines=hookimpl(lambda: [OfAnother]))])

    def resolve(settings: Settings, world: int | None) -> Assembly:
        return assemble_tree(
            with_settings(tree, settings), Marks("spec"), defaults=defaults(), registry=registry, world=world
        )

    own = resolve({}, WORLD)
    registry.load_all()
    cluster = clusters.read("h100")
    if gib is not None:
        cluster = evolve(cluster, gpu=evolve(cluster.gpu, memory_gib=Figure(value=gib, source="https://a.test")))
    where = Where(world=WORLD, cluster=cluster, name="h100", runs=runs)
    space = space_of(own, registry.parts(), vary, {}, keep, world=WORLD)
    return Search(space, where, resolve, Excerpts(resolve, cache, skew))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="pp 2"),
        pytest.param({PIPELINE: {"use": "interleaved", "chunks": 2}, **SHARDED}, id="interleaved"),
        pytest.param({PP: 1, EP: 8, **SHARDED}, id="without pp"),
        pytest.param({MICRO_BATCH: 1, **MERGED}, id="merged"),
        pytest.param({EP: 2, **MERGED, **ZERO_1}, id="merged, whole gradients"),
        pytest.param({**MERGED, **SHARDED}, id="merged, sharded"),
        pytest.param({PIPELINE: {"use": "zbv"}}, id="zero bubble"),
        pytest.param({MICRO_BATCH: 1, PIPELINE: {"use": "dualpipe-v", "merged": True}}, id="dualpipe-v"),
    ],
)
def test_a_composed_candidate_is_as_fast_and_as_large_as_its_whole_plan(settings: Settings) -> None:
    """The excerpt has two copies of experts, where candidates with ``EP: 2`` have four."""
    search = search_of()
    composed = search.look({**search.space.own, **settings})
    whole, _ = search.exact(composed, ledger)
    assert composed.step_s == pytest.approx(whole.step_s, rel=0.01)
    assert composed.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)


LAYERS: Settings = {MEMORY: [{"use": "recompute", "regions": ["layer"]}]}
UNEVEN: Settings = {("model", "vocab_size"): 8 * 1009, ("train", "seq_len"): 64}
"""A vocabulary that 8 ranks divide and 16 do not: these cut the embedding along its other side."""


@pytest.mark.parametrize("pp", [1, 2])
def test_a_composed_candidate_is_as_large_as_its_whole_plan_where_its_ranks_cut_another_side(pp: int) -> None:
    search = search_of()
    settings = {**search.space.own, PP: pp, EP: 2, **SHARDED, **LAYERS, **UNEVEN}
    if pp == 2:
        settings |= {("model", "vocab_size"): 4 * 1009}
    assembly = search.resolve(settings, WORLD)
    measured = search.excerpts.of(settings, assembly)
    assert search.excerpts.measured == 2, "by few ranks, and cut as by all"
    composed = Composer.of(assembly, measured.excerpt, measured.kinds).ledger()
    assert composed.peak_bytes == pytest.approx(ledger(assembly).peak_bytes, rel=0.01)


BUDGET: Settings = {("dispatch",): {"use": "alltoall", "rank_capacity": 1.25, "on_overflow": "rerun"}}
RECOMPUTED: Settings = {MEMORY: [{"use": "recompute", "regions": ["mlp_norm", "dispatch", "expert_fc1"]}]}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="pp 2"),
        pytest.param({PP: 1, EP: 8, **SHARDED, **RECOMPUTED}, id="without pp"),
        pytest.param({EP: 2, **MERGED, **ZERO_1}, id="merged, whole gradients"),
        pytest.param(BUDGET, id="run again"),
        pytest.param({PP: 1, EP: 1}, id="without ep"),
    ],
)
def test_a_composed_candidate_is_as_large_as_its_whole_plan_on_the_rank_with_most_rows(settings: Settings) -> None:
    search, even = search_of(skew=1.5), search_of()
    composed, balanced = (each.look({**each.space.own, **settings}) for each in (search, even))
    whole, _ = search.exact(composed, partial(ledger, skew=1.5))
    assert composed.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert composed.step_s == pytest.approx(whole.step_s, rel=0.01)
    has_more = settings.get(EP) != 1
    assert (composed.peak_bytes > balanced.peak_bytes, composed.step_s > balanced.step_s) == (has_more, has_more)


def test_each_position_of_a_composed_candidate_is_as_large_as_in_its_whole_plan() -> None:
    """The norm behind the last layer is not one of each layer like it."""
    search = search_of()
    recomputed = [{"use": "recompute", "regions": ["attn_norm", "core_attn", "mlp_norm", "dispatch", "expert_fc1"]}]
    every = {**search.space.own, PP: 2, EP: 4, MEMORY: recomputed, **ZERO_1}
    assembly = search.resolve(every, WORLD)
    measured = search.excerpts.of(every, assembly)
    composed = Composer.of(assembly, measured.excerpt, measured.kinds).ledger()
    whole = measure(assembly, assembly.micro_batches)
    found = {at: position.peak_bytes for position in composed.positions for at in position.at}
    expected = {at: position.peak_bytes for position in whole.positions for at in position.at}
    assert found == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("settings", [{**MERGED, **SHARDED}, {EP: 2, **MERGED, **ZERO_1}], ids=["sharded", "whole"])
def test_a_candidate_in_other_software_takes_what_its_whole_plan_does(settings: Settings) -> None:
    """Kernels outside of layers are launched once for a micro-batch there, however many stages a rank has."""
    search = search_of(runs=Software(implementation="megatron"))
    composed = search.look({**search.space.own, **settings})
    whole, _ = search.exact(composed, ledger)
    assert composed.step_s == pytest.approx(whole.step_s, rel=0.001)


@pytest.mark.parametrize("settings", [{PP: 4, **SHARDED}, {EP: 2, **MERGED, **ZERO_1}], ids=["pp 4", "merged"])
def test_groups_of_a_composed_candidate_lie_as_in_its_whole_plan(settings: Settings) -> None:
    search = search_of()
    every = {**search.space.own, **settings}
    assembly = search.resolve(every, WORLD)
    measured = search.excerpts.of(every, assembly)
    composed = Composer.of(assembly, measured.excerpt, measured.kinds).ledger()
    whole = ledger(assembly)
    assert composed.ranks_per_node == whole.ranks_per_node == 8
    assert groups_in(composed) == groups_in(whole)


@pytest.mark.parametrize("settings", [{PP: 4, EP: 2}, {EP: 2, **MERGED}], ids=["1f1b", "merged"])
def test_a_composed_position_sends_once_a_step_what_its_whole_plan_does(settings: Settings) -> None:
    """Gradients of whole parameters, which are summed behind the last pass, and weights."""
    search = search_of()
    every = {**search.space.own, **settings, **ZERO_1}
    assembly = search.resolve(every, WORLD)
    measured = search.excerpts.of(every, assembly)
    composed = Composer.of(assembly, measured.excerpt, measured.kinds).ledger()
    whole = ledger(assembly)
    sent, expected = sent_once(composed), sent_once(whole)
    assert sent == pytest.approx(expected, rel=0.02)


def sent_once(found: Ledger) -> dict[int, int]:
    """Bytes that each position sends once a step."""
    return {
        at: sum(
            work.layers * moved.times * (moved.node + moved.network)
            for work in position.work
            if work.phase == "once"
            for moved in work.transfers
        )
        for position in found.positions
        for at in position.at
    }


def groups_in(found: Ledger) -> set[tuple[str, int, int]]:
    """Kind, ranks and span of each transfer."""
    every = [work for position in found.positions for work in position.work]
    return {(transfer.kind, transfer.ranks, transfer.span) for work in every for transfer in work.transfers}


def test_the_same_seed_gives_the_same_and_the_cache_saves_the_measuring(tmp_path: Path) -> None:
    first, again = (search_of(("schedule", "layout"), tmp_path) for _ in range(2))
    first.run(12, seed=3)
    again.run(12, seed=3)
    assert [*first.known] == [*again.known]
    assert first.excerpts.measured == again.excerpts.from_cache > 0
    assert again.excerpts.measured == 0
    assert [each.step_s for each in first.candidates] == [each.step_s for each in again.candidates]


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ("dddmmmmmm", range(6)),  # both kinds have neighbours like themselves
        ("dmmmmm", range(4)),
        ("abababab", range(6)),  # a row of blocks of two
        ("mmmmd", range(3)),  # the last layer is measured anyway
        ("dm", range(1)),
    ],
)
def test_layers_that_gather_ahead_are_measured_between_layers_like_themselves(kinds: str, chosen: range) -> None:
    (first,), (last,) = _stages(kinds, has_neighbours=True)
    assert first.layers == chosen
    assert last.layers == range(len(kinds) - 1, len(kinds))


def test_an_excerpt_from_the_cache_is_that_of_a_candidate_with_another_pp(tmp_path: Path) -> None:
    first, again = (search_of(("layout",), tmp_path) for _ in range(2))
    first.look({**first.space.own, PP: 1})
    assert again.look({**again.space.own, PP: 2}).step is not None
    assert again.excerpts.from_cache == 1


def test_a_part_of_a_third_party_enters_the_search() -> None:
    search = search_of(("schedule",))
    search.run(40, seed=0)
    labels = {candidate.label for candidate in search.candidates}
    assert {"of-another", "1f1b", "zbv"} <= labels
    assert search.excerpts.measured == 2, "a schedule changes a layer only by merging passes"
    assert sum(search.counts[name] for name in OUTCOMES) == search.counts["candidates"]
    best = tied(search.candidates)[0]
    assert any("interleaved" in line or "gpipe" in line for line in reasons(search, best))


def test_what_is_kept_stays_and_what_is_named_varies_alone() -> None:
    own = search_of()
    assert {axis.name for axis in search_of(("layout",)).space.axes} == {"pp", "tp", "cp", "ep", "etp"}
    assert {axis.name for axis in search_of(("ep", "memory")).space.axes} == {"ep", "memory"}
    kept = search_of(keep=("tp", "schedule"))
    assert {axis.name for axis in own.space.axes} - {axis.name for axis in kept.space.axes} == {"tp", "schedule"}
    kept.run(10, seed=0)
    assert all(("parallel", "dense", "tp") not in candidate.settings for candidate in kept.known.values())


def steps_to(search: Search, pp: int, settings: Settings) -> Settings:
    """Settings a step away with this pp."""
    return next(
        step for axis, step in search.steps_from(settings) if axis.name == "pp" and step[PP] == pp and step[EP] == 4
    )


def test_stages_that_a_spec_spells_out_are_those_of_its_own_pp() -> None:
    even = {"use": "interleaved", "chunks": 2, "merged": False}
    spelled = {**even, "layout": "Et|t|t|tL"}
    search = search_of(("layout", "schedule"), pipeline=spelled)
    own = search.space.own
    assert search.look(own).label.endswith("interleaved chunks 2 with the spec's stages")
    narrower = steps_to(search, 1, own)
    assert narrower[PIPELINE] == even
    assert search.look(narrower).step is not None
    assert steps_to(search, 2, narrower)[PIPELINE] == even
    schedules = [step[PIPELINE] for axis, step in search.steps_from(own) if axis.kind == "schedule"]
    assert even in schedules, "the same schedule with layers spread evenly"
    kept = search_of(("layout",), keep=("schedule",), pipeline=spelled)
    narrower = steps_to(kept, 1, kept.space.own)
    assert narrower[PIPELINE] == even
    assert steps_to(kept, 2, narrower) == kept.space.own, "the schedule is kept with its stages"


def test_a_step_to_another_pp_takes_a_schedule_that_goes_with_it() -> None:
    merged = {"use": "interleaved", "chunks": 2, "merged": True}
    search = search_of(("layout", "schedule"), pipeline=merged)
    own = search.space.own
    alone = steps_to(search, 1, own)
    assert alone[PIPELINE] == {"use": "merged"}, "interleaved merges passes of several stages"
    assert steps_to(search, 2, alone)[PIPELINE]["merged"], "merged is a schedule of one stage"
    assert steps_to(search, 4, own)[PIPELINE]["use"] == "1f1b", "4 layers are not 8 stages, and none of 4 merges passes"
    kept = search_of(("layout",), keep=("schedule",), pipeline=merged)
    refused = kept.look(steps_to(kept, 1, kept.space.own))
    assert refused.outcome == "refused by check"
    assert "without pp" in refused.problems[0]


def test_parts_that_the_software_lacks_are_refused_and_counted() -> None:
    search = search_of(("schedule",), runs=Software(implementation="megatron"))
    search.run(40, seed=0)
    lacking = [candidate for candidate in search.known.values() if candidate.outcome == "not in the software"]
    assert len(lacking) == search.counts["not in the software"]
    assert "megatron has no pipeline: zbv." in {problem for candidate in lacking for problem in candidate.problems}
    assert {candidate.settings[PIPELINE]["use"] for candidate in search.candidates} <= {"1f1b", "interleaved", "merged"}


def a_candidate(
    label: str, step_s: float, *, left_gib: int = 1, complexity: int = 1, inputs: Inputs | None = None
) -> Candidate:
    """Return a candidate of such a time, with inputs of a published row if none are given."""
    step: Any = SimpleNamespace(step_s=step_s)
    return Candidate(
        settings={},
        label=label,
        step=step,
        inputs=inputs or held_out()[0].inputs,
        left_bytes=left_gib << 30,
        peak_bytes=complexity,
        complexity=complexity,
    )


def test_ties_are_in_the_order_of_memory_left_then_simplicity() -> None:
    error = error_of_ratio(held_out()).share
    found = [
        a_candidate("fastest", 1.0, left_gib=1, complexity=3),
        a_candidate("roomy", 1 + error / 2, left_gib=9, complexity=4),
        a_candidate("simple and roomy", 1 + error / 2, left_gib=9, complexity=2),
        a_candidate("slow", 1 + error * 1.1, left_gib=20, complexity=1),
        a_candidate("too large", 0.5, left_gib=-1, complexity=0),
    ]
    assert [each.label for each in tied(found)] == ["simple and roomy", "roomy", "fastest"]


def test_what_is_recommended_is_the_first_of_those_that_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one that was looked at to say why others lose has more memory left."""
    known = [a_candidate("fastest", 1.0)]
    search: Any = SimpleNamespace(candidates=known, exact=lambda candidate, _: (candidate, "its forecast"))

    def looked_at_others(_: Search, best: Candidate) -> list[str]:
        if best.label == "fastest":
            known.append(a_candidate("roomy", 1.001, left_gib=9))
        return [f"others than {best.label} lose"]

    monkeypatch.setattr(commands, "reasons", looked_at_others)
    best, told, lines = commands._recommended(search)
    assert (best.label, told, lines) == ("roomy", "its forecast", ["others than roomy lose"])


def test_a_candidate_that_is_unlike_published_rows_ties_with_slower_ones() -> None:
    known, unlike = held_out()[0].inputs, evolve(held_out()[0].inputs, tp=64, cp=64)
    slower = 1 + error_of_ratio(held_out()).share * 1.4
    found = [a_candidate("fastest", 1.0, inputs=unlike), a_candidate("known", slower, left_gib=9, inputs=known)]
    assert [each.label for each in tied(found)] == ["known", "fastest"]
    assert percent_below_ties(found[1], found[0]) < 0
    slower_and_unlike = [evolve(found[0], inputs=known), evolve(found[1], inputs=unlike)]
    assert [each.label for each in tied(slower_and_unlike)] == ["fastest"], "it may be faster, and nobody knows"
    both_unlike = [evolve(each, inputs=unlike) for each in found]
    assert [each.label for each in tied(both_unlike)] == ["fastest"]
    assert percent_below_ties(both_unlike[1], both_unlike[0]) > 0


def test_where_nothing_fits_all_is_said_with_the_nearest_that_fits() -> None:
    search = search_of(("schedule", "layout"), gib=0.02)
    search.run(6, seed=0)
    assert not tied(search.candidates)
    error = impossible(search)
    assert isinstance(error, PlanError)
    first, *others = error.problems
    assert "the nearest misses by" in first.what
    assert "On " in first.fix or "Use GPUs" in first.fix
    assert len(others) == len({problem for each in search.known.values() for problem in each.problems})


@pytest.mark.parametrize(
    "settings",
    [{}, {PP: 4, **SHARDED}, {PP: 1, EP: 8, ("parallel", "experts", "shard"): 2}, {EP: 2, **MERGED, **ZERO_1}],
    ids=["pp", "sharded", "sharded by two", "zero 1"],
)
def test_parameters_of_a_model_are_counted_once_in_any_layout(settings: Settings) -> None:
    search = search_of()
    every = {**search.space.own, **settings}
    assembly = search.resolve(every, WORLD)
    measured = search.excerpts.of(every, assembly)
    alone = ledger(search.resolve({**search.space.own, PP: 1, EP: 1}, 1))
    assert Composer.of(assembly, measured.excerpt, measured.kinds).parameter_bytes() == alone.held.parameters


def test_a_search_ends_at_once_where_not_even_parameters_and_gradients_fit() -> None:
    search = search_of(("schedule", "layout"), gib=0.001)
    search.run(6, seed=0)
    assert search.counts["candidates"] == 1
    (problem,) = impossible(search).problems
    assert f"of each of {WORLD} GPUs at least" in problem.what
    (more,) = [int(word) for word in problem.fix.split() if word.isdigit()]
    roomier = search_of(("schedule", "layout"), gib=0.001 * (more + 1) / WORLD)
    roomier.look(roomier.space.own)
    assert not roomier.nothing_can_fit


def test_the_written_spec_is_what_check_accepts(tmp_path: Path) -> None:
    spec, best = tmp_path / "spec.yaml", tmp_path / "best.yaml"
    spec.write_text(json.dumps(TREE))
    words = [str(spec), "--cluster", "h100", "--gpus", str(WORLD), "--candidates", "6", "--vary", "schedule"]
    told = CliRunner().invoke(tune, [*words, "--json", "--output", str(best)], catch_exceptions=False)
    found = json.loads(told.stdout)
    assert found["best"]["fits"]
    assert found["counts"]["candidates"] == 6
    checked = CliRunner().invoke(check, [str(best), "--world", str(WORLD)], catch_exceptions=False)
    assert "is sound" in checked.stdout


def tune_on(gpus: int, spec: Path, parallel: Mapping[str, Any], *words: str) -> Result:
    """What ``tune`` says of ``TREE`` with this layout."""
    spec.write_text(json.dumps({**TREE, "parallel": parallel}))
    given = [str(spec), "--cluster", "h100", "--gpus", str(gpus), "--candidates", "5", *words]
    return CliRunner().invoke(tune, given)


EIGHT: Mapping[str, Any] = {"experts": {"ep": 8}}
DO_NOT_FIT = "4 ranks do not fit this layout, which wants a multiple of 8"


@pytest.mark.parametrize(
    "parallel",
    [EIGHT, {"dense": {"shard": 8}, **EIGHT}],
    ids=["ep 8", "shards of 8"],
)
def test_a_search_goes_on_without_a_layout_that_the_gpus_do_not_fit(
    tmp_path: Path, parallel: Mapping[str, Any]
) -> None:
    told = json.loads(tune_on(4, tmp_path / "spec.yaml", parallel, "--json").stdout)
    assert told["best"]["fits"]
    assert told["best"]["layout"]["ep"] <= 4
    assert DO_NOT_FIT in told["own"]["problems"][0]
    assert told["counts"]["candidates"] == 5
    assert told["counts"]["refused by check"] >= 1
    shown = tune_on(4, tmp_path / "spec.yaml", parallel).stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("SPEC as it is")]
    assert line.startswith(f"SPEC as it is, is no candidate: {DO_NOT_FIT}")


@pytest.mark.parametrize(
    ("gpus", "parallel", "words"),
    [(4, EIGHT, ("--keep", "ep")), (4, EIGHT, ("--vary", "micro-batch")), (4, {"pp": 8}, ())],
    ids=["ep is kept", "layouts do not vary", "the spec is wrong in itself"],
)
def test_a_layout_that_the_gpus_do_not_fit_is_refused_where_no_other_is_found(
    tmp_path: Path, gpus: int, parallel: Mapping[str, Any], words: tuple[str, ...]
) -> None:
    refused = tune_on(gpus, tmp_path / "spec.yaml", parallel, *words)
    assert isinstance(refused.exception, MoefwError)
    assert DO_NOT_FIT in refused.exception.problems[0].what
    told = json.loads(tune_on(gpus, tmp_path / "spec.yaml", parallel, *words, "--json").stdout)
    assert not told["ok"]


def test_a_search_ends_at_once_where_another_layout_shows_that_nothing_can_fit() -> None:
    search = search_of(("schedule", "layout"), gib=0.001)
    search.space = evolve(search.space, own={**search.space.own, EP: 32})
    search.run(20, seed=0)
    assert len(search.candidates) == 1
    assert "GPUs at least" in impossible(search).problems[0].what
