"""The dispatcher suite passes correct dispatchers and names the faults of broken ones."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from attrs import evolve, frozen
from hypothesis.errors import FlakyFailure

import copies
import unordered_dispatchers
from broken_dispatchers import BROKEN, Broken
from broken_movements import ON_REAL_RANKS
from dispatchers import DISPATCHERS
from in_any_order import InAnyOrder
from moefw.compose.registry import Registry
from moefw.core.errors import ContractError
from moefw.plugins.dispatchers.allgather import AllGather
from moefw.plugins.dispatchers.alltoall import AllToAll
from moefw.plugins.dispatchers.deepep import DeepEP
from moefw.plugins.dispatchers.hybridep import HybridEP
from moefw.testing import DispatcherSuite
from moefw.testing.pool import RankPool
from moefw.testing.profiles import PROFILES, Profile, smoke
from moefw.testing.suites import dispatch_run
from pairwise import deep
from static_alltoall import ROOM, StaticAllToAll

ON_THREADS = [
    name for name, each in BROKEN.items() if not each.check.startswith("test_the_layer") and "RealRanks" not in name
]


def suite(broken: Broken, pool: RankPool | None, worlds: Sequence[int]) -> DispatcherSuite:
    made = type("TestBroken", (DispatcherSuite,), {"plugin": broken.plugin})()
    made.pool, made.profile = pool, Profile(worlds=tuple(worlds), examples=4)
    return made


def said(check) -> str:
    """Return the failure message of a check; empty if it passes or skips."""
    try:
        check()
    except pytest.skip.Exception:
        return ""
    except pytest.fail.Exception as failure:
        return str(failure)
    return ""


def test_the_broken_dispatchers_of_every_module_are_tried() -> None:
    """They are recorded when their module is imported."""
    support = Path(unordered_dispatchers.__file__).parent
    declaring = {file.stem for file in support.glob("*.py") if "\n@breaks(" in file.read_text()}
    assert {each.plugin.__module__ for each in BROKEN.values()} == declaring


@pytest.mark.parametrize("name", ON_THREADS)
def test_what_is_broken_is_found_and_named(name: str) -> None:
    broken = BROKEN[name]
    held = suite(broken, None, broken.worlds)
    message = said(getattr(held, broken.check))
    assert broken.words in message, message or "nothing was found"
    assert message.startswith(broken.plugin.name)


@pytest.mark.parametrize("name", [name for name in BROKEN if name not in ON_THREADS])
def test_what_is_broken_among_processes_is_found_and_named(pool: RankPool, name: str) -> None:
    broken = BROKEN[name]
    held = suite(broken, pool, broken.worlds)
    type(held).job_s = 8.0 if broken.words == "the ranks hang" else 20.0
    message = said(getattr(held, broken.check))
    assert broken.words in message, message or "nothing was found"


def test_a_dispatcher_that_cannot_run_on_threads_is_held_on_real_ranks(pool: RankPool) -> None:
    held = suite(ON_REAL_RANKS, pool, (2,))
    assert not held.on_threads
    for check in (
        held.test_rows_come_in_order_of_expert_source_rank_and_token,
        held.test_gradients_of_tokens_and_weights_are_the_true_ones,
        held.test_every_rank_makes_the_same_collectives,
        held.test_no_buffer_is_read_before_its_collective_is_awaited,
        held.test_movements_are_under_way_between_start_and_finish,
        held.test_redispatch_exchanges_no_metadata,
        held.test_two_dispatchers_do_not_disturb_each_other,
        held.test_two_movements_in_flight_do_not_disturb_each_other,
    ):
        check()


def test_a_plugin_that_no_other_process_can_import_is_told_so(pool: RankPool) -> None:
    class Hidden(AllToAll):
        name = "hidden"

    held = type("TestHidden", (DispatcherSuite,), {"plugin": frozen(Hidden)})()
    held.pool, held.profile = pool, Profile(worlds=(2,), examples=1)
    assert "declare it at the top of a module" in said(held.test_the_layer_equals_the_oracle_in_bf16)


def test_wrong_arguments_fail_one_check_and_the_others_name_it() -> None:
    held = suite(BROKEN["KnowsNoDropless"], None, (2,))
    for check in (held.test_every_rank_makes_the_same_collectives, held.test_the_layer_equals_the_oracle):
        assert said(check) == (
            "knowsnodropless: nothing is checked before "
            "test_its_methods_take_and_return_what_the_contract_says passes. See there."
        )


def test_after_a_hang_no_other_check_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = []

    def hang(*_: object, **__: object) -> None:
        hangs.append("thread_world")
        raise ContractError("rank 1 did not come to the barrier (not in 20 s); waiting there: rank 0.")

    monkeypatch.setattr(dispatch_run, "thread_world", hang)
    held = suite(BROKEN["KeepsAPlan"], None, (2,))
    for check in (held.test_inputs_may_be_views, held.test_every_rank_makes_the_same_collectives):
        assert "rank 1 did not come to the barrier" in said(check)
    assert hangs == ["thread_world"]


def test_movements_are_checked_before_whole_layers() -> None:
    """pytest runs the checks of base classes first: a layer only says that something is wrong."""
    ran = [name for base in reversed(DispatcherSuite.__mro__) for name in vars(base) if name.startswith("test_")]
    places = ran.index("test_redispatch_brings_rows_to_the_places_of_their_dispatch")
    assert places < ran.index("test_rows_of_keys_are_redispatched_bit_for_bit"), "the latter needs the former"
    layers = [place for place, name in enumerate(ran) if "layer" in name]
    assert ran[:2] == [
        "test_its_offers_are_values_that_parts_may_need",
        "test_it_can_be_built_and_its_declaration_is_pure",
    ]
    assert layers == [*range(layers[0], layers[-2] + 1), len(ran) - 1]
    between = ran[layers[-2] + 1 : -1]
    assert between == [
        "test_steps_that_it_offers_to_replay_have_the_bits_of_eager_ones",
        "test_drawn_movements_are_right",
    ]


def every_check(held: DispatcherSuite) -> Iterator[tuple[str, str]]:
    """Run all checks of dispatchers; yield those that fail, with their messages.

    A race of threads may not show a second time. Replays have ranks of their own, and none is broken in them.
    """
    for name in (name for name in dir(held) if name.startswith("test_") and "replay" not in name):
        try:
            message = said(getattr(held, name))
        except FlakyFailure as sometimes:
            message = f"not every time: {sometimes.exceptions[0]}"
        if message:
            yield name, message


@pytest.fixture(autouse=True)
def the_same_examples_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples are not random, so the same faults are caught every time."""
    monkeypatch.setenv("CI", "true")


@pytest.mark.parametrize(
    "name",
    [
        "WrongOrder",
        "WeightsOfTheWrongRows",
        "FillsPadding",
        "KeepsAPlan",
        "FailsWithoutTokens",
        "WaitsInStart",
        "RedispatchPlansAgain",
        "IgnoresTheCapacity",
    ],
)
def test_the_smoke_profile_finds_it(name: str) -> None:
    held = suite(BROKEN[name], None, PROFILES["smoke"].worlds)
    checks = [getattr(held, check) for check in dir(held) if check.startswith("test_")]
    smoke_checks = [check for check in checks if smoke.mark in getattr(check, "pytestmark", ())]
    assert any(said(check) for check in smoke_checks)


@pytest.mark.deep
@pytest.mark.parametrize(
    "name",
    [
        "DropsRowsBehindThe200th",
        "ForgetsColumnsBehind64",
        "HasRoomForFourMovements",
        "KeepsBuffersInItsPackage",
        "MisspellsAnOffer",
    ],
)
def test_no_other_check_finds_it(pool: RankPool, name: str) -> None:
    broken = BROKEN[name]
    found = {check for check, _ in every_check(suite(broken, pool, broken.worlds))}
    of_all_here = {"test_the_declaration_imports_no_torch"}  # they are declared beside their runtime
    assert found - of_all_here == {broken.check}


@pytest.mark.deep
@pytest.mark.parametrize("name", BROKEN)
def test_a_whole_run_finds_it_too(pool: RankPool, name: str) -> None:
    broken = BROKEN[name]
    found = dict(every_check(suite(broken, pool, broken.worlds)))
    assert broken.words in found.get(broken.check, ""), found


@pytest.fixture(scope="session", params=[(3, 4), pytest.param((1, 2), marks=pytest.mark.deep)], ids=str)
def moefw_profile(request: pytest.FixtureRequest) -> Profile:
    return evolve(PROFILES["quick"], worlds=request.param, examples=6)


on_two_ranks = pytest.mark.parametrize("moefw_profile", [(2,), *deep((1, 3, 4))], ids=str, indirect=True)
"""For dispatchers of these tests alone, which a suite must accept."""


class TestAllToAll(DispatcherSuite):
    plugin = AllToAll


@on_two_ranks
class TestStaticAllToAll(DispatcherSuite):
    plugin = StaticAllToAll
    options = ROOM

    def test_thousands_of_wide_rows_are_moved_as_few_narrow_ones(self) -> None:
        pytest.skip("its room for every small case is 64 times the rows of a balanced rank, hundreds of MiB here")


@on_two_ranks
class TestInAnyOrder(DispatcherSuite):
    plugin = InAnyOrder


class TestAllGather(DispatcherSuite):
    plugin = AllGather


class TestDeepEP(DispatcherSuite):
    plugin = DeepEP
    options = {"backend": "torch"}


class TestHybridEP(DispatcherSuite):
    plugin = HybridEP
    options = {"backend": "torch"}


def test_every_installed_dispatcher_is_certified_here() -> None:
    registry = Registry()
    assert registry.load_all() == []
    ours = {part.name for part in registry.parts() if part.kind == "dispatcher" and part.distribution == "moefw"}
    certified = {each.plugin.name for each in (TestAllToAll, TestAllGather, TestDeepEP, TestHybridEP)}
    assert ours == certified == set(DISPATCHERS)


@pytest.mark.parametrize("more", [{"on_overflow": "drop"}, {"on_overflow": "rerun", "max_tokens": 6}], ids=str)
def test_a_static_budget_passes_what_concerns_it(more: dict[str, object]) -> None:
    options = {"backend": "torch", "rank_capacity": 0.6, **more}
    held = type("TestStatic", (DispatcherSuite,), {"plugin": HybridEP, "options": options})()
    held.profile = Profile(worlds=(1, 4), examples=4)
    held.test_a_static_budget_holds_whatever_the_routing()
    held.test_rows_come_in_order_of_expert_source_rank_and_token()
    held.test_padding_and_undefined_rows_are_never_read()


# The command line: an empty folder, no test file.


def certify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return copies.run("pytest", "-p", "no:cacheprovider", *arguments, cwd=folder)


def test_an_installed_dispatcher_is_certified_in_an_empty_folder(tmp_path: Path) -> None:
    options = ("--moefw-dispatcher", "deepep", "--moefw-options", "{backend: torch}")
    done = certify(tmp_path, *options, "-v", "-k", "order or static")
    assert done.returncode == 0, done.stdout
    assert "moefw::TestDeepep::test_rows_come_in_order_of_expert_source_rank_and_token PASSED" in done.stdout
    assert "2 passed, 1 skipped" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", ["{}", "{regions: [attention]}"])
def test_a_memory_policy_is_certified_with_regions_and_without(tmp_path: Path, options: str) -> None:
    chosen = ("--moefw-memory-policy", "recompute", "--moefw-options", options)
    done = certify(tmp_path, *chosen, "-k", "a_region_runs_once", "-q")
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--moefw-dispatcher", "altoall"], "Did you mean 'alltoall'?"),
        (["--moefw-dispatcher", "topk"], "one of the routers. Installed here: allgather, alltoall, deepep, hybridep"),
        (["--moefw-dispatcher", "deepep"], "Pass --moefw-options '{backend: torch}'"),
        (["--moefw-dispatcher", "deepep", "--moefw-options", "{backend: nccl}"], "'nccl' is not one of the choices"),
        (["--moefw-dispatcher", "deepep", "--moefw-options", "{bakend: torch}"], "Did you mean 'backend'?"),
        (["--moefw-options", "{backend: torch}"], "exactly one of"),
        (["--moefw-profile", "hard"], "use one of smoke, quick, ci, nightly"),
        (["--moefw-gemm", "loop", "--moefw-profile", "smoke"], "TestLoop has no checks for it. Use quick."),
    ],
)
def test_what_cannot_be_certified_is_a_usage_error_with_one_message(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = certify(tmp_path, *arguments)
    assert done.returncode == 4
    assert words in done.stderr
    assert done.stderr.strip().count("\n") == 0
