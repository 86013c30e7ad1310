"""Every fact settles by its rule in any order of the parts; a misfit names the parts, the reason and a remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefw.compose.fitting import Misfit, match
from moefw.core.errors import PluginError
from moefw.core.facts import ANY, FACTS, Need, need, offers

ROWS = ("ragged", "padded", "static")
CHOICES = st.lists(st.sampled_from(ROWS), min_size=1, unique=True).map(tuple)
OFFERED = CHOICES | st.just(ANY)
ALIGNMENTS = st.lists(st.sampled_from([1, 2, 8, 16, 24, 32, 128]), min_size=1, unique=True).map(tuple) | st.just(ANY)


def settle(fact: str, offered: Sequence[Any], needed: Sequence[Any] = ()) -> tuple[Any, list[Misfit[str]]]:
    """Return the value that parts settle on, and the misfits. Offering parts are o0, o1, ..., needing parts n0, n1, ..."""
    promises = [(f"o{index}", offers(**{fact: value})) for index, value in enumerate(offered)]
    demands = [(f"n{index}", need(fact, value, reason=f"why{index}")) for index, value in enumerate(needed)]
    facts, misfits = match(promises, demands)
    return facts.get(fact), misfits


def askers(misfits: Sequence[Misfit[str]]) -> list[str]:
    return [misfit.asker for misfit in misfits]


@pytest.mark.parametrize(
    ("offered", "needed", "value", "unmet"),
    [
        ([ANY], [], 1, []),
        ([ANY], [8], 8, []),
        ([ANY, ANY], [16, 24], 48, []),
        ([(1, 16, 32)], [16], 16, []),
        ([(128,)], [], 128, []),
        ([(128,)], [16], 128, []),
        ([(128, 64)], [16, 32], 64, []),
        ([(16, 32), (32, 64)], [8], 32, []),
        ([(16, 32), ANY], [32], 32, []),
        ([(1, 16)], [32], None, ["n0"]),
        ([(1, 16)], [16, 32], None, ["n1"]),
        ([(16,), (32,)], [1], None, ["n0"]),
        ([(16, 24)], [16, 24], None, ["n1"]),
    ],
)
def test_row_alignment_is_the_smallest_offered_multiple_of_the_needs(
    offered: list[Any], needed: list[int], value: int | None, unmet: list[str]
) -> None:
    settled, misfits = settle("row_alignment", offered, needed)
    assert (settled, askers(misfits)) == (value, unmet)


@given(st.lists(ALIGNMENTS, min_size=1, max_size=3), st.lists(st.integers(1, 64), max_size=4))
def test_a_settled_alignment_is_offered_by_all_and_aligned_for_all(offered: list[Any], needed: list[int]) -> None:
    settled, misfits = settle("row_alignment", offered, needed)
    good = math.lcm(*needed)
    lists = [offer for offer in offered if offer != ANY]
    possible = [number for number in set().union(*lists) if number % good == 0 and all(number in one for one in lists)]
    if not lists:
        assert (settled, misfits) == (good, [])
    elif possible:
        assert (settled, misfits) == (min(possible), [])
    else:
        assert settled is None
        assert bool(misfits) == bool(needed)


@pytest.mark.parametrize(
    ("offered", "needed", "value", "unmet"),
    [
        ([("ragged", "padded")], [], "ragged", []),
        ([("ragged", "padded")], [("padded", "ragged")], "padded", []),
        ([("ragged", "padded")], [("static", "padded")], "padded", []),
        ([("ragged", "padded"), ("padded",)], [], "padded", []),
        ([("ragged",), ("padded",)], [("ragged",)], None, ["n0"]),
        ([("ragged",)], [("padded",), ("ragged",)], None, ["n0"]),
        ([("ragged", "padded")], [("ragged",), ("padded",), ("padded",)], None, ["n0"]),
        ([ANY], [("static", "padded"), ("padded",)], "padded", []),
        ([ANY, ("padded",)], [("padded", "ragged")], "padded", []),
        ([ANY], [], None, []),
        ([], [("ragged",)], None, ["n0"]),
    ],
)
def test_alternatives_settle_on_what_suits_all_in_order_of_preference(
    offered: list[Any], needed: list[Any], value: str | None, unmet: list[str]
) -> None:
    settled, misfits = settle("rows", offered, needed)
    assert (settled, askers(misfits)) == (value, unmet)


@given(st.lists(OFFERED, min_size=1, max_size=3), CHOICES)
def test_a_lone_need_gets_the_first_of_its_alternatives_that_all_offer(offered: list[Any], wanted: tuple[str]) -> None:
    possible = [one for one in wanted if all(offer == ANY or one in offer for offer in offered)]
    settled, misfits = settle("rows", offered, [wanted])
    assert settled == (possible[0] if possible else None)
    assert bool(misfits) == (not possible)


@given(st.lists(OFFERED, min_size=1, max_size=3), st.lists(CHOICES, min_size=1, max_size=3))
def test_a_settled_alternative_suits_everybody_if_any_does(offered: list[Any], needed: list[Any]) -> None:
    settled, misfits = settle("rows", offered, needed)
    suits = [one for one in ROWS if all(one in each for each in [*needed, *(o for o in offered if o != ANY)])]
    assert (settled in suits) == bool(suits) == (not misfits)


@given(st.data())
def test_the_order_of_parts_does_not_matter(data: st.DataObject) -> None:
    fact, offered, needed = data.draw(
        st.one_of(
            st.tuples(st.just("rows"), st.lists(OFFERED, max_size=3), st.lists(CHOICES, max_size=3)),
            st.tuples(
                st.just("row_alignment"), st.lists(ALIGNMENTS, max_size=3), st.lists(st.integers(1, 32), max_size=3)
            ),
            st.tuples(st.just("by_pass"), st.lists(st.booleans(), max_size=3), st.lists(st.booleans(), max_size=3)),
        )
    )
    promises = [(f"o{i}", offers(**{fact: value})) for i, value in enumerate(offered)]
    demands = [(f"n{i}", need(fact, value, reason="why")) for i, value in enumerate(needed)]
    facts, misfits = match(promises, demands)
    shuffled, others = match(data.draw(st.permutations(promises)), data.draw(st.permutations(demands)))
    assert shuffled == facts
    assert {misfit.need.value for misfit in others} == {misfit.need.value for misfit in misfits}


@pytest.mark.parametrize(
    ("fact", "offered", "needed", "unmet"),
    [
        ("axis", [("dp", "ep")], ["ep", "tp"], ["n1"]),
        ("axis", [("dp",), ("ep",)], ["ep", "dp"], []),
        ("axis", [], ["ep"], ["n0"]),
        ("axis_divides", [(("ep", 4), ("dp", 3))], [("ep", 16), ("ep", 15), ("dp", 15), ("tp", 8)], ["n1", "n3"]),
        ("region", [(("act", "keep"),), (("act", "recompute"),)], [("act", "recompute"), ("act", "offload")], ["n1"]),
        ("region", [ANY], [("act", "recompute")], []),
        ("package", [("torch",)], ["torch", "deep_ep"], ["n1"]),
        ("by_pass", [True, True], [True, False], []),
        ("by_pass", [True, False], [True, False], ["n0"]),
        ("row_keys", [False], [False], []),
        ("budget", [(1.5,)], [0.0], []),
        ("budget", [], [0.0], ["n0"]),
        ("token_ids", [(256,)], [256, 257], ["n1"]),
        ("device", [("cpu",)], [("cuda", "cpu")], []),
        ("device", [("cpu",)], [("cuda",)], ["n0"]),
    ],
)
def test_the_other_rules(fact: str, offered: list[Any], needed: list[Any], unmet: list[str]) -> None:
    assert askers(settle(fact, offered, needed)[1]) == unmet


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)), st.tuples(st.sampled_from("abc"), st.integers(0, 40))
)
def test_an_axis_divides_if_it_is_there_and_leaves_no_rest(sizes: dict[str, int], wanted: tuple[str, int]) -> None:
    misfits = settle("axis_divides", [tuple(sizes.items())], [wanted])[1]
    assert (not misfits) == (wanted[0] in sizes and wanted[1] % sizes[wanted[0]] == 0)


@pytest.mark.parametrize(
    ("fact", "offered", "needed", "says"),
    [
        ("rows", [("ragged",)], [("padded", "static")], "n0 needs padded or static rows: why0; o0 offers ragged."),
        ("rows", [], [("padded",)], "n0 needs padded rows: why0; nothing here offers that. Change n0."),
        ("row_alignment", [(1, 16)], [32], "n0 needs rows aligned to 32: why0; o0 offers 1 or 16. Change n0 or o0."),
        (
            "rows",
            [("ragged", "padded")],
            [("ragged",), ("padded",), ("padded",)],
            "n0 needs ragged rows: why0; o0 offers ragged or padded, n1 needs padded rows: why1,"
            " n2 needs padded rows: why2. Change n0 or n1 or n2.",
        ),
        (
            "row_alignment",
            [(16, 24)],
            [16, 24],
            "n1 needs rows aligned to 24: why1; o0 offers 16 or 24, n0 needs rows aligned to 16: why0. Change n1 or n0.",
        ),
        (
            "axis_divides",
            [(("ep", 4), ("dp", 3))],
            [("ep", 6)],
            "that divides 6: why0; o0 offers ep=4. Change n0 or o0.",
        ),
        ("axis", [("ep", "edp")], ["edpp"], "n0 needs axis edpp: why0; nothing here offers that. Did you mean 'edp'?"),
        (
            "region",
            [(("act", "keep"), ("mlp", "keep")), (("mlp", "drop"), ("act", "drop"))],
            [("act", "offload")],
            "n0 needs region act to allow offload: why0; o0 offers act=keep, o1 offers act=drop. Change n0 or o0 or o1.",
        ),
        ("region", [(("act", "keep"),)], [("atc", "keep")], "nothing here offers that. Did you mean 'act'?"),
        ("by_pass", [True, False], [True], "n0 needs operands quantized for each pass: why0;"),
        ("device", [("cpu",)], [("cuda",)], "n0 needs device cuda: why0; o0 offers cpu."),
    ],
)
def test_a_misfit_names_both_parts_the_reason_and_a_way_out(
    fact: str, offered: list[Any], needed: list[Any], says: str
) -> None:
    (misfit,) = settle(fact, offered, needed)[1]
    assert says in str(misfit.problem())
    assert misfit.problem().fix


def test_the_fix_of_a_need_wins() -> None:
    _, (misfit,) = match([], [("gemm", need("axis", "ep", reason="why", fix="Use a layout with ep."))])
    assert misfit.problem().fix == "Use a layout with ep."


def test_facts_that_nobody_speaks_of_are_left_out() -> None:
    assert match([], []) == ({}, [])
    assert match([("o", offers(rows=("ragged",)))], [])[0] == {"rows": "ragged"}


@pytest.mark.parametrize(
    "say", [lambda: need("rowz", 1, reason="why"), lambda: Need("rowz", 1, "why"), lambda: offers(rowz=1)]
)
def test_an_unknown_fact_is_a_plugin_error_with_the_nearest_name(say: Any) -> None:
    with pytest.raises(PluginError, match=r"'rowz' is not a fact that parts agree on\. Did you mean 'rows'\?"):
        say()


def test_every_fact_names_sections_that_exist() -> None:
    from moefw.compose.assembly import ChosenPlugins

    for fact in FACTS.values():
        assert set(fact.offered_by) <= set(ChosenPlugins.__annotations__)


@pytest.mark.parametrize("state", [lambda: offers(rows="ragged"), lambda: need("device", "cpu", reason="because")])
def test_alternatives_are_stated_as_a_tuple(state) -> None:
    with pytest.raises(PluginError, match="takes a tuple of alternatives"):
        state()
