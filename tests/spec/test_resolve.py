"""Parts that fit become an assembly; parts that do not are refused once, at their place, with a fix that works."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import asdict, evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

import moefw
from moefw.commands import specs
from moefw.compose.registry import Registry
from moefw.compose.resolution.checks import MAX_LAYERS
from moefw.compose.resolve import assemble, assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import PlanError, PluginError, SpecError
from moefw.core.site import Machine, Site
from moefw.plugins.models.decoder import Decoder
from resolved_specs import DEFAULTS, REGISTRY, Plain, refusal, refused, registry, resolved, watched

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


class TestParts:
    def test_the_quickstart_is_accepted(self) -> None:
        found = assemble(QUICKSTART, defaults=DEFAULTS, registry=REGISTRY, machine=Machine())
        assert found.layers
        assert all(layer.facts["row_alignment"] > 0 for layer in found.layers.values())
        assert found.layers[min(found.layers)].facts["rows"] == "ragged"

    def test_there_is_one_layer_assembly_a_moe_layer_and_equal_layers_share_their_facts(self) -> None:
        layers = resolved("model: {num_layers: 5, num_dense_layers: 2}").layers
        assert list(layers) == [2, 3, 4]
        assert [layer.site.layer for layer in layers.values()] == [2, 3, 4]
        assert layers[2].facts is layers[3].facts is layers[4].facts

    @pytest.mark.parametrize(
        "number",
        [
            pytest.param(lambda site: site.layer, id="read"),
            pytest.param(lambda site: asdict(site, recurse=False)["layer"], id="read of its fields"),
            pytest.param(lambda site: evolve(site, trains=False).layer, id="read of a copy"),
            pytest.param(lambda site: [site.at(layer) == site for layer in range(4)].index(True), id="compared"),
        ],
    )
    def test_a_part_may_speak_differently_at_each_layer(self, number: Callable[[Site], int]) -> None:
        @frozen
        class Picky(Plain):
            name: ClassVar[str] = "picky"

            def offers(self, site: Site) -> moefw.Offers:
                return {**super().offers(site), "row_alignment": (8 << number(site) // 2,)}

        layers = resolved("dispatch: {use: picky}", registry=registry(dispatchers=[Picky])).layers
        assert [layer.facts["row_alignment"] for layer in layers.values()] == [8, 8, 16, 16]

    def test_parts_that_do_not_read_the_number_of_a_layer_are_asked_at_one(self) -> None:
        asked = []

        @frozen
        class Counted(Plain):
            name: ClassVar[str] = "counted"

            def needs(self, site: Site) -> Sequence[moefw.Need]:
                asked.append(site.dims)
                return ()

        assert len(resolved("dispatch: {use: counted}", registry=registry(dispatchers=[Counted])).layers) == 4
        assert len(asked) == 1

    def test_a_model_without_moe_layers_has_none_and_is_checked_all_the_same(self) -> None:
        assert resolved("model: {num_layers: 2, num_dense_layers: 2}").layers == {}
        text = "{model: {num_layers: 2, num_dense_layers: 2}, memory: [{use: keep, regions: [moe_act]}]}"
        assert "moe_act" in refusal(text).what

    @pytest.mark.parametrize(
        ("routing", "packing", "looks_at"),
        [
            ("{balance: [{kind: aux_loss}]}", "dynamic", "micro_batch"),
            ("{balance: [{kind: aux_loss}]}", "static", "micro_batch"),
            ("{balance: [{kind: quantile}]}", "dynamic", "micro_batch"),
            ("{capacity: {factor: 1.0}}", "dynamic", "rank"),
            ("{use: sinkhorn}", "dynamic", "micro_batch"),
            ("{balance: [{kind: aux_loss}]}", "none", ""),
            ("{balance: [{kind: aux_loss, over: sequence}]}", "dynamic", ""),
            ("{balance: [{kind: aux_loss, over: global_batch}, {kind: expert_bias}], score: sigmoid}", "dynamic", ""),
        ],
    )
    def test_routing_that_depends_on_packs_is_noted(self, routing: str, packing: str, looks_at: str) -> None:
        notes = resolved(f"{{routing: {routing}, train: {{packing: {packing}}}}}").notes
        assert len(notes) == bool(looks_at), notes
        if looks_at:
            assert f"looks at one {looks_at} at a time, and with packing: {packing}" in notes[0]
            assert "another layout has other losses" in notes[0]

    def test_a_misfit_of_many_layers_is_told_once(self) -> None:
        text = "{model: {num_layers: 40, num_experts: 6, top_k: 7}, parallel: {experts: {ep: 4}}, gemm: {use: loop}}"
        told = refused(text)
        assert [problem.where for problem in told] == ["spec.yaml:1:1 routing", "spec.yaml:1:83 gemm"]
        assert "top_k 7 of 6 experts" in told[0].what
        assert "a size of axis ep that divides 6" in told[1].what

    def test_too_many_layers_are_refused_in_no_time(self) -> None:
        assert "more than 1000 MoE layers" in refusal("model: {num_layers: 8192}").what
        assert len(resolved(f"model: {{num_layers: {MAX_LAYERS}}}").layers) == MAX_LAYERS

    def test_two_memory_policies_are_told_apart(self) -> None:
        text = "memory: [{use: recompute, regions: [layer]}, {use: recompute, regions: [laier]}]"
        problem = refusal(text)
        assert problem.where == "spec.yaml:1:63 memory[1].regions"
        assert problem.fix == "Did you mean 'layer'?"


class TestRefusals:
    """Combinations that cannot work name both sides and a fix, and the fix works."""

    def test_more_choices_than_experts(self) -> None:
        problem = refusal("model: {num_experts: 4, top_k: 5}")
        assert "top_k 5 of 4 experts" in problem.what
        assert problem.fix == "Use model.top_k between 1 and 4."
        resolved("model: {num_experts: 4, top_k: 4}")

    def test_softmax_with_an_expert_bias(self) -> None:
        problem = refusal("routing: {score: softmax, balance: [{kind: expert_bias}]}")
        assert problem.where == "spec.yaml:1:27 routing.balance"
        assert "expert bias" in problem.what
        assert "score: softmax" in problem.what
        resolved("routing: {score: sigmoid, balance: [{kind: expert_bias}]}")
        resolved("routing: {score: softmax, balance: [{kind: aux_loss}]}")

    def test_keeping_what_a_gemm_always_recomputes(self) -> None:
        text = "{{memory: [{{use: keep, regions: [moe_act]}}], gemm: {{use: {gemm}}}}}"
        problem = refusal(text.format(gemm="grouped"))
        assert problem.where == "spec.yaml:1:23 memory[0].regions"
        assert "keep needs region moe_act to allow keep" in problem.what
        assert "grouped offers moe_act=recompute" in problem.what
        resolved(text.format(gemm="loop"))
        resolved(text.format(gemm="grouped").replace("keep", "recompute"))

    def test_a_region_whose_name_has_two_lines(self) -> None:
        problem = refusal(r'memory: [{use: keep, regions: ["no\nwhere"]}]')
        assert r"needs region no\nwhere to allow keep" in problem.what

    def test_axes_along_which_the_model_is_not_split(self) -> None:
        @frozen(kw_only=True)
        class Whole(Decoder):
            name: ClassVar[str] = "whole"

            def offers(self, site: Site) -> moefw.Offers:
                return {**super().offers(site), "split": ("tp",)}

        text = "{model: {use: whole}, parallel: {pp: 2, dense: {tp: 2, cp: 2}}, train: {tokens_per_step: 8192}}"
        told = refused(text, registry=registry(models=[Whole]))
        assert [problem.where for problem in told] == [
            "spec.yaml:1:34 parallel.pp",
            "spec.yaml:1:56 parallel.dense.cp",
        ]
        assert [problem.fix for problem in told] == ["Use pp: 1.", "Use dense.cp: 1."]
        resolved(text.replace("whole", "decoder"))

    def test_sequences_that_ranks_cannot_share(self) -> None:
        text = "{{parallel: {{dense: {{cp: 2, tp: {}}}}}, train: {{tokens_per_step: {}, seq_len: {}, micro_batch: 1}}}}"
        problem = refusal(text.format(1, 20, 10))
        assert problem.what == "seq_len 10 does not divide into 4 pieces, two for each rank of cp."
        assert problem.fix == "Use a seq_len that 4 divides."
        resolved(text.format(2, 16, 8))
        resolved(text.format(4, 16, 8))

    def test_attentions_that_an_algorithm_cannot_share(self) -> None:
        text = (
            "{{attention: {{num_heads: {}, kernel: {}}}, context_parallel: {{use: {}}}, run: {{device: cpu}},"
            " parallel: {{dense: {{cp: {}}}}}, train: {{tokens_per_step: 8192}}}}"
        )
        problem = refusal(text.format(6, "sdpa", "ulysses", 4))
        assert problem.where.endswith("context_parallel")
        assert "ulysses needs attention heads that 4 ranks share evenly" in problem.what
        assert "gqa offers 6" in problem.what
        resolved(text.format(8, "sdpa", "ulysses", 4))
        resolved(text.format(6, "sdpa", "ring_attention", 4))
        told = [problem.what for problem in refused(text.format(4, "flex", "ring_attention", 2))]
        assert any("ring_attention needs attention around the core sdpa" in what for what in told)
        assert not any("core" in problem.what for problem in refused(text.format(4, "flex", "ring_attention", 1)))

    def test_sizes_that_tensor_parallelism_does_not_divide(self) -> None:
        model = "{vocab_size: 257, num_dense_layers: 1, dense_dim: 100, shared_expert_dim: 60}"
        told = refused(f"{{model: {model}, parallel: {{dense: {{tp: 8}}}}, train: {{tokens_per_step: 8192}}}}")
        sizes = [f"model.{size}" for size in ("vocab_size", "dense_dim", "shared_expert_dim")]
        assert [problem.where.split()[1] for problem in told] == [*sizes, "attention.num_heads"]
        resolved(f"{{model: {model}, parallel: {{dense: {{tp: 1}}}}, train: {{tokens_per_step: 8192}}}}")

    def test_tokens_that_do_not_divide_into_parts_of_a_micro_batch(self) -> None:
        text = "{{parallel: {{dense: {{tp: 2}}}}, train: {{tokens_per_step: {0}, seq_len: {0}, micro_batch: 1}}}}"
        problem = refusal(text.format(101))
        assert "101 tokens do not divide into 2 parts" in problem.what
        resolved(text.format(102))

    def test_two_policies_on_one_region_and_regions_that_the_model_does_not_have(self) -> None:
        policies = "[{use: keep, regions: [experts]}, {use: recompute, regions: [experts, dense_mlp, shared_experts]}]"
        told = refused(f"{{memory: {policies}}}")
        assert told[0].where == "spec.yaml:1:71 memory[1].regions[0]"
        assert "keep" in told[0].what
        assert "recompute" in told[0].what
        assert [word for problem in told[1:] for word in ("dense_mlp", "shared_experts") if word in problem.what] == [
            "dense_mlp",
            "shared_experts",
        ]

    @given(st.integers(1, 100_000), st.integers(1, 8), st.integers(2, 512), st.sampled_from([1, 2, 4, 8]))
    @settings(max_examples=50)
    def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(
        self, tokens: int, micro_batch: int, seq_len: int, ep: int
    ) -> None:
        def text(tokens: int) -> str:
            train = f"{{tokens_per_step: {tokens}, micro_batch: {micro_batch}, seq_len: {seq_len}}}"
            return f"{{train: {train}, parallel: {{experts: {{ep: {ep}}}}}}}"

        unit = micro_batch * seq_len * ep
        if tokens % unit == 0:
            assert resolved(text(tokens))
            return
        problem = refusal(text(tokens))
        assert problem.where == "spec.yaml:1:10 train.tokens_per_step"
        assert str(unit) in problem.what
        (mended,) = map(int, re.findall(r"tokens_per_step: (\d+)", problem.fix))
        assert abs(mended - tokens) <= unit
        assert resolved(text(mended))

    @given(st.integers(1, 96), st.integers(1, 6), st.integers(1, 24), st.sampled_from([1, 2, 4]))
    @settings(max_examples=50)
    def test_a_world_that_the_batch_does_not_divide_over_is_refused_with_those_nearest_and_a_micro_batch(
        self, sequences: int, micro_batch: int, world: int, ep: int
    ) -> None:
        def text(micro_batch: int) -> str:
            train = f"{{tokens_per_step: {sequences * 64}, micro_batch: {micro_batch}, seq_len: 64}}"
            return f"{{train: {train}, parallel: {{experts: {{ep: {ep}}}}}}}"

        def keeps_the_batch(world: int) -> bool:
            return world % ep == 0 and sequences % (micro_batch * world) == 0

        world *= ep
        if keeps_the_batch(world):
            assert resolved(text(micro_batch), world=world)
            return
        fix = refusal(text(micro_batch), world=world).fix
        fewer = [other for other in range(1, world) if keeps_the_batch(other)][-1:]
        more = [other for other in range(world + 1, 200) if keeps_the_batch(other)][:1]
        named = re.findall(r"use (?:(\d+) or )?(\d+) ranks", fix)
        assert [int(other) for found in named for other in found if other] == fewer + more
        smaller = re.findall(r"micro_batch: (\d+)", fix)
        assert bool(smaller) == (sequences % world == 0)
        for found in smaller:
            assert int(found) < micro_batch
            assert resolved(text(int(found)), world=world)

    @pytest.mark.parametrize(
        ("train", "world"),
        [
            ("{tokens_per_step: 4611686018427387904, micro_batch: 6597069766656, seq_len: 2}", 1),
            ("{tokens_per_step: 4611686018427387902, micro_batch: 1, seq_len: 2}", 2**61 - 2),
        ],
        ids=["sequences", "ranks"],
    )
    def test_advice_about_a_batch_of_any_magnitude_ends(self, train: str, world: int) -> None:
        assert "do not divide into micro-batches" in refusal(f"{{train: {train}}}", world=world).what

    def test_a_world_that_the_layout_cannot_fill(self) -> None:
        text = "{parallel: {experts: {ep: 4}}, train: {tokens_per_step: 49152}}"
        problem = refusal(text, world=6)
        assert problem.where == "spec.yaml:1:2 parallel"
        assert "6 ranks do not fit this layout, which wants a multiple of 4" in problem.what
        assert problem.fix.startswith("Start 8 ranks")
        assert resolved(text, world=8).layout.sizes["edp"] == 2
        assert resolved(text).layout.world == 4

    def test_axes_are_checked_in_a_world_that_the_layout_cannot_fill(self) -> None:
        with pytest.raises(PlanError) as raised:
            resolved("{parallel: {pp: 100, experts: {ep: 7}}}", world=6)
        misfit, experts, stages = raised.value.problems
        assert "6 ranks do not fit this layout" in misfit.what
        assert "needs a size of axis ep that divides" in experts.what
        assert "does not fill 100 pipeline stages" in stages.what

    def test_a_device_or_package_that_the_machine_lacks(self) -> None:
        @frozen
        class Needy(Plain):
            name: ClassVar[str] = "needy"
            package: str = "torch"

            def needs(self, site: Site) -> Sequence[moefw.Need]:
                wants = moefw.need("package", self.package, reason="it calls it", fix="Install it.", option="package")
                return [moefw.need("device", ("cuda",), reason="its kernels are CUDA"), wants]

        more = registry(dispatchers=[Needy])
        problem = refusal("dispatch: {use: needy}", registry=more)
        assert "needy needs device cuda: its kernels are CUDA; this machine offers cpu." in problem.what
        problem = refusal("dispatch: {use: needy, package: nowhere}", registry=more, machine=Machine(device="cuda"))
        assert str(problem).startswith("spec.yaml:1:24 dispatch.package: needy needs package nowhere: it calls it;")
        assert problem.fix == "Install it."
        resolved("dispatch: {use: needy}", registry=more, machine=Machine(device="cuda"))

    def test_the_first_kind_of_error_names_them_all(self) -> None:
        text = "{{train: {{steps: {steps}}}, gemm: {{use: {gemm}}}, model: {{num_experts: 3}}}}"
        assert len(refused(text.format(steps="x", gemm="lop"), SpecError)) == 3
        assert len(refused(text.format(steps="1", gemm="lop"), PluginError)) == 2
        assert len(refused(text.format(steps="1", gemm="loop"), PlanError)) == 1

    def test_a_place_without_a_line_is_the_name_that_it_was_given(self) -> None:
        with pytest.raises(PlanError) as caught:
            assemble_tree({"model": {"top_k": 99}}, Marks("notebook"), defaults=DEFAULTS, registry=REGISTRY)
        assert caught.value.problems[0].where == "notebook routing"


class TestPresets:
    def test_a_model_without_a_name_is_refused_beside_a_preset_too(self) -> None:
        problem = refusal("model: {use: null, preset: qwen3-moe-tiny}", SpecError)
        assert problem.where == "spec.yaml:1:9 model.use"

    def test_options_beside_a_preset_win(self) -> None:
        model = resolved("model: {preset: qwen3-30b-a3b, top_k: 2}").parts.model
        assert (model.num_experts, model.top_k, model.dim) == (128, 2, 2048)

    def test_an_unknown_one_gets_the_nearest_name_and_nothing_else(self) -> None:
        text = "{model: {preset: qwen3-30b-a3}, parallel: {experts: {ep: 128}}, train: {tokens_per_step: 262144}}"
        problem = refusal(text, SpecError)
        assert str(problem) == (
            "spec.yaml:1:10 model.preset: decoder has no preset 'qwen3-30b-a3'. Did you mean 'qwen3-30b-a3b'?"
        )
        resolved(text.replace("a3}", "a3b}"))

    @pytest.mark.parametrize(
        ("wrong", "shown"), [("3", "3"), ("[a]", "['a']"), ("{a: 1}", "{'a': 1}"), ("true", "true")]
    )
    def test_one_that_is_no_name_is_refused(self, wrong: str, shown: str) -> None:
        problem = refusal(f"model: {{preset: {wrong}}}", SpecError)
        assert problem.what == f"decoder has no preset {shown}."

    def test_null_is_none(self) -> None:
        assert resolved("model: {preset: null}") == resolved("{}")


class TestResolvedSpec:
    TEXTS = (
        "{}",
        QUICKSTART.read_text(),
        "{model: {preset: qwen3-30b-a3b, tie_embeddings: true}, memory: [{use: recompute, regions: [layer, router]}]}",
        '{run: {dir: "1e3", device: cpu, observers: [watched]}, train: {clip_norm: null, schedule: {use: wsd}}}',
        '{run: {dir: "2001-01-01"}, data: {path: "no", suffixes: [.py, "~", "0x1"]}, parallel: {experts: {ep: 2}}}',
    )

    @pytest.mark.parametrize("text", TEXTS)
    def test_loads_again_to_an_equal_assembly_with_the_same_digest(self, text: str) -> None:
        found = resolved(text, registry=watched())
        YAML().dump(found.resolved(), out := StringIO())
        again = resolved(out.getvalue(), registry=watched())
        assert again == found
        assert again.digest() == found.digest()
        assert again.resolved() == found.resolved()

    def test_the_digest_differs_when_any_option_differs(self) -> None:
        def leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
            inner = tree.items() if isinstance(tree, dict) else ()
            return [leaf for key, item in inner for leaf in leaves(item, f"{path}.{key}")] or [(path[1:], tree)]

        base = resolved("{}")
        others = {
            "train.weights": "folder",
            "train.freeze": None,  # only with weights
            "train.frozen_weights": None,  # only where some are frozen
            "train.main_gradients": "bfloat16",
            "parallel.dense.zero": None,  # only with shards
            "parallel.experts.zero": None,
            "train.replay_routes": "folder",
            "model.dense_layers": None,
            "model.pad_id": 3,
            "model.loss_chunk": 8,
            "model.shared_expert_gate": None,
            "model.activation.kind": "clamped_swiglu",
            "adapter.use": None,
            "attention.use": None,
            "attention.kernel": None,
            "attention.qk_norm": "all",
            "attention.window": 8,
            "attention.full_layers": None,
            "attention.clip": 1.0,
            "attention.rope.pairs": "neighbours",
            "attention.rope.kind": None,
            "routing.use": None,
            "data.use": None,
            "model.use": None,
            "parallel.use": None,
            "train.optimizer.use": None,
            "dispatch.use": "allgather",
            "dispatch.wire": None,
            "dispatch.rank_capacity": None,
            "dispatch.on_overflow": None,
            "dispatch.max_tokens": None,
            "gemm.use": "loop",
            "precision.use": "bf16",
            "train.schedule.use": "wsd",
            "context_parallel.use": "ring_attention",
            "pipeline.use": "gpipe",
            "pipeline.layout": "EttttL",
            "routing.score": "sigmoid",
            "routing.balance": [{"kind": "aux_loss"}],
            "routing.pre_softmax": True,
            "routing.renormalise": None,
            "routing.groups": {"count": 4, "keep": 2},
            "routing.capacity": {"factor": 1.0},
            "routing.jitter": 0.1,
            "routing.dtype": "fp64",
            "memory": [{"use": "keep", "regions": ["layer"]}],
            "parallel.dense.dp": 1,
            "parallel.dense.order": ["tp", "dp", "cp"],
            "parallel.experts.order": ["ep", "etp", "edp"],
            "parallel.dense.shard": "all",
            "parallel.experts.shard": "all",
            "parallel.ranks_per_node": 2,
            "data.path": "x",
            "run.device": "cpu",
            "train.packing": "static",
            "train.on_full_disk": "continue",
            "train.checkpoint": "sync",
            "train.graphs": None,  # not on a CPU: tests/spec/test_graphs.py
            "train.on_failed_capture": "eager",
            "run.observers": ["watched"],
            "train.tokens_per_step": 16384,
            "train.on_bad_step": "skip",
        }
        digests = {base.digest()}
        num_changed = 0
        for path, value in leaves(base.resolved()):
            if path in others:
                other = others[path]
            elif isinstance(value, bool):
                other = not value
            elif isinstance(value, int | float):
                other = value / 2 if 0 < value < 1 else value * 2 or 1
            else:
                other = f"{value}x" if isinstance(value, str) else ["x"]
            of_other_kinds = path.startswith(("attention.rope.", "model.activation.")) and value is None
            if other is None or of_other_kinds:
                continue
            tree: Any = {}
            *parents, last = path.split(".")
            node = tree
            for key in parents:
                node = node.setdefault(key, {})
            node[last] = other
            if path in ("parallel.dense.cp", "parallel.dense.tp", "parallel.experts.ep", "parallel.experts.etp"):
                tree["train"] = {"tokens_per_step": 8192}
            if path in ("train.micro_batch", "train.seq_len"):
                tree.setdefault("train", {})["tokens_per_step"] = 8192
            found = assemble_tree(tree, Marks("o"), defaults=DEFAULTS, registry=watched(), machine=Machine())
            digests.add(found.digest())
            num_changed += 1
        assert num_changed > 45
        assert len(digests) == num_changed + 1

    def test_the_digest_does_not_change_with_plugins_that_the_spec_does_not_name(self) -> None:
        registry = Registry()
        registry.load_all()
        found = assemble_tree({}, Marks("o"), defaults=DEFAULTS, registry=registry, machine=Machine())
        assert found.digest() == resolved("{}").digest()

    def test_the_digest_differs_with_the_world(self) -> None:
        assert resolved(world=1).digest() != resolved(world=2).digest()


class TestSharedRegistry:
    def test_specs_do_not_see_each_other(self) -> None:
        alone = [resolved(text, registry=watched()) for text in TestResolvedSpec.TEXTS]
        shared = watched()
        for _ in range(2):
            assert [resolved(text, registry=shared) for text in TestResolvedSpec.TEXTS] == alone
            assert "no plugin is called 'nope'" in refusal("gemm: {use: nope}", PluginError, registry=shared).what


def test_a_run_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2024", "1e3", "no: x", "[a", "# b", '"q"', "größe", "null", "&a"):
        folder = Path(name)
        folder.mkdir()
        with (folder / "spec.yaml").open("w") as file:
            YAML().dump(resolved("{parallel: {experts: {ep: 2}}}").resolved(), file)
        found = specs.read_run(name, ["train.steps=7"])
        assert (found.spec.run.dir, found.spec.train.steps, found.layout.world) == (name, 7, 1)
    with pytest.raises(SpecError, match="not the folder of a run"):
        specs.read_run("nowhere", [])
