"""The YAML of a spec is read exactly: no value changes its type, and invalid YAML is refused at its place."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from moefw.compose.resolve import assemble
from moefw.compose.spec.source import MAX_BYTES, Marks, read_yaml, scalar
from moefw.core.errors import SpecError
from python_lines import at_most
from spec_cases import DEFAULTS, REGISTRY, complaint, complaints

pytestmark = pytest.mark.usefixtures("empty_folder")

TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=6)
"""Text that ruamel can write and read back."""


class TestYAML:
    @pytest.mark.parametrize(
        ("text", "where", "what"),
        [
            ("train: {steps: !!int 3}", "1:16 train.steps", "tags, anchors and aliases are not allowed"),
            ("train: !x {steps: 3}", "1:8 train", "tags, anchors and aliases are not allowed"),
            ("train: {steps: ! 3}", "1:16 train.steps", "tags, anchors and aliases are not allowed"),
            ("train: &t {steps: 3}", "1:8 train", "tags, anchors and aliases are not allowed"),
            ("train: {steps: *t}", "1:16 train.steps", "tags, anchors and aliases are not allowed"),
            ("train: {!x steps: 3}", "1:9 train.'?'", "tags, anchors and aliases are not allowed"),
            ("train: {steps: 3, lr: 1, steps: 4}", "1:26 train.steps", "'steps' stands here twice"),
            ("memory: []\ntrain: {}\nmemory: []", "3:1 memory", "'memory' stands here twice"),
            ("train: {3: 3}", "1:9 train", "3 is not a key"),
            ("train: {null: 3}", "1:9 train", "null is not a key"),
            ("train: {true: 3}", "1:9 train", "true is not a key"),
            ("train: {1.5: 3}", "1:9 train", "1.5 is not a key"),
            ("train:\n  ? [a]\n  : 3", "2:5 train", "['a'] is not a key"),
            ("train: {? {a: 1} : 3}", "1:11 train", "{'a': 1} is not a key"),
            ("train: {<<: {steps: 3}}", "1:9 train.'<<'", "is not an option here"),
            ("train: {steps: 9223372036854775808}", "1:16 train.steps", "does not fit into 64 bits"),
            ("train: {steps: -9223372036854775808}", "1:16 train.steps", "does not fit into 64 bits"),
            (f"train: {{steps: -{'9' * 9000}}}", "1:16 train.steps", "does not fit into 64 bits"),
            (f"train: {{steps: 0x{'f' * 9000}}}", "1:16 train.steps", "does not fit into 64 bits"),
            ('run: {dir: "a\\0"}', "1:12 run.dir", "a character that no file can hold"),
            ('run: {dir: "\\ud800"}', "1:12 run.dir", "a character that no file can hold"),
            ("train: {lr: .nan}", "1:9 train.lr", "nan is not a finite number"),
            ("train: {lr: -.inf}", "1:9 train.lr", "-inf is not a finite number"),
            ("train: {lr: 1e999}", "1:9 train.lr", "inf is not a finite number"),
            ("{" + "a: {" * 40 + "}" * 41, "1:82 a", "nested deeper than 20 levels"),
            ("a: " + "[" * 90_000, "1:24 a", "nested deeper than 20 levels"),
            ("? " * 40 + "a", "1:43 '?'", "nested deeper"),
            ("- a", "1:1", "this file holds a list"),
            ("--- |\n  text", "1:5", "this file holds a single value"),
            ("a: 1\n---\nb: 2", "2:1", "a second document starts here"),
            ("a: [1\nb: 2", "2:2", "this is not YAML"),
            ("a:\n\t- b", "2:1", "this is not YAML"),
            ("a: @b", "1:4", "this is not YAML"),
        ],
    )
    def test_refuses_at_the_place(self, text: str, where: str, what: str) -> None:
        told = complaint(text)
        assert told.startswith(f"spec.yaml:{where}: "), told
        assert what in told

    @pytest.mark.parametrize(
        ("data", "what"),
        [
            (b"", "this file holds nothing"),
            (b"# nothing\n", "this file holds nothing"),
            (b"---\n...\n", "this file holds nothing"),
            (b"\xff\xfe", "not UTF-8"),
            (b"model: \x80", "not UTF-8"),
            ("model: {}".encode("utf-16"), "not UTF-8"),
            (b"\x7fELF\x00\x01", "not YAML"),
            (b"a: \x00", "not YAML"),
            (b'a: "\\UFFFFFFFF"', "not YAML"),
            (b"#" * (MAX_BYTES + 1), "larger than 100,000 bytes"),
        ],
    )
    def test_files_that_hold_no_spec(self, data: bytes, what: str) -> None:
        told = complaint(data, "train.steps=5")
        assert told.startswith("spec.yaml")
        assert what in told

    @pytest.mark.parametrize(
        ("path", "what"), [("no.yaml", "no such file"), (".", "is a directory"), ("a\0b", "null byte")]
    )
    def test_paths_that_hold_no_file(self, path: str, what: str) -> None:
        with pytest.raises(SpecError) as caught:
            assemble(Path(path), defaults=DEFAULTS, registry=REGISTRY)
        assert what in str(caught.value)
        assert caught.value.problems[0].where == path

    def test_an_endless_file_is_not_read_to_its_end(self) -> None:
        with pytest.raises(SpecError, match="larger than"):
            assemble(Path("/dev/zero"), defaults=DEFAULTS, registry=REGISTRY)

    @pytest.mark.parametrize("bomb", ["[", "{a: ", "- ", "? ", "[\n", "&a [*a, ", "a: {", "!x [", "'", "|", "%"])
    def test_a_bomb_is_refused_in_200_lines_of_python_a_byte(self, bomb: str) -> None:
        with at_most(lines=200 * MAX_BYTES):
            complaints(bomb * (MAX_BYTES // len(bomb)))

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("no", "no"),
            ("yes", "yes"),
            ("on", "on"),
            ("Null", None),
            ("~", None),
            ("", None),
            ("TRUE", True),
            ("tRUE", "tRUE"),
            ("010", 10),
            ("0o10", 8),
            ("0x1F", 31),
            ("+3", 3),
            ("9223372036854775807", 2**63 - 1),
            ("1e-3", 1e-3),
            ("1.", 1.0),
            ("-.5E+2", -50.0),
            ("-.INF", -math.inf),
            ("2001-01-01", "2001-01-01"),
            ("1_000", "1_000"),
            ("1:30", "1:30"),
            ("0b1", "0b1"),
            ("٣", "٣"),
            (".", "."),
            ("e3", "e3"),
        ],
    )
    def test_scalars_are_those_of_the_core_schema(self, text: str, value: object) -> None:
        assert (scalar(text), type(scalar(text))) == (value, type(value))
        assert scalar(text, plain=False) == text

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats() | TEXT,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
            max_leaves=8,
        )
    )
    def test_what_ruamel_writes_reads_back(self, value: object) -> None:
        YAML().dump({"value": value}, out := StringIO())
        found = read_yaml(out.getvalue(), Marks("spec.yaml"), problems := [])
        assert problems == []
        assert repr(found) == repr({"value": value})
