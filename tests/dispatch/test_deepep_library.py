"""The DeepEP adapters, over a fake that moves rows through gloo, against the torch backend and the dense oracle."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import moefw
from deep_ep_cases import BF16, FP8, INTERFACES, WORLDS, Cluster, case, packed, with_parts
from deep_ep_ranks import (
    in_flight,
    left_on_the_dispatcher,
    received,
    received_without_a_read,
    redispatched,
    refusal,
    refused,
    row_bytes,
    rows_outlive_the_layer,
    solved,
    torch_fills_memory,
)
from fake_deep_ep import FAKES
from moefw.plugins.dispatchers.deepep.limits import BUFFER_RANKS, Shape, buffer_limits, elastic_limits, limits
from moefw.plugins.dispatchers.deepep.probe import choose, library
from moefw.testing.layer_case import assert_matches, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from pairwise import each_value

EVENTS = ("EventOverlap.__init__", "EventOverlap.current_stream_wait")

pytestmark = pytest.mark.usefixtures("fake_deep_ep")


def test_the_fake_has_the_signatures_of_the_real_library() -> None:
    import deep_ep
    from deep_ep.signatures import differences

    kinds = (deep_ep.Buffer, deep_ep.ElasticBuffer, deep_ep.EventOverlap, deep_ep.HybridEPBuffer)
    assert [line for kind in kinds for line in differences(kind)] == []


def test_a_call_that_the_real_signature_does_not_take_fails() -> None:
    import deep_ep

    with pytest.raises(TypeError, match="alignment"):
        deep_ep.Buffer.dispatch(object(), torch.zeros(1), alignment=16)


def test_the_rank_counts_are_those_of_the_real_library() -> None:
    from deep_ep.signatures import SNAPSHOT

    assert list(BUFFER_RANKS) == SNAPSHOT["ranks"]["get_dispatch_config"] == SNAPSHOT["ranks"]["get_combine_config"]


@pytest.mark.parametrize(("world", "interface"), each_value(WORLDS, INTERFACES))
def test_outputs_and_gradients_equal_the_oracle(pool: RankPool, interface: str, world: str) -> None:
    for seed, skew in enumerate(("even", "one", "starved")):
        layer_case = case(
            world, interface, skew=skew, seed=seed, masked=seed == 1, shared=True, row_alignment=1 + 3 * seed
        )
        if interface == "ElasticBuffer" and seed:
            continue
        outcomes = pool.run(solved, layer_case.world, layer_case, INTERFACES[interface][1])
        assert_matches(outcomes, truth(layer_case, Rule(top_k=2)), rtol=BF16)


@pytest.mark.parametrize(("world", "interface"), each_value(WORLDS, INTERFACES))
def test_the_same_rows_arrive_as_over_the_torch_backend(pool: RankPool, interface: str, world: str) -> None:
    layer_case = case(world, interface, num_experts=8, top_k=3, row_alignment=4)
    ours = pool.run(received, layer_case.world, layer_case, INTERFACES[interface][1])
    theirs = pool.run(received, layer_case.world, layer_case, None)
    for mine, wanted in zip(ours, theirs):
        for name in ("rows", "weights"):
            assert torch.equal(mine[name], wanted[name]), name
        for name in ("counts", "offsets", "sizes"):
            assert mine[name] == wanted[name], name
        assert torch.allclose(mine["out"], wanted["out"], rtol=2e-2)


@pytest.mark.parametrize("interface", INTERFACES)
def test_counts_for_which_the_library_has_waited_are_not_read_back(pool: RankPool, interface: str) -> None:
    layer_case = case("two ranks, unequal", interface, num_experts=8, top_k=3)
    wanted, found = (
        pool.run(rows, 2, layer_case, INTERFACES[interface][1]) for rows in (received, received_without_a_read)
    )
    assert [of_rank["sizes"] for of_rank in found] == [of_rank["sizes"] for of_rank in wanted]


@pytest.mark.parametrize(("world", "interface", "precision"), each_value(WORLDS, INTERFACES, FP8))
def test_packed_rows_arrive_as_over_the_torch_backend(
    pool: RankPool, interface: str, world: str, precision: str
) -> None:
    """A model dim of 272 leaves a packed row that is no multiple of 32 bytes."""
    more = {"dim": 272} if interface == "Buffer" else {}
    layer_case = packed(world, interface, precision, **more)
    ours = pool.run(received, layer_case.world, layer_case, INTERFACES[interface][1])
    theirs = pool.run(received, layer_case.world, layer_case, None)
    for mine, wanted in zip(ours, theirs):
        for name in ("rows", "weights"):
            assert torch.equal(mine[name], wanted[name]), name
        assert mine["counts"] == wanted["counts"]
        assert torch.allclose(mine["out"], wanted["out"], rtol=2e-2)


@pytest.mark.parametrize("interface", INTERFACES)
def test_packed_rows_are_half_as_wide_and_sums_and_gradients_are_not_packed(pool: RankPool, interface: str) -> None:
    layer_case = packed("two ranks, unequal", interface, "mxfp8", **({"dim": 272} if interface == "Buffer" else {}))
    codes_and_scales = layer_case.dim + -(-layer_case.dim // 32)
    whole, half = 2 * layer_case.dim, -(-codes_and_scales // 32) * 32
    for moved in pool.run(row_bytes, 2, layer_case, INTERFACES[interface][1]):
        assert moved == [("dispatch", half), ("combine", whole), ("dispatch", whole), ("combine", whole)]


@pytest.mark.parametrize("world", WORLDS)
def test_groups_are_padded_to_the_capacity_of_the_router(pool: RankPool, world: str) -> None:
    layer_case = case(world, row_alignment=4)
    routing = {**layer_case.parts["routing"], "capacity": {"factor": 1.0, "pad": True}}
    layer_case = with_parts(layer_case, routing=routing)
    ours, theirs = (pool.run(received, layer_case.world, layer_case, options) for options in ({}, None))
    for mine, wanted in zip(ours, theirs):
        assert torch.equal(mine["rows"], wanted["rows"])
        assert torch.equal(mine["weights"], wanted["weights"])
        assert mine["sizes"] == wanted["sizes"]
        assert len(set(mine["sizes"])) == 1


@pytest.mark.parametrize(
    ("world", "interface"),
    each_value(["two ranks, unequal", "four ranks, one empty", "experts in two parts"], INTERFACES),
)
def test_redispatch_moves_other_values_along_the_handle(pool: RankPool, interface: str, world: str) -> None:
    layer_case = case(world, interface)
    etp = WORLDS[world][2]
    for again in pool.run(redispatched, layer_case.world, layer_case, INTERFACES[interface][1]):
        assert again.same_rows
        assert again.same_weights
        dispatches = [given for name, given in again.calls if name.endswith(".dispatch")]
        assert dispatches
        for given in dispatches:
            assert "handle" in given
            assert "topk_idx" not in given
        moves = {name for name, _ in again.calls if not name.endswith("_config")}
        assert moves == {f"{interface}.dispatch", f"{interface}.combine", *EVENTS}
        chosen = again.grads["ids"] >= 0
        assert torch.equal(again.grads["x"], torch.full_like(again.grads["x"], 2.0 * etp))
        assert torch.equal(again.grads["weights"], 3.0 * etp * chosen)


@pytest.mark.parametrize("interface", INTERFACES)
def test_two_micro_batches_in_flight_do_not_disturb_each_other(pool: RankPool, interface: str) -> None:
    layer_case = case("four ranks, one empty", interface)
    assert pool.run(in_flight, 4, layer_case, INTERFACES[interface][1]) == [True] * 4


@pytest.mark.parametrize("interface", INTERFACES)
def test_nothing_stays_on_the_dispatcher(pool: RankPool, interface: str) -> None:
    layer_case = case("two ranks, unequal", interface)
    assert pool.run(left_on_the_dispatcher, 2, layer_case, INTERFACES[interface][1]) == [[], []]


@pytest.mark.parametrize("interface", INTERFACES)
def test_no_row_outlives_its_movement(pool: RankPool, interface: str) -> None:
    layer_case = case("two ranks, unequal", interface)
    assert pool.run(rows_outlive_the_layer, 2, layer_case, INTERFACES[interface][1]) == [[False] * 3] * 2


def shape(**more: int) -> Shape:
    return Shape(**{"model_dim": 4096, "top_k": 8, "num_experts": 256, "ranks": 8, **more})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model_dim": 4104}, "multiple of 16, not 4104"),
        ({"model_dim": 8192}, "at most 8176, not 8192"),
        ({"top_k": 33}, "at most 32, not 33"),
        ({"num_experts": 2048}, "at most 128 experts, not 256"),
        ({"ranks": 6}, "2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160 ranks, not 6"),
        ({"ranks": 16, "model_dim": 4112}, "multiple of 256, not 4112"),
        ({"ranks": 16, "model_dim": 8192}, "16376 bytes between nodes, not 16464"),
        ({"ranks": 16, "num_experts": 2048}, "at most 64 experts, not 128"),
        ({"ranks": 96, "num_experts": 960, "top_k": 10}, "at most 8 nodes; top-10 over 12"),
    ],
)
def test_what_buffer_cannot_do_is_said_with_the_limit(given: dict[str, int], said: str) -> None:
    (found,) = buffer_limits(shape(**given))
    assert said in found
    (problem,) = limits(shape(**given))
    assert said in problem.what
    assert "backend: torch" in problem.fix


@pytest.mark.parametrize(
    ("given", "max_tokens", "said"),
    [
        ({"model_dim": 4112}, 64, "multiple of 256, not 4112"),
        ({"top_k": 33}, 64, "at most 32, not 33"),
        ({"ranks": 2048, "num_experts": 2048}, 64, "at most 1024 ranks, not 2048"),
        ({"ranks": 256, "num_experts": 4096}, 64, "at most 2048 experts, not 4096"),
        ({"ranks": 4, "num_experts": 2048}, 64, "at most 256 experts, not 512"),
        ({}, None, "set max_tokens"),
    ],
)
def test_what_elastic_buffer_cannot_do_is_said_with_the_limit(
    given: dict[str, int], max_tokens: int | None, said: str
) -> None:
    (found,) = elastic_limits(shape(**given), max_tokens=max_tokens)
    assert said in found


def test_what_one_of_the_two_buffers_carries_is_no_problem() -> None:
    assert limits(shape()) == []
    assert limits(shape(model_dim=8192)) != []
    assert limits(shape(model_dim=8192), max_tokens=4096) == []
    assert limits(shape(ranks=1)) == []


def test_parts_of_experts_count_as_choices() -> None:
    dims = moefw.Dims(model_dim=4096, expert_dim=64, num_experts=64, top_k=12)
    assert Shape.of(dims, ep=4, etp=4) == Shape(model_dim=4096, top_k=48, num_experts=256, ranks=16)
    assert "not 48" in limits(Shape.of(dims, ep=4, etp=4))[0].what


def test_the_buffer_is_chosen_by_what_the_module_has() -> None:
    import deep_ep

    assert choose(deep_ep, shape(), max_tokens=4096) == "Buffer"
    assert choose(deep_ep, shape(model_dim=8192), max_tokens=4096) == "ElasticBuffer"
    assert choose(deep_ep, shape(ranks=256), max_tokens=4096) == "ElasticBuffer"
    only_new = SimpleNamespace(ElasticBuffer=deep_ep.ElasticBuffer)
    assert choose(only_new, shape(), max_tokens=4096) == "ElasticBuffer"
    only_old = SimpleNamespace(Buffer=deep_ep.Buffer)
    with pytest.raises(moefw.PlanError, match=r"at most 8176, not 8192.*lacks ElasticBuffer"):
        choose(only_old, shape(model_dim=8192), max_tokens=4096)
    with pytest.raises(moefw.PlanError, match=r"lacks Buffer.*set max_tokens"):
        choose(only_new, shape(), max_tokens=None)


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(moefw.PlanError, match=r"cannot import deep_ep.*pip install 'moefw\[deepep\]'.*sgl-deep-ep"):
        library()


def test_the_spec_is_refused_where_library_or_gpu_are_missing() -> None:
    sys.path.remove(FAKES)
    layer_case = case("two ranks, unequal")
    said = refused(layer_case, moefw.Machine(device="cpu"))
    assert "package deep_ep" in said
    assert "pip install 'moefw[deepep]' (the distribution sgl-deep-ep; its wheel needs exactly torch 2.13.0" in said
    assert "device cuda" in said
    said = refused(layer_case, moefw.Machine(device="cuda"))
    assert "package deep_ep" in said
    assert "device cuda" not in said
    assert refused(layer_case, Cluster(device="cuda")) == ""


def test_the_spec_is_refused_with_the_limit_of_the_library() -> None:
    cluster = Cluster(device="cuda")
    layer_case = case("two ranks, unequal", dim=8192)
    said = refused(layer_case, cluster)
    assert said.startswith("PlanError")
    assert "layer case dispatch.backend" in said
    assert "at most 8176, not 8192" in said
    assert "set max_tokens" in said
    assert refused(layer_case, cluster, max_tokens=64) == ""
    fp32 = with_parts(case("two ranks, unequal"), precision={"use": "fp32"})
    assert "bf16 rows on the wire" in refused(fp32, cluster)
    assert "backend: torch has none" in refused(layer_case, cluster, backend="torch", max_tokens=64)
    assert refused(packed("two ranks, unequal", "Buffer", "mxfp8"), cluster, wire="fp8") == ""
    assert "sends codes and scales" in refused(case("two ranks, unequal"), cluster, wire="fp8")


def test_a_row_dtype_that_the_library_cannot_add_up_is_refused(pool: RankPool) -> None:
    layer_case = with_parts(case("two ranks, unequal"), precision={"use": "fp32"})
    for said in pool.run(refusal, 2, layer_case, {}):
        assert "bf16 rows; these are torch.float32" in said


def test_memory_that_torch_fills_is_refused_with_the_setting_to_change(pool: RankPool) -> None:
    for said in pool.run(refusal, 2, case("two ranks, unequal"), {}, torch_fills_memory):
        assert said.startswith("PlanError")
        assert "fill_uninitialized_memory = False" in said


def test_more_tokens_than_the_elastic_buffer_was_made_for_are_refused(pool: RankPool) -> None:
    layer_case = case("two ranks, unequal", "ElasticBuffer", tokens=(5, 5))
    for said in pool.run(refusal, 2, layer_case, {"max_tokens": 4}):
        assert "sends 5 tokens" in said
        assert "max_tokens: 4" in said
