"""A configuration with wrong values is read, or refused by key: never with a traceback, nor as a mistake of ours."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import MoefwError, Problem, SpecError
from moefw.core.site import Machine
from moefw.models.huggingface.config import Keys
from moefw.models.huggingface.families import FAMILIES, sections_of
from moefw.models.huggingface.values import ROPE_KINDS

REGISTRY, DEFAULTS = Registry(), defaults()
TINY: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64},
}
JUNK = st.one_of(
    st.sampled_from([0, 1, -1, 3, 2**31, 2**62, 2**63, 10**30, -(10**400), 10**400, 0.5, 64.0, 1e308, 1e-320]),
    st.sampled_from(["64", "", "x", "true", "yarn", "silu", "full_attention", "\n", "\ud800", "a" * 1000]),
    st.sampled_from([True, False, [], {}, [[]], [{}], [0], [-1], ["x"], ["full_attention"] * 2, {"a": {"b": 1}}]),
    st.floats(),
    st.none(),
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn"])},
    optional={
        name: st.sampled_from([1.0, 2, 4.0]) | JUNK for name in [*ROPE_KINDS.keys() - {"rope_type"}, "full_attention"]
    },
)


def read_by(family: str) -> list[str]:
    """Return the keys that a family reads."""

    class Seen(Keys):
        names: set[str] = set()

        def take(self, *names: str, **default: Any) -> Any:
            self.names.update(names)
            return super().take(*names, **default)

    seen = Seen(TINY)
    FAMILIES[family].sections(seen)
    return sorted(seen.names)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the configuration of a family, with one to three of the keys that it reads changed."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    config = {"model_type": family, **TINY}
    if "num_experts_per_tok" not in read_by(family):
        del config["num_experts_per_tok"]
    for name in draw(st.lists(st.sampled_from(read_by(family)), min_size=1, max_size=3)):
        config[name] = draw(ROPE if name in ("rope_parameters", "rope_scaling") else JUNK)
    return config


@pytest.mark.parametrize("number", [150, pytest.param(10_000, marks=pytest.mark.deep)])
def test_a_mutated_configuration_is_read_or_refused(number: int, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    outcomes: Counter[str] = Counter()

    @settings(max_examples=number)
    @given(mutated())
    def check_one(config: dict[str, Any]) -> None:
        path.write_text(json.dumps(config))
        tree = {"model": {"preset": str(path)}, "run": {"device": "cpu"}}
        told: tuple[Problem, ...] = ()
        try:
            found = assemble_tree(
                tree, Marks("spec"), defaults=DEFAULTS, registry=REGISTRY, machine=Machine(device="cpu")
            )
            json.dumps(found.resolved(), allow_nan=False)
        except MoefwError as error:
            told = error.problems
        outcomes["refused" if told else "read"] += 1
        for problem in told:
            assert len(str(problem).splitlines()) == 1
            assert len(str(problem)) < 1000
            assert "This is a mistake" not in str(problem)

    check_one()
    assert outcomes["read"] > number / 40
    assert outcomes["refused"] > number / 2


@pytest.mark.parametrize(
    ("family", "values", "says"),
    [
        ("llama", {"hidden_size": "64"}, "hidden_size '64' is not a whole number from 1 to 4,194,304"),
        (
            "qwen3_moe",
            {"num_hidden_layers": 2**31},
            "num_hidden_layers 2147483648 is not a whole number from 1 to 16,384",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0 is not a whole number from 1"),
        ("mixtral", {"hidden_size": True}, "hidden_size True is not a whole number"),
        ("mixtral", {"rms_norm_eps": float("nan")}, "rms_norm_eps nan is not a number above 0"),
        ("mixtral", {"rope_theta": 10**400}, "is not a number above 1"),
        ("mixtral", {"rope_scaling": "x"}, "rope_scaling 'x' is not a mapping of options"),
        (
            "mixtral",
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "rope_scaling.factor '2' is not a number from 1",
        ),
        ("mixtral", {"rope_parameters": {"full_attention": {}}}, "full_attention is no option of RoPE"),
        ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"]}, "is not a list of at most 16,384 full_"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("qwen3", {"tie_word_embeddings": "false"}, "tie_word_embeddings 'false' is not true or false"),
        ("qwen2_moe", {"mlp_only_layers": 3}, "mlp_only_layers 3 is not a list of at most 16,384 numbers of layers"),
        ("qwen3", {"a\nb": 3}, r"'a\nb' is not supported for 'qwen3'"),
    ],
)
def test_a_value_of_the_wrong_type_or_size_is_told_by_key(
    family: str, values: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config = {key: value for key, value in TINY.items() if key in read_by(family)} | {"model_type": family, **values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError) as caught:
        sections_of(tmp_path)
    (problem,) = caught.value.problems
    assert says in str(problem)


def test_all_wrong_values_are_told_at_once_and_none_as_missing(tmp_path: Path) -> None:
    wrong = {"hidden_size": "64", "num_hidden_layers": 0, "vocab_size": [], "rope_theta": "x", "num_experts": -1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **TINY, **wrong, "unknown": 1}))
    with pytest.raises(SpecError) as caught:
        sections_of(tmp_path)
    told = [problem.what for problem in caught.value.problems]
    assert len(told) == 6
    for key in (*wrong, "unknown"):
        assert any(f"{key} " in what for what in told), key
