"""Values are checked against the types of their options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import field, frozen
from attrs.validators import ge, max_len

from moefw.compose.spec import unknown
from moefw.compose.spec.sections import with_defaults
from moefw.compose.spec.source import Marks, show
from moefw.compose.spec.structure import plain, structure
from moefw.compose.spec.unknown import UnknownUsedError, is_known
from moefw.core.errors import PluginError, Problem
from spec_cases import assembled, complaint, complaints

pytestmark = pytest.mark.usefixtures("empty_folder")


class TestValues:
    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("train: {steps: 2.7}", "2.7 is not a whole number."),
            ('train: {steps: "8"}', "'8' is not a whole number. Leave out the quotes."),
            ("train: {steps: true}", "true is not a whole number."),
            ("train: {steps: null}", "null is not a whole number."),
            ("train: {steps: [3]}", "[3] is not a whole number."),
            ("train: {lr: '1e-3'}", "'1e-3' is not a finite number. Leave out the quotes."),
            ("train: {lr: true}", "true is not a finite number."),
            ("run: {dir: 8}", "8 is not plain text. Put it in quotes."),
            ("run: {observers: topk}", "'topk' is not a list. Write [topk]."),
            ("memory: [{use: keep, regions: block}]", "'block' is not a list."),
            ("memory: {use: keep}", "{'use': 'keep'} is not a list."),
            ("model: {zero_init: 1}", "1 is not true or false."),
            ("model: {zero_init: 'true'}", "'true' is not true or false. Leave out the quotes."),
            ("routing: {score: softmx}", "'softmx' is not one of the choices. Did you mean 'softmax'?"),
            ("routing: {score: 1}", "1 is not one of the choices. Known: sigmoid, softmax, sqrtsoftplus."),
            ("routing: {score: null}", "null is not one of the choices. Known: sigmoid, softmax, sqrtsoftplus."),
            ("train: {stepz: 3}", "'stepz' is not an option here. Did you mean 'steps'?"),
            (
                "train: {reduce_gradients: step}",
                "'reduce_gradients' is not an option here. The layout says when FSDP reduces gradients, for each mesh: "
                "parallel.dense.zero: 1 and parallel.experts.zero: 1",
            ),
            (
                "zzz: 3",
                "'zzz' is not an option here. Known: adapter, attention, context_parallel, data, dispatch, gemm, ",
            ),
            ("gemm: {use: loop, preset: big}", "loop has no preset 'big'."),
            ("gemm: loop", "'loop' is not a mapping that names a plugin. Write {use: loop}."),
            ("memory: [{regions: [layer]}]", "'use' is missing."),
            ("routing: {balance: [{}]}", "'kind' is missing. It has no default."),
            ("train: {steps: 0}", "'steps' must be >= 1: 0."),
            ("model: {num_experts: 1000000000}", "'num_experts' must be <= 16384: 1000000000."),
            ("run: {dir: .}", "'dir' must end in the name of a folder, and not begin with ~: '.'"),
            ("run: {dir: ''}", "'dir' must end in the name of a folder, and not begin with ~: ''"),
            ("run: {dir: ~/runs}", "'dir' must end in the name of a folder, and not begin with ~: '~/runs'"),
            ("train: {lr: -1}", "'lr' must be > 0.0: -1.0."),
        ],
    )
    def test_of_the_wrong_kind_are_refused_with_a_clear_message(self, text: str, what: str) -> None:
        assert what in complaint(text)

    def test_a_whole_number_is_fine_where_a_fraction_is(self) -> None:
        lr = assembled("train: {lr: 1}").spec.train.lr
        assert (lr, type(lr)) == (1.0, float)

    def test_every_bound_is_checked_in_one_run(self) -> None:
        text = "{train: {steps: 0, lr: 0, seq_len: 1, optimizer: {beta1: 1.0}}, model: {dim: 1}, run: {seed: -1}}"
        told = complaints(text)
        assert len(told) == 6
        for key in ("steps", "lr", "seq_len", "beta1", "dim", "seed"):
            assert any(f"'{key}' must be" in line for line in told)

    def test_keys_are_told_in_their_order(self) -> None:
        told = complaints("train: {zq: 1, yq: 1, xq: 1, wq: 1, vq: 1}")
        assert [line.split("'")[1] for line in told] == ["zq", "yq", "xq", "wq", "vq"]

    def test_what_a_spec_leaves_out_is_filled_section_by_section(self) -> None:
        defaults: dict[str, object] = {"a": {"use": "x", "size": 1}, "b": {"c": {"use": "y"}}, "d": []}
        assert with_defaults({}, defaults) == defaults
        assert with_defaults({"a": None, "b": {"c": None}}, defaults) == defaults
        assert with_defaults({"a": {"use": "z"}}, defaults)["a"] == {"use": "z"}
        assert with_defaults({"a": {"more": 2}}, defaults)["a"] == {"use": "x", "size": 1, "more": 2}
        assert with_defaults({"a": {"use": "x", "size": 3}}, defaults)["a"] == {"use": "x", "size": 3}
        assert with_defaults({"b": {"e": 1}}, defaults)["b"] == {"c": {"use": "y"}, "e": 1}
        assert with_defaults({"a": 3, "e": 4}, defaults) == {**defaults, "a": 3, "e": 4}


@frozen
class Inner:
    size: int = field(default=1, validator=ge(1))
    words: tuple[str, ...] = ()


@frozen(kw_only=True)
class Options:
    """Options of every type that a plugin may have."""

    required: int
    pair: tuple[int, str] = (1, "a")
    shares: Mapping[str, float] = field(factory=dict)
    either: int | Literal["auto"] = "auto"
    maybe: tuple[Inner, ...] | None = None
    inner: Inner | None = None
    anything: Any = None
    few: tuple[int, ...] = field(default=(), validator=max_len(2))
    level: Literal[0, 1] = 0
    low: int = 0
    high: int = field(default=9)

    @high.validator
    def _above_low(self, _: object, value: int) -> None:
        if value < self.low:
            raise ValueError(f"high {value} is below low {self.low}")


def built(**data: object) -> tuple[Options | None, list[str]]:
    problems: list[Problem] = []
    found = structure(Options, data, (), Marks("o"), problems)
    return found, [str(problem) for problem in problems]


class TestStructure:
    def test_builds_nested_options_of_every_type(self) -> None:
        data = {"pair": [2, "b"], "shares": {"a": 1}, "either": 3, "maybe": [{"size": 2, "words": ["w"]}]}
        found, told = built(required=1, inner={}, anything=[{}], **data)
        assert told == []
        maybe = (Inner(2, ("w",)),)
        wanted = Options(
            required=1, pair=(2, "b"), shares={"a": 1.0}, either=3, maybe=maybe, inner=Inner(), anything=[{}]
        )
        assert found == wanted
        assert built(**plain(wanted)) == (wanted, [])

    @pytest.mark.parametrize(
        ("data", "told"),
        [
            ({"pair": [2]}, "o pair: [2] is not a list of 2. Write for example [1, a]."),
            ({"pair": ["b", "b"]}, "o pair[0]: 'b' is not a whole number. Write for example 8."),
            ({"shares": {"a": "b"}}, "o shares.a: 'b' is not a finite number. Write for example 0.5."),
            ({"shares": []}, "o shares: [] is not a mapping. Write for example {name: 0.5}."),
            ({"either": "atuo"}, "o either: 'atuo' is not a whole number or auto."),
            ({"maybe": "w"}, "o maybe: 'w' is not a list. Write for example [{size: 1}]."),
            ({"maybe": [{"size": 0}]}, "o maybe[0].size: 'size' must be >= 1: 0."),
            ({"inner": {"sizes": 2}}, "o inner.sizes: 'sizes' is not an option here. Did you mean 'size'?"),
            ({"inner": {"words": [1]}}, "o inner.words[0]: 1 is not plain text. Put it in quotes."),
            ({"low": 5, "high": 4}, "o high: high 4 is below low 5."),
            ({"low": "x", "high": -1}, "o low: 'x' is not a whole number. Write for example 8."),
            ({"level": True}, "o level: true is not one of the choices. Known: 0, 1."),
            ({"few": [1, 2, 3]}, "o few: Length of 'few' must be <= 2: 3."),
        ],
    )
    def test_says_what_is_wrong_once(self, data: dict[str, object], told: str) -> None:
        assert built(required=1, **data)[1] == [told]

    def test_what_could_not_be_read_is_unknown_and_the_rest_is_there(self) -> None:
        found, told = built(required="x", low="y", inner={"size": "z"}, high=3)
        assert len(told) == 3
        assert found is not None
        assert found.inner is not None
        assert all(value is unknown.UNKNOWN for value in (found.required, found.low, found.inner.size))
        assert (found.high, found.inner.words) == (3, ())
        assert not is_known(found)
        assert not is_known({"sizes": [1, (2, found.low)]})
        assert is_known([found.high, found.inner.words, "unknown"])

    @pytest.mark.parametrize(
        "use",
        [
            bool,
            hash,
            int,
            float,
            len,
            list,
            str,
            repr,
            round,
            math.log2,
            Path,
            "{:,}".format,
            lambda v: f"{[v]}",
            lambda v: v < 1,
            lambda v: v == 1,
            lambda v: v in (1, 2),
            lambda v: 1 + 2 * v,
            lambda v: v % 2,
            lambda v: v.size,
            lambda v: v[0],
            lambda v: v(),
            lambda v: math.gcd(4, v),
            lambda v: range(v),
        ],
    )
    def test_any_use_of_the_unknown_raises(self, use: Callable[[Any], object]) -> None:
        with pytest.raises(UnknownUsedError):
            use(unknown.UNKNOWN)

    def test_an_error_can_show_what_holds_the_unknown(self) -> None:
        assert show([unknown.UNKNOWN]) == "a list"

    def test_validators_look_at_fields_that_could_be_read(self) -> None:
        found, told = built(required=1, low=5, high=4, level=7)
        assert len(told) == 2
        assert "high 4 is below low 5." in told[1]
        assert found is not None
        assert found.low == 5
        assert found.high is unknown.UNKNOWN

    def test_a_type_that_no_spec_can_hold_is_the_plugins_mistake(self) -> None:
        @frozen
        class Odd:
            when: complex = 0j

        with pytest.raises(PluginError, match="complex"):
            structure(Odd, {"when": 1}, (), Marks("o"), [])
