"""``moefw schema`` accepts and refuses the same specs as the reader of specs."""

import os
import py_compile
import subprocess
import sys

import attrs
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from command_cases import dispatch_branches, dispatcher, refusal, written_schema
from moefw.commands import plugins as plugins_module
from moefw.commands.schema import schema
from moefw.compose.registry import Registry
from moefw.compose.spec.sections import RESERVED
from moefw.compose.spec.source import Marks
from moefw.compose.spec.structure import plain, structure
from moefw.core.kinds import KINDS


def complaint(spec, against=None):
    """Return the schema's complaint about a spec, or nothing."""
    error = next(Draft202012Validator(against or written_schema()).iter_errors(spec), None)
    return error.message if error else ""


GOOD = {
    "nothing": {},
    "sections left empty": {"model": None, "memory": None, "train": None, "parallel": {"dense": None}},
    "the quickstart": {
        "model": {"preset": "qwen3-moe-tiny", "num_experts": 16, "top_k": 4},
        "routing": {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias", "rate": 0.001}]},
        "dispatch": {"use": "alltoall"},
        "gemm": {"use": "grouped"},
        "precision": {"use": "bf16"},
        "memory": [{"use": "recompute", "regions": ["attention", "moe_act"]}],
        "parallel": {"pp": 1, "dense": {"tp": 1, "cp": 1}, "experts": {"ep": 4, "etp": 1}},
        "data": {"use": "text", "path": None},
        "train": {"steps": 300, "tokens_per_step": 8192, "lr": 3.0e-3, "clip_norm": None},
        "run": {"dir": "runs/quickstart", "seed": 0, "device": "cpu"},
    },
    "another plugin": {"train": {"schedule": {"use": "wsd", "decay_share": 1}}},
    "a default plugin without use": {"train": {"optimizer": {"beta2": 0.99}}},
}
BAD = {
    "an unknown section": {"modle": {}},
    "an unknown key": {"model": {"num_expert": 8}},
    "an unknown key of a nested class": {"parallel": {"experts": {"pe": 2}}},
    "a wrong type": {"train": {"steps": "many"}},
    "true for a number": {"train": {"steps": True}},
    "a word for a list": {"memory": [{"use": "recompute", "regions": "moe_act"}]},
    "below a bound": {"model": {"num_experts": 0}},
    "at an open bound": {"train": {"optimizer": {"beta1": 1.0}}},
    "an optional out of bounds": {"train": {"clip_norm": 0}},
    "an empty word": {"data": {"tokenizer": ""}},
    "an unknown choice": {"routing": {"score": "hardmax"}},
    "an unknown plugin": {"dispatch": {"use": "alltoal"}},
    "an unknown preset": {"model": {"preset": "qwen"}},
    "a preset of a plugin without": {"gemm": {"preset": "big"}},
    "the options of another plugin": {"train": {"schedule": {"decay_share": 0.5}}},
    "a required option left out": {"memory": [{"use": "keep"}]},
    "a memory policy without use": {"memory": [{"regions": ["moe_act"]}]},
    "a required option of a nested class left out": {"routing": {"balance": [{"rate": 0.1}]}},
    "a section that is no mapping": {"run": 3},
}


def installed_parts():
    registry = Registry()
    registry.load_all()
    return registry.parts()


PARTS = installed_parts()


def options_in(described, path):
    """Yield the path and the schema of every option below ``described``."""
    for name, option in described.get("properties", {}).items():
        if name not in RESERVED:
            yield ".".join((*path, name)), option
            yield from options_in(option, (*path, name))
    for branch in (*described.get("oneOf", ()), *described.get("anyOf", ()), described.get("items")):
        if isinstance(branch, dict):
            plugin = branch.get("properties", {}).get("use")
            yield from options_in(branch, (*path, plugin["const"]) if plugin else path)


def branch_options(name):
    """Return the options of a dispatcher in the schema."""
    branches = (branch for branch in dispatch_branches(written_schema()) if "properties" in branch)
    (properties,) = (branch["properties"] for branch in branches if branch["properties"]["use"] == {"const": name})
    return properties


def spec_with(part, options):
    """Return a spec that chooses a part, with options, in the section of its kind."""
    return KINDS[part.kind].spec({"use": part.name, **options})


class TestSchema:
    def test_is_a_schema_of_the_draft_it_names(self):
        found = written_schema()
        assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        Draft202012Validator.check_schema(found)

    @pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD)
    def test_accepts_what_the_reader_accepts(self, spec):
        assert refusal(spec) == ""
        assert complaint(spec) == ""

    @pytest.mark.parametrize("spec", BAD.values(), ids=BAD)
    def test_refuses_what_the_reader_refuses(self, spec):
        assert refusal(spec) != ""
        assert complaint(spec) != ""

    @pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.kind}-{part.name}")
    def test_accepts_the_defaults_of_every_plugin(self, part):
        for _, options in plugins_module._layer_cases(part.declaration):
            assert complaint(spec_with(part, plain(part.declaration(**options)))) == ""

    def test_a_preset_may_bring_an_option_without_a_default(self, install):
        body = """
        size: int
        @classmethod
        def presets(cls): return {"small": {"size": 1}}
        """
        install("other-parts", dispatcher("sized", body), names=["sized"])
        found = written_schema()
        assert complaint({"dispatch": {"use": "sized", "preset": "small"}}, found) == ""
        assert complaint({"dispatch": {"use": "sized", "size": 2}}, found) == ""
        assert complaint({"dispatch": {"use": "sized"}}, found) != ""

    def test_describes_the_types_that_options_may_have(self, install):
        body = """
        pair: tuple[int, str] = (1, "a")
        shares: Mapping[str, float] = field(factory=dict)
        either: int | str = 1
        words: tuple[str, ...] | None = None
        anything: Any = None
        """
        install("other-parts", dispatcher("rich", body), names=["rich"])
        found = written_schema()
        good = {"pair": [2, "b"], "shares": {"a": 0.5}, "either": "x", "words": ["w"], "anything": [{}]}
        assert complaint({"dispatch": {"use": "rich", **good}}, found) == ""
        for wrong in ({"pair": [2]}, {"pair": ["b", 2]}, {"shares": {"a": "b"}}, {"either": 1.5}, {"words": "w"}):
            assert complaint({"dispatch": {"use": "rich", **wrong}}, found) != "", wrong

    def test_an_editor_sees_descriptions_and_defaults(self):
        found = written_schema()
        optimizers = found["properties"]["train"]["properties"]["optimizer"]["oneOf"]
        (adamw,) = (b for b in optimizers if b.get("properties", {}).get("use") == {"const": "adamw"})
        assert adamw["description"].startswith("Decoupled weight decay")
        text = "Share of the first moment, a mean of gradients, that a step keeps."
        bounds = {"minimum": 0, "exclusiveMaximum": 1}
        assert adamw["properties"]["beta1"] == {"description": text, "type": "number", **bounds, "default": 0.9}

    def test_every_option_has_a_description(self):
        options = dict(options_in(SCHEMA, ()))
        assert {"run.seed", "routing.topk.balance.rate", "parallel.folded.experts.etp"} <= {*options}
        assert [path for path, option in options.items() if not option.get("description")] == []

    def test_an_option_is_described_by_the_text_under_its_field(self, install):
        body = '''
        rows: int = 1
        """Number of rows

        of a chunk.
        """
        plain: int = 2
        '''
        install("other-parts", dispatcher("described", body), names=["described"])
        options = branch_options("described")
        assert options["rows"]["description"] == "Number of rows of a chunk."
        assert "description" not in options["plain"]

    def test_an_option_that_is_declared_again_keeps_its_text(self, install):
        source = dispatcher("again", '"""Not the text of a field."""\nrows: int = 1\n"""Number of rows."""')
        source = source.replace("return [Part]", "return [Again]").replace(
            "@moefw.hookimpl", "@frozen(kw_only=True)\nclass Again(Part):\n    rows: int = 2\n@moefw.hookimpl"
        )
        install("other-parts", source, names=["again"])
        rows = branch_options("again")["rows"]
        assert rows == {"description": "Number of rows.", "type": "integer", "default": 2}

    def test_a_plugin_without_source_has_no_texts(self, install, tmp_path):
        install("other-parts", dispatcher("compiled", 'rows: int = 1\n"""Number of rows."""'), names=["compiled"])
        source = tmp_path / "other_parts.py"
        py_compile.compile(str(source), str(source.with_suffix(".pyc")), doraise=True)
        source.unlink()
        assert branch_options("compiled")["rows"] == {"type": "integer", "default": 1}

    def test_is_the_same_text_in_every_process(self):
        command = [sys.executable, "-c", "from moefw.commands.schema import schema; schema()"]
        env = {**os.environ, "PYTHONHASHSEED": "7"}
        other = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert other.stdout == CliRunner().invoke(schema).stdout


SCHEMA = written_schema()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from([-0.5, 0.5, 1.5, "", "word", "softmax", "sigmoid", "expert_bias"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["kind", "rate", "ep", "tp", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_schema_and_reader_agree_on_any_options(data):
    part = data.draw(st.sampled_from(PARTS))
    names = [*(field.name for field in attrs.fields(part.declaration)), "x"]
    options = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=3))
    problems = []
    structure(part.declaration, options, (), Marks("spec"), problems)
    assert bool(complaint(spec_with(part, options), SCHEMA)) == bool(problems), problems
