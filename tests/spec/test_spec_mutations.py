"""Any mutation of a good spec is accepted or refused with a place, and never causes a traceback."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moefw.compose.spec.source import Marks, read_yaml
from moefw.core.errors import MoefwError, Problem
from spec_cases import GOOD, assembled

pytestmark = pytest.mark.usefixtures("empty_folder")


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**62, 2**63 - 1, 2**63, 10**30, -(10**400), 0.5, 1e308, 1e-320]),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["topk", "keep", "decoder", "2001-01-01", "no", "~", "8", "qwen3-moe-tiny", "sigmoid", "."]),
    st.sampled_from([[], {}, [[]], [{}], {"use": "keep"}, {"a": {"b": {"c": 1}}}]).map(copy.deepcopy),
)
FRAGMENTS = st.one_of(
    st.sampled_from(
        """&a *a !!int !x !!binary !<%FF> <<: ? : - , [ ] { } | > |9 " ' # % @ ` --- ... \t \r \0 \x85 \u2028 \ufeff \x7f
        .nan -.inf 1e999 0x 0xffffffffffffffffff 2001-01-01T00:00:00Z 12:30 ~ null true -5 99999999999999999999 1_0 é 🦜
        \\ud800 %YAML""".split(" ")
    ),
    st.sampled_from(["\n", "\n  ", "\n- ", ": ", " #", "use: ", "use: keep\n", "[" * 30, "{a: " * 30, "- " * 30, "\t"]),
    st.text(max_size=5),
)


def flow(value: object) -> str:
    """Return a value in YAML's flow style, including NaN and infinities."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[repr(value)]
    return json.dumps(value)


def containers(node: Any) -> list[Any]:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [node, *(found for item in inner for found in containers(item))] if isinstance(node, dict | list) else []


@st.composite
def torn_texts(draw: st.DrawFn) -> str:
    """Return the good spec with pieces of its text inserted, cut out, doubled and replaced."""
    text = GOOD
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        piece = draw(st.sampled_from(["put", "cut", "double", "replace"]))
        new = {"cut": "", "double": text[start:end] * 2}.get(piece)
        text = text[:start] + (draw(FRAGMENTS) if new is None else new) + text[start if piece == "put" else end :]
    return text


@st.composite
def torn_trees(draw: st.DrawFn) -> str:
    """Return the good spec as data, with values changed, deleted, added, wrapped and swapped."""
    tree = read_yaml(GOOD, Marks("good"), [])
    for _ in range(draw(st.integers(1, 3))):
        node = draw(st.sampled_from(containers(tree)))
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            continue
        key = draw(st.sampled_from(keys))
        change = draw(st.sampled_from(["set", "delete", "add", "wrap", "deepen", "swap"]))
        if change == "set":
            node[key] = draw(JUNK)
        elif change == "delete":
            del node[key]
        elif change == "add" and isinstance(node, dict):
            node[draw(st.text(max_size=6) | st.sampled_from(["use", "preset", "stepz", "num_layers", "dp"]))] = draw(
                JUNK
            )
        elif change == "wrap":
            node[key] = [node[key]]
        elif change == "deepen":
            node[key] = {"use": node[key]}
        else:
            other = draw(st.sampled_from(keys))
            node[key], node[other] = node[other], node[key]
    return flow(tree)


KEYS = st.sampled_from(
    """model routing dispatch gemm memory parallel data train run use preset regions experts ep dense dp pp steps lr seed
    balance 0 1 7 -1 kind num_layers num_experts top_k schedule optimizer dir device observers ² ٣""".split()
)
OVERRIDES = st.one_of(
    st.builds(lambda keys, value: f"{'.'.join(keys)}={value}", st.lists(KEYS, min_size=1, max_size=4), JUNK.map(flow)),
    st.builds(lambda keys, value: f"{'.'.join(keys)}={value}", st.lists(KEYS, min_size=1, max_size=3), FRAGMENTS),
    st.text(max_size=12),
)
MUTATED = st.one_of(
    torn_texts(),
    torn_trees(),
    torn_trees(),
    st.just(GOOD),
    st.binary(max_size=40),
    st.sampled_from(["", "[]", "a", "~"]),
)


@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=pytest.mark.deep)])
def test_mutated_specs_are_sound_or_refused_with_a_place(number: int) -> None:
    outcomes: Counter[bool] = Counter()

    @settings(max_examples=number)
    @given(MUTATED, st.lists(OVERRIDES, max_size=2))
    @example('{"model": "\\u001e"}', [])
    @example('{"model": {"use": null, "preset": []}}', [])
    @example('{"data": {"use": "blend", "parts": [7, {"use": []}, {"use": "text", "weight": "x"}]}}', [])
    @example('{"data": {"use": "blend", "parts": 7}}', ["data.parts.0=1"])
    def check_one(spec: str | bytes, overrides: list[str]) -> None:
        data = spec.encode(errors="surrogatepass") if isinstance(spec, str) else spec
        told: tuple[Problem, ...] = ()
        try:
            found = assembled(data, *overrides)
            json.dumps(found.resolved(), allow_nan=False)
            assert found.digest()
        except MoefwError as error:
            told = error.problems
            outcomes[False] += 1
        else:
            outcomes[True] += 1
        for problem in told:
            assert problem.what
            assert problem.where.startswith(("spec.yaml", "command line, "))
            assert len(str(problem).splitlines()) == 1

    check_one()
    assert outcomes[True] > number / 40
    assert outcomes[False] > number / 2
