"""``moefw plugins``, ``moefw schema`` and ``moefw doctor``."""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import attrs
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import moefw
from moefw.commands import doctor as doctor_module
from moefw.commands import plugins as plugins_module
from moefw.commands import specs
from moefw.commands.doctor import doctor
from moefw.commands.doctor import machine as machine_module
from moefw.commands.doctor.capability import Capability
from moefw.commands.doctor.children import ask
from moefw.commands.plugins import plugins
from moefw.commands.schema import schema
from moefw.core.errors import MoefwError
from moefw.core.plugin import FAMILIES
from moefw.core.registry import Registry
from moefw.core.resolve import assemble_tree
from moefw.core.site import Machine
from moefw.core.spec.sections import Spec, TrainSpec
from moefw.core.spec.source import Marks
from moefw.core.spec.structure import plain, structure

HEAD = "from __future__ import annotations\nfrom typing import *\nfrom attrs import field, frozen\nimport moefw\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs distributions of one module each for the length of a test; the source may be any module."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(distribution, source, *, names=(), module=None):
        module = module or distribution.replace("-", "_")
        info = tmp_path / f"{distribution}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        entries = "".join(f"{name} = {module}\n" for name in names)
        (info / "entry_points.txt").write_text(f"[moefw]\n{entries}")
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))

    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def dispatcher(name, body):
    """The source of a module that declares one dispatcher."""
    body = textwrap.indent(textwrap.dedent(body), "    ")
    return (
        f'{HEAD}@frozen(kw_only=True)\nclass Part(moefw.DispatcherPlugin):\n    """A dispatcher of somebody else."""\n'
        f"    name = {name!r}\n{body}\n@moefw.hookimpl\ndef moefw_dispatchers():\n    return [Part]\n"
    )


def listing():
    result = CliRunner().invoke(plugins, ["--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def listed(name):
    (entry,) = (entry for entry in listing()["plugins"] if entry["name"] == name)
    return entry


def written_schema():
    result = CliRunner().invoke(schema, catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def complaint(spec, against=None):
    """What the schema says against a spec, or nothing."""
    error = next(Draft202012Validator(against or written_schema()).iter_errors(spec), None)
    return error.message if error else ""


def refusal(tree):
    """What the reader of specs says against a spec, or nothing."""
    try:
        assemble_tree(tree, Marks("spec"), defaults=specs.defaults(), machine=Machine())
    except MoefwError as error:
        return str(error)
    return ""


class TestPlugins:
    def test_lists_what_a_spec_takes_by_default(self):
        found = {(entry["hook"], entry["name"]) for entry in listing()["plugins"] if entry["distribution"] == "moefw"}
        assert {("moefw_routers", "topk"), ("moefw_dispatchers", "alltoall"), ("moefw_schedules", "cosine")} <= found
        assert {hook for hook, _ in found} == {family.hook for family in FAMILIES}
        assert listing()["problems"] == []

    def test_tells_version_summary_and_options(self):
        adamw = listed("adamw")
        assert adamw["version"] == moefw.__version__
        assert adamw["summary"].startswith("Decoupled weight decay")
        assert adamw["options"]["beta1"] == 0.9
        assert (adamw["usable"], adamw["reason"]) == (True, "")

    def test_an_option_without_a_default_is_required(self):
        assert listed("keep")["required"] == ["regions"]
        assert listed("keep")["options"] == {"regions": None}

    def test_nested_options_are_shown_as_they_are_written(self):
        experts = {"ep": 1, "etp": 1, "order": ["edp", "ep", "etp"], "shard": 1}
        assert listed("folded")["options"]["experts"] == experts

    def test_lines_are_aligned_and_plain(self):
        heading, *lines = CliRunner().invoke(plugins).stdout.splitlines()
        column = heading.index("usable here")
        assert {line[column:].split()[0] for line in lines} == {"yes", "in"}, "yes, or in part and why"
        assert "\x1b" not in heading

    def test_a_terminal_gets_a_table(self):
        result = CliRunner().invoke(plugins, env={"FORCE_COLOR": "1", "COLUMNS": "160"})
        assert "│ alltoall" in result.stdout

    def test_a_part_whose_package_is_absent_says_what_to_install(self, install):
        needs = """
        def needs(self, site):
            return [moefw.need("package", "no_such_lib", reason="it moves the rows", fix="pip install 'thing[fast]'")]
        """
        install("other-parts", dispatcher("fast", needs), names=["fast"])
        fast = listed("fast")
        assert fast["usable"] is False
        assert fast["reason"] == "needs the package no_such_lib: it moves the rows. pip install 'thing[fast]'"
        assert (fast["distribution"], fast["version"]) == ("other-parts", "1.5")
        table = CliRunner().invoke(plugins, env={"FORCE_COLOR": "1", "COLUMNS": "300"}).stdout
        assert "'thing[fast]'" in table

    def test_a_part_for_another_device_is_not_usable(self, install, monkeypatch):
        needs = 'def needs(self, site): return [moefw.need("device", ("cuda",), reason="its kernels are CUDA")]'
        install("other-parts", dispatcher("gpu", needs), names=["gpu"])
        monkeypatch.setattr(plugins_module, "this_machine", lambda: Machine(device="cpu"))
        assert listed("gpu")["reason"] == "needs cuda, this machine has cpu: its kernels are CUDA."
        monkeypatch.setattr(plugins_module, "this_machine", lambda: Machine(device="cuda"))
        assert listed("gpu")["usable"] is True

    def test_a_part_for_another_gpu_is_not_usable(self, install, monkeypatch):
        needs = (
            'def needs(self, site): return [moefw.need("capability", ("9.0",), reason="its kernels are for Hopper")]'
        )
        install("other-parts", dispatcher("gpu", needs), names=["gpu"])
        for capability, usable in (("8.0", False), ("9.0", True), (None, True)):
            machine = Machine(device="cuda", capability=capability)
            monkeypatch.setattr(plugins_module, "this_machine", lambda machine=machine: machine)
            assert listed("gpu")["usable"] is usable
            assert usable or listed("gpu")["reason"] == (
                "needs compute capability 9.0, this machine has 8.0: its kernels are for Hopper."
            )

    def test_a_choice_without_a_default_is_tried_each_way(self, install):
        body = """
        backend: Literal["plain", "fast"]
        def needs(self, site):
            return [moefw.need("package", "no_such_lib", reason="it is fast")] if self.backend == "fast" else []
        """
        install("other-parts", dispatcher("either", body), names=["either"])
        either = listed("either")
        assert either["usable"] is True
        assert either["reason"] == "backend: fast: needs the package no_such_lib: it is fast."
        assert re.search(r"either .* in part ", CliRunner().invoke(plugins).stdout)

    def test_a_part_that_only_its_options_can_judge_is_not_judged(self, install):
        install("other-parts", dispatcher("open", "path: str"), names=["open"])
        assert listed("open")["usable"] is None

    def test_a_part_that_raises_when_asked_is_not_usable(self, install):
        install("other-parts", dispatcher("rude", "def needs(self, site): return 1 / 0"), names=["rude"])
        assert listed("rude")["reason"] == "its declaration raises ZeroDivisionError: division by zero"


BROKEN = {
    "fails to import": ("import no_such_module_at_all", "fails to import: ModuleNotFoundError"),
    "raises in a hook": (
        HEAD + "@moefw.hookimpl\ndef moefw_dispatchers(): return 1 / 0",
        "raises in moefw_dispatchers",
    ),
    "misspells a hook": (
        HEAD + "@moefw.hookimpl\ndef moefw_dispatcher(): return []",
        "Did you mean 'moefw_dispatchers'?",
    ),
    "is for another api": (
        'moefw_api = ">=2,<3"\n' + dispatcher("broken", "pass"),
        f"is written for hook API >=2,<3; this moefw has {moefw.API_VERSION}",
    ),
    "returns the wrong class": (
        dispatcher("broken", "pass").replace("moefw_dispatchers", "moefw_routers"),
        "from moefw_routers, which wants RouterPlugin classes",
    ),
    "declares nothing": ("", "announces a plugin 'broken' and declares no part"),
    "takes a name that is taken": (dispatcher("alltoall", "pass"), "two plugins are called 'alltoall'"),
}


class TestBrokenPlugins:
    @pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
    def test_is_named_with_its_distribution_and_the_rest_is_listed(self, install, source, message):
        healthy = listing()["plugins"]
        install("bad-parts", source.replace("from __future__ import annotations\n", ""), names=["broken"])
        found = listing()
        (problem,) = found["problems"]
        assert message in problem["what"] + problem["fix"]
        assert "bad-parts 1.5" in problem["what"]
        assert found["plugins"] == healthy
        lines = CliRunner().invoke(plugins).stdout.splitlines()
        assert lines[-1].startswith("broken: ")
        assert "bad-parts" in lines[-1]

    def test_two_distributions_of_one_name_are_both_named(self, install):
        install("first-parts", dispatcher("twice", "pass"), names=["twice"])
        install("second-parts", dispatcher("twice", "pass"), names=["twice"])
        found = listing()
        (problem,) = found["problems"]
        assert "'twice'" in problem["what"]
        assert "first-parts 1.5" in problem["what"]
        assert "second-parts 1.5" in problem["what"]
        assert "twice" not in {entry["name"] for entry in found["plugins"]}
        assert "alltoall" in {entry["name"] for entry in found["plugins"]}

    def test_a_distribution_cannot_announce_the_name_of_a_built_in(self, install):
        install("evil-parts", dispatcher("alltoall", "pass"), names=["alltoall"])
        said = refusal({"dispatch": {"use": "alltoall"}})
        assert "two distributions bring a plugin called 'alltoall'" in said
        assert "evil-parts 1.5" in said
        assert f"moefw {moefw.__version__}" in said

    @pytest.mark.parametrize("name", ["aaa", "zzz"])
    def test_a_part_beside_the_announced_one_does_not_become_a_built_in(self, install, name):
        source = dispatcher("alltoall", "pass").replace("return [Part]", "return [Part]\n@moefw.hookimpl")
        source += f"def moefw_routers(): return [type('R', (moefw.RouterPlugin,), {{'name': {name!r}}})]\n"
        source = source.replace("return [type", "return [frozen(type").replace("})]", "}))]")
        install("evil-parts", source, names=[name])
        said = refusal({"routing": {"use": name}, "dispatch": {"use": "alltoall"}})
        assert "two plugins are called 'alltoall'" in said
        assert "evil-parts 1.5" in said
        assert f"moefw {moefw.__version__}" in said
        assert refusal({"dispatch": {"use": "alltoall"}}) == "", "what is not named is not loaded"
        found = listing()
        (problem,) = found["problems"]
        assert "'alltoall' is built in: uninstall evil-parts" in problem["fix"]
        listed = {entry["name"]: entry["distribution"] for entry in found["plugins"]}
        assert listed["alltoall"] == "moefw", "whatever the order of the names"
        assert name not in listed

    def test_the_schema_leaves_it_out_and_says_so_on_stderr(self, install):
        healthy = written_schema()
        install("bad-parts", "import no_such_module_at_all", names=["broken"])
        result = CliRunner().invoke(schema)
        assert json.loads(result.stdout) == healthy
        assert "bad-parts 1.5" in result.stderr

    def test_options_that_cannot_be_described_leave_the_other_plugins(self, install):
        install("bad-parts", dispatcher("vague", "size: NoSuchType = 1"), names=["vague"])
        result = CliRunner().invoke(schema)
        names = [branch.get("properties", {}).get("use") for branch in dispatch_branches(json.loads(result.stdout))]
        assert {"const": "vague"} not in names
        assert {"const": "alltoall"} in names
        assert "bad-parts 1.5" in result.stderr
        assert "'NoSuchType' is not defined" in result.stderr


def dispatch_branches(found):
    return found["properties"]["dispatch"]["oneOf"]


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
HOOKS = {
    field.metadata["hook"]: (*section, field.name)
    for section, cls in (((), Spec), (("train",), TrainSpec))
    for field in attrs.fields(cls)
    if "hook" in field.metadata
}


def installed_parts():
    registry = Registry()
    registry.load_all()
    return registry.parts()


PARTS = installed_parts()


def spec_with(part, options):
    """A spec that chooses a part, with options, at the place of its hook point."""
    chosen = {"use": part.name, **options}
    *parents, last = HOOKS[part.hook]
    tree = {last: [chosen] if last == "memory" else chosen}
    for key in parents:
        tree = {key: tree}
    return tree


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

    @pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.hook}-{part.name}")
    def test_accepts_the_defaults_of_every_plugin(self, part):
        for _, options in plugins_module._trials(part.declaration):
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
        (adamw,) = (b for b in found["properties"]["train"]["properties"]["optimizer"]["oneOf"] if "properties" in b)
        assert adamw["description"].startswith("Decoupled weight decay")
        assert adamw["properties"]["beta1"] == {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "default": 0.9}

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


@pytest.fixture(scope="module")
def examined():
    """What a real examination says, with its exit code."""
    result = CliRunner().invoke(doctor, ["--json", "--timeout", "60"], catch_exceptions=False)
    found = json.loads(result.stdout)
    return result.exit_code, found["can_train"], {item["name"]: item for item in found["capabilities"]}


class TestDoctor:
    def test_tells_everything_that_matters(self, examined):
        names = list(examined[2])
        assert names[:2] == ["python", "torch"]
        assert set(names) >= {
            "gloo",
            "nccl",
            "bf16 on this CPU",
            "grouped_mm",
            "fp8 products",
            "triton",
            "transformer-engine",
            "deep_ep",
        }
        assert set(names) >= {"tensorboard", "matplotlib", "tokenizers", "safetensors"}
        assert set(names) >= {"cores and memory", "disk", "working directory"}

    def test_training_can_run_where_these_tests_run(self, examined):
        exit_code, can_train, found = examined
        assert (exit_code, can_train) == (0, True)
        assert {found[name]["state"] for name in doctor_module.NEEDED} == {"available"}
        assert found["torch"]["version"] == torch.__version__
        assert "float32 on cpu works" in found["grouped_mm"]["detail"]
        works, fails = found["fp8 products"]["detail"].removeprefix("cpu multiplies ").split(", not ")
        assert works in ("tensor, row", "none")
        assert "fp8-blockwise, mxfp8, " in fails

    def test_what_is_not_available_comes_with_what_to_do(self, examined):
        assert all(item["fix"] for item in examined[2].values() if item["state"] != "available")

    def test_the_bare_wheel_of_transformer_engine_is_unusable(self, examined):
        try:
            version("transformer_engine_torch")
        except PackageNotFoundError:
            found = examined[2]["transformer-engine"]
            assert found["state"] == "unusable"
            assert found["version"] == version("transformer-engine")
            assert "Found empty `transformer-engine` meta package" in found["detail"]
            assert found["fix"] == "pip install --no-build-isolation 'moefw[te]'"
        else:
            pytest.skip("transformer-engine is installed with its compiled parts")

    def test_deep_ep_is_installed_by_our_extra_only(self, examined):
        if find_spec("deep_ep") is None:
            assert examined[2]["deep_ep"]["state"] == "missing"
        assert doctor_module.PROBES["deep_ep"].fix == "pip install 'moefw[deepep]'"

    def test_a_library_that_crashes_takes_nothing_with_it(self, install):
        install("crashing", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", module="deep_ep")
        first, second = ask(["deep_ep", "tokenizers"], deadline=time.monotonic() + 60)
        assert (first.state, first.detail) == ("unusable", "it kills the interpreter (SIGSEGV)")
        assert (second.name, second.state) == ("tokenizers", "available")

    def test_a_library_that_ends_the_interpreter_is_unusable(self, install):
        install("ending", "import os, sys\nprint('no driver', file=sys.stderr)\nos._exit(9)", module="deep_ep")
        (found,) = ask(["deep_ep"], deadline=time.monotonic() + 60)
        assert found.detail == "it ends the interpreter with exit code 9 no driver"

    def test_a_library_that_hangs_is_given_up(self, install):
        install("hanging", "import time\ntime.sleep(600)", module="deep_ep")
        start = time.monotonic()
        first, second = ask(["deep_ep", "tokenizers"], deadline=start + 3)
        assert time.monotonic() - start < 20
        assert (first.state, first.detail) == ("unusable", "no answer within 3 s")
        assert second.detail == "no time was left to try it"
        assert first.fix == second.fix == "Try a longer --timeout."

    def test_a_library_that_prints_does_not_disturb_the_answer(self, install):
        install("loud", "print('{}')\nclass Buffer: pass\n__version__ = '9.9'", module="deep_ep")
        assert ask(["deep_ep"], deadline=time.monotonic() + 60) == [
            Capability("deep_ep", "available", "9.9", "has Buffer")
        ]

    def test_a_package_of_that_name_without_buffers_is_not_deepep(self, install):
        install("squatter", "", module="deep_ep")
        (found,) = ask(["deep_ep"], deadline=time.monotonic() + 60)
        assert (found.state, found.fix) == ("unusable", "pip install 'moefw[deepep]'")

    def test_transformer_engine_is_available_when_its_torch_part_imports(self, install):
        install("te", "", module="transformer_engine/__init__")
        install("te-torch", "", module="transformer_engine/pytorch")
        (found,) = ask(["transformer-engine"], deadline=time.monotonic() + 60)
        assert found.state == "available"

    @pytest.mark.parametrize("name", doctor_module.NEEDED)
    def test_exits_with_1_without_what_training_needs(self, monkeypatch, name):
        found = [Capability(needed, "available") for needed in doctor_module.NEEDED if needed != name]
        found.append(Capability(name, "unusable", "1.0", "it is broken", "mend [it]"))
        monkeypatch.setattr(doctor_module, "examine", lambda *, timeout_s: found)
        result = CliRunner().invoke(doctor)
        assert result.exit_code == 1
        assert re.search(rf"unusable +{name} +1.0 +it is broken\n +-> mend \[it\]\n", result.stdout)
        assert result.stdout.endswith(f"Training cannot run here: see {name}.\n")
        assert json.loads(CliRunner().invoke(doctor, ["--json"]).stdout)["can_train"] is False

    def test_exits_with_0_without_what_training_does_not_need(self, monkeypatch):
        found = [Capability(needed, "available") for needed in doctor_module.NEEDED]
        found.append(Capability("deep_ep", "missing", fix="install [it]"))
        monkeypatch.setattr(doctor_module, "examine", lambda *, timeout_s: found)
        result = CliRunner().invoke(doctor, env={"FORCE_COLOR": "1", "COLUMNS": "100"})
        assert result.exit_code == 0
        assert "-> install [it]" in result.stdout

    def test_a_directory_that_cannot_be_written_is_told(self, monkeypatch):
        def refuse(dir):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(machine_module.tempfile, "TemporaryFile", refuse)
        found = machine_module._working_directory()
        assert (found.state, found.detail) == ("unusable", f"{os.getcwd()}: Permission denied")


def test_plugins_and_schema_answer_without_torch_and_doctor_imports_without():
    code = """
        import sys
        from click.testing import CliRunner
        from moefw.commands.doctor import doctor
        from moefw.commands.plugins import plugins
        from moefw.commands.schema import schema
        for command, arguments in ((plugins, []), (plugins, ["--json"]), (schema, [])):
            assert CliRunner().invoke(command, arguments).exit_code == 0
        print("torch" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
