"""``moefw doctor`` tries each library in a child process, and proposes a remedy if it fails."""

import json
import os
import re
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from moefw.commands import doctor as doctor_module
from moefw.commands.doctor import doctor, triton_products
from moefw.commands.doctor import machine as machine_module
from moefw.commands.doctor.capability import Capability
from moefw.commands.doctor.children import ask
from moefw.plugins.gemm.triton import measure

FAST_MATHS = """
import moefw

moefw_api = ">=3.3,<4"

def works():
    return "1.2", "multiplies"

def lacks_a_gpu():
    raise moefw.ProbeError("no GPU")

@moefw.hookimpl
def moefw_probes():
    return [
        moefw.Probe("fast", works, "fastmaths", "fastmaths", "pip install fast"),
        moefw.Probe("slow", lacks_a_gpu, "fastmaths", "fastmaths", "pip install slow"),
        moefw.Probe("lost", works, "lost_maths", "lost-maths", "pip install lost"),
    ]
"""
DEEP_EP = "With torch 2.13.0, which its wheel needs: pip install 'moefw[deepep]'"


@pytest.fixture(scope="module")
def examined():
    """Exit code and results of a real run of ``moefw doctor``."""
    result = CliRunner().invoke(doctor, ["--json", "--timeout", "60"], catch_exceptions=False)
    found = json.loads(result.stdout)
    return result.exit_code, found["can_train"], {item["name"]: item for item in found["capabilities"]}


class TestProductsOfKernels:
    """On a CPU the kernels' functions are their references; what differs from these is planted."""

    def test_right_ones_are_right(self):
        products = triton_products.products_on("cpu", (9, 0))
        assert products.keys() == {"add_wgrad", "blockwise_grouped_mm", "gated", "down", "gated_backward", "dgrad"}
        assert not triton_products.wrong_of(products)

    @pytest.mark.parametrize(
        ("function", "names"),
        [("gated", ["gated"]), ("product", ["down", "dgrad"]), ("gated_backward", ["gated_backward"])],
    )
    def test_a_wrong_one_is_named(self, monkeypatch, function, names):
        right = getattr(measure, function)

        def wrong(*args, **kwargs):
            results = right(*args, **kwargs)
            last = results[-1] if isinstance(results, tuple) else results
            last[130:140] *= 1.5
            return results

        monkeypatch.setattr(measure, function, wrong)
        assert triton_products.wrong_of(triton_products.products_on("cpu", (9, 0))) == names

    def test_a_gpu_without_tma_has_no_products_of_experts(self):
        assert triton_products.products_on("cpu", (8, 0)).keys() == {"add_wgrad"}

    def test_deep_tries_them_and_says_where_they_cannot_run(self):
        result = CliRunner().invoke(doctor, ["--json", "--deep"], catch_exceptions=False)
        (found,) = [one for one in json.loads(result.stdout)["capabilities"] if one["name"] == "triton products"]
        assert (result.exit_code, found["state"]) == (0, "unusable")
        assert found["detail"] == "the kernels are compiled for a GPU, and torch sees none"
        assert "gemm: {use: grouped}" in found["fix"]


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
        assert set(names) >= {"tensorboard", "bokeh", "matplotlib", "tokenizers", "safetensors"}
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

    def test_transformer_engine_is_installed_by_our_extra_only(self, examined):
        """Its bare wheel is empty, and makes libraries that look for it fail, such as PEFT: no user gets it unasked."""
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        assert [name for name, required in extras.items() if "transformer-engine" in str(required)] == ["te"]
        assert "transformer-engine" not in str(project["dependencies"])
        assert doctor_module.PROBES["transformer-engine"].fix == "pip install --no-build-isolation 'moefw[te]'"
        if find_spec("transformer_engine") is None:
            assert examined[2]["transformer-engine"]["state"] == "missing"

    def test_the_bare_wheel_of_transformer_engine_is_unusable(self, install):
        said = "Found empty `transformer-engine` meta package installed."
        install("transformer_engine", "", module="transformer_engine/__init__")
        install("te-torch", f"raise RuntimeError({said!r})", module="transformer_engine/pytorch")
        (found,) = ask(["transformer-engine"], deadline=time.monotonic() + 60)
        assert found.state == "unusable"
        assert said in found.detail
        assert found.fix == "pip install --no-build-isolation 'moefw[te]'"

    def test_deep_ep_is_installed_by_our_extra_only(self, examined):
        if find_spec("deep_ep") is None:
            assert examined[2]["deep_ep"]["state"] == "missing"
        assert doctor_module.PROBES["deep_ep"].fix == DEEP_EP

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
        assert (found.state, found.fix) == ("unusable", DEEP_EP)

    def test_transformer_engine_is_available_when_its_torch_part_imports(self, install):
        install("transformer_engine", "", module="transformer_engine/__init__")
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

    def test_plugins_bring_probes_of_their_libraries(self, install, monkeypatch):
        """One runs in a child, one is of a library that is missing, and a plugin that does not load is told."""
        install("fastmaths", FAST_MATHS, names=("fast",))
        install("broken", "raise RuntimeError('no driver')", names=("broken",))
        monkeypatch.setattr(doctor_module, "PROBES", {})
        monkeypatch.setattr(doctor_module, "GROUPS", ())
        found = {item.name: item for item in doctor_module.examine(timeout_s=60)}
        assert found["fast"] == Capability("fast", "available", "1.2", "multiplies")
        assert found["lost"] == Capability("lost", "missing", fix="pip install lost")
        assert found["slow"] == Capability("slow", "unusable", "1.5", "no GPU", "pip install slow")
        assert "plugin 'broken' (distribution broken 1.5) fails to import" in found["plugins"].detail
        assert found["plugins"].fix == "Mend or uninstall broken."

    def test_a_directory_that_cannot_be_written_is_told(self, monkeypatch):
        def refuse(dir):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(machine_module.tempfile, "TemporaryFile", refuse)
        found = machine_module._working_directory()
        assert (found.state, found.detail) == ("unusable", f"{os.getcwd()}: Permission denied")
