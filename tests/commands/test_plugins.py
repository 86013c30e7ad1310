"""``moefw plugins`` lists the names that a spec may use, and reports broken plugins."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

import moefw
from command_cases import HEAD, dispatch_branches, dispatcher, listed, listing, refusal, written_schema
from moefw.commands import plugins as plugins_module
from moefw.commands.check import check
from moefw.commands.facts import MEANINGS, SETTLED
from moefw.commands.plugins import plugins
from moefw.commands.schema import schema
from moefw.core.errors import PluginError
from moefw.core.facts import FACTS, Rule
from moefw.core.kinds import KINDS
from moefw.core.site import Machine
from moefw.testing.announce import with_plugins


class TestPlugins:
    def test_lists_what_a_spec_takes_by_default(self):
        found = {(entry["kind"], entry["name"]) for entry in listing()["plugins"] if entry["distribution"] == "moefw"}
        assert {("router", "topk"), ("dispatcher", "alltoall"), ("schedule", "cosine")} <= found
        assert {kind for kind, _ in found} == KINDS.keys()
        assert listing()["problems"] == []

    def test_tells_version_summary_and_options(self):
        adamw = listed("adamw")
        assert adamw["version"] == moefw.__version__
        assert adamw["summary"].startswith("Decoupled weight decay")
        assert adamw["options"]["beta1"] == 0.9
        assert (adamw["usable"], adamw["reason"]) == (True, "")

    def test_tells_what_each_option_does(self):
        for entry in listing()["plugins"]:
            assert [name for name in entry["options"] if not entry["option_texts"].get(name)] == [], entry["name"]

    def test_an_option_without_a_default_is_required(self):
        assert listed("keep")["required"] == ["regions"]
        assert listed("keep")["options"] == {"regions": None}

    def test_nested_options_are_shown_as_they_are_written(self):
        experts = {"ep": 1, "etp": 1, "order": ["edp", "ep", "etp"], "shard": 1, "zero": 3}
        assert listed("folded")["options"]["experts"] == experts

    def test_lines_are_aligned_and_plain(self):
        heading, *lines = CliRunner().invoke(plugins).stdout.splitlines()
        column = heading.index("usable here")
        assert {line[column:].split()[0] for line in lines} == {"yes", "no", "in", "depends"}, (
            "yes, or no or in part and why"
        )
        assert "\x1b" not in heading

    def test_tests_share_a_registry_until_something_is_installed(self, install, tmp_path):
        os.utime(tmp_path, (0, 0))
        shared = with_plugins(())
        assert with_plugins(()) is shared
        install("late", "", names=["late"])
        assert "late" in with_plugins(()).names

    def test_a_terminal_gets_a_table(self):
        result = CliRunner().invoke(plugins, env={"FORCE_COLOR": "1", "COLUMNS": "160"})
        assert "│ alltoall" in result.stdout

    def test_a_terminal_of_eighty_columns_holds_it(self):
        result = CliRunner().invoke(plugins, env={"FORCE_COLOR": "1", "COLUMNS": "80"})
        lines = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines()
        assert max(map(len, lines)) <= 80
        assert len(lines) < 5 * len(listing()["plugins"])
        assert all(any(f"│ {entry['name']} " in line for line in lines) for entry in listing()["plugins"])

    def test_a_name_tells_of_that_part_alone(self):
        head, usable, *options = CliRunner().invoke(plugins, ["keep"]).stdout.splitlines()
        assert head.startswith(f"keep, a memory policy of moefw {moefw.__version__}: ")
        assert usable == "usable here: yes"
        assert options[0].startswith("  regions (required): ")
        assert [
            entry["name"] for entry in json.loads(CliRunner().invoke(plugins, ["keep", "--json"]).stdout)["plugins"]
        ] == ["keep"]

    def test_a_name_that_is_none_is_answered_with_the_nearest(self):
        with pytest.raises(PluginError, match=r"no part is called 'kepe'\. Did you mean 'keep'\?"):
            CliRunner().invoke(plugins, ["kepe"], catch_exceptions=False, standalone_mode=False)

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
        colored = CliRunner().invoke(plugins, env={"FORCE_COLOR": "1", "COLUMNS": "300"}).stdout
        table = re.sub(r"\x1b\[[0-9;]*m", "", colored)
        assert re.search(r"fast .*│ no ", table)
        assert "'thing[fast]'" not in table
        assert f"usable here: no: {fast['reason']}\n" in CliRunner().invoke(plugins, ["fast"]).stdout

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
    "misspells an argument of a hook": (
        HEAD + "@moefw.hookimpl\ndef moefw_dispatchers(registry): return []",
        "breaks the hook interface",
    ),
    "misspells a hook": (
        HEAD + "@moefw.hookimpl\ndef moefw_dispatcher(): return []",
        "Did you mean 'moefw_dispatchers'?",
    ),
    "misspells a hook and states its api": (
        HEAD + 'moefw_api = ">=3,<4"\n@moefw.hookimpl\ndef moefw_dispatcher(): return []',
        "Did you mean 'moefw_dispatchers'?",
    ),
    "misspells the prefix of a hook": (
        HEAD + "@moefw.hookimpl\ndef moe_dispatchers(): return []",
        "Did you mean 'moefw_dispatchers'?",
    ),
    "has an option that no spec can hold": (
        dispatcher("broken", "phase: complex = 1j"),
        "'phase' of Part: an option of type <class 'complex'> cannot be written in a spec.",
    ),
    "has an inner option that no spec can hold": (
        dispatcher("broken", "names: tuple[set[str] | None, ...] = ()"),
        "'names' of Part: an option of type set[str] cannot be written in a spec.",
    ),
    "is for another api": (
        'moefw_api = ">=2,<3"\n' + dispatcher("broken", "pass"),
        f"is written for hook API >=2,<3; this moefw has {moefw.API_VERSION}."
        "Install a version of it, or of moefw, that fits. "
        "docs/guides/upgrade.md, 'From 2 to 3', says what its author changes.",
    ),
    "is for the first api": (
        'moefw_api = ">=1,<2"\n' + dispatcher("broken", "pass"),
        "docs/guides/upgrade.md, 'From 1 to 2', 'From 2 to 3', says what its author changes.",
    ),
    "written for a later version": (
        'moefw_api = ">=4"\n' + dispatcher("broken", "pass"),
        f"is written for hook API >=4; this moefw has {moefw.API_VERSION}.Install a version of it, or of moefw, that fits.",
    ),
    "a name of an earlier version": (
        "import moefw\nmoefw.MemoryPlugin",
        "has no attribute 'MemoryPlugin', which is MemoryPolicyPlugin since version 3 of the hook interface",
    ),
    "a module of an earlier version": (
        "from moefw.core.build import BuildContext",
        "No module named 'moefw.core.build'.Mend or uninstall bad-parts. docs/guides/upgrade.md lists what was renamed.",
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


class TestAdvice:
    def test_an_unknown_fact_names_the_plugin_and_its_distribution_and_no_place_in_the_spec(self, install):
        body = "def offers(self, site): return moefw.offers(rowz=1)"
        install("other-parts", dispatcher("fast", body), names=["fast"])
        assert refusal({"dispatch": {"use": "fast"}}) == (
            "plugin 'fast' (distribution other-parts 1.5), offers(): 'rowz' is not a fact that parts agree on. "
            "Did you mean 'rows'?"
        )

    def test_a_plugin_that_states_no_api_is_told_so(self, install, tmp_path):
        install("other-parts", dispatcher("fast", "pass"), names=["fast"])
        install("new-parts", 'moefw_api = ">=3,<4"\n' + dispatcher("new", "pass")[len(HEAD) :], names=["new"])
        (warning,) = listing()["warnings"]
        assert warning == (
            "plugin 'fast' (distribution other-parts 1.5) does not state the hook API that it is written for. "
            f'Write moefw_api = ">={moefw.API_VERSION}" in other_parts.'
        )
        assert f"warning: {warning}" in CliRunner().invoke(plugins).stdout

    def test_a_name_that_no_installed_package_brings_may_be_of_one_that_is_not_installed(self):
        said = refusal({"dispatch": {"use": "gossip"}})
        assert "If a package brings it (moefw-gossip, say), that is not installed here. Known: " in said
        assert "If a package" not in refusal({"dispatch": {"use": "all2all"}}) + refusal({"dispatch": {"use": "?"}})

    @pytest.mark.parametrize(
        ("choice", "told"),
        [
            ({"gemm": {"use": "gruoped"}}, "no plugin is called 'gruoped'. Did you mean 'grouped'?"),
            ({"gemm": {"use": "alltoal"}}, "Known: grouped, loop, triton."),
            ({"gemm": {"use": "alltoall"}}, "is one of the dispatchers. Known: grouped, loop, triton."),
            ({"routing": {"use": "nonsense"}}, "Known: forced, sinkhorn, topk."),
        ],
    )
    def test_a_name_is_compared_with_those_of_its_kind(self, choice, told):
        assert refusal(choice).endswith(told)

    def test_a_plugin_of_others_that_is_not_loaded_may_be_meant(self, install):
        install("other-parts", dispatcher("gossip", OFFERS), names=["gossip"])
        assert refusal({"dispatch": {"use": "gosip"}}).endswith("Did you mean 'gossip'?")

    def test_check_names_a_declaration_that_imports_torch_with_the_seconds_that_it_takes(self, install, tmp_path):
        install("slow-parts", "import torch\n" + dispatcher("slow", OFFERS).partition("\n")[2], names=["slow"])
        (tmp_path / "spec.yaml").write_text("{dispatch: {use: slow}, run: {device: cpu}}")
        command = [sys.executable, "-m", "moefw", "check", str(tmp_path / "spec.yaml")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        slow, _ = done.stderr.splitlines()
        told = (
            r"warning: plugin 'slow' \(distribution slow-parts 1.5\) takes \d+\.\d s to declare, as it imports torch\."
        )
        assert re.match(told, slow)


OFFERS = """
def offers(self, site):
    return moefw.offers(row_alignment=moefw.ANY, rows=("ragged",), counts=("host", "device"))
"""


class TestDeepCheck:
    @pytest.fixture
    def spec(self, install, tmp_path):
        """A spec whose dispatcher declares well, and imports a module that is not there to be built."""
        build = "def build(self, context): import no_such_runtime"
        install("other-parts", dispatcher("lazy", OFFERS + build), names=["lazy"])
        path = tmp_path / "a.yaml"
        path.write_text("{model: {num_layers: 1}, dispatch: {use: lazy}, run: {device: cpu}}")
        return str(path)

    def test_imports_what_build_imports_and_names_the_plugin_whose_module_is_missing(self, spec):
        told = CliRunner().invoke(check, [spec, "--json"], standalone_mode=False, catch_exceptions=False)
        assert json.loads(told.stdout)["ok"] is True
        told = CliRunner().invoke(check, [spec, "--deep", "--json"], standalone_mode=False, catch_exceptions=False)
        assert told.return_value == 2
        (problem,) = json.loads(told.stdout)["problems"]
        assert problem["what"] == (
            "plugin 'lazy' (distribution other-parts 1.5) fails to import a module in build(): "
            "ModuleNotFoundError: No module named 'no_such_runtime'."
        )
        assert problem["fix"] == "Install that module, or mend or uninstall other-parts."

    def test_says_that_every_part_builds(self, spec):
        told = CliRunner().invoke(check, [spec, "dispatch.use=alltoall", "--deep"], standalone_mode=False)
        assert told.stdout.splitlines()[-1] == "every part builds"
        assert "1 rank (" in told.stdout
        assert "1 MoE layer\n" in told.stdout

    @pytest.mark.parametrize(
        ("build", "what", "fix"),
        [
            (
                "",
                " has no build().",
                "Write one that returns a moefw.Dispatcher. See docs/guides/write-a-dispatcher.md.",
            ),
            (
                "def build(self, context): return None",
                ", build(): it returns None, and not a moefw.Dispatcher.",
                "Return one. See docs/guides/write-a-dispatcher.md.",
            ),
            (
                "def build(self, context): return moefw.RowGroups()",
                ", build(): it returns a RowGroups, and not a moefw.Dispatcher.",
                "Return one. See docs/guides/write-a-dispatcher.md.",
            ),
        ],
        ids=["nothing to build", "nothing built", "another thing built"],
    )
    def test_names_the_plugin_that_builds_no_part_of_its_kind(self, install, spec, build, what, fix):
        install("no-parts", dispatcher("empty", OFFERS + build), names=["empty"])
        arguments = [spec, "dispatch.use=empty", "--deep", "--json"]
        told = CliRunner().invoke(check, arguments, standalone_mode=False, catch_exceptions=False)
        assert told.return_value == 2
        (problem,) = json.loads(told.stdout)["problems"]
        assert problem["what"] == f"plugin 'empty' (distribution no-parts 1.5){what}"
        assert problem["fix"] == fix

    def test_an_error_without_words_is_told_by_its_name(self, install, spec):
        build = "def build(self, context): raise NotImplementedError"
        install("no-words", dispatcher("wordless", OFFERS + build), names=["wordless"])
        told = CliRunner().invoke(check, [spec, "dispatch.use=wordless", "--deep"], standalone_mode=False)
        assert told.stdout.splitlines()[-1] == "not built here: NotImplementedError"

    def test_says_what_this_machine_cannot_build(self, spec):
        precision = "precision={use: fp8-blockwise, backend: torch}"
        overrides = ["dispatch.use=alltoall", "run.device=cuda", precision]
        told = CliRunner().invoke(check, [spec, *overrides, "--deep"], standalone_mode=False)
        assert told.return_value == 0
        assert told.stdout.splitlines()[-1].startswith("not built here: ")


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


@pytest.mark.parametrize("name", ["facts", "kinds"])
def test_a_page_that_the_command_prints_is_up_to_date(name):
    page = Path(__file__).parents[2] / "docs" / "guides" / f"{name}.md"
    written = f"run: moefw plugins --{name} > docs/guides/{name}.md"
    assert page.read_text() == CliRunner().invoke(plugins, [f"--{name}"], catch_exceptions=False).stdout, written


def test_every_fact_and_every_rule_has_words():
    assert FACTS.keys() == MEANINGS.keys()
    assert set(get_args(Rule)) == SETTLED.keys()
