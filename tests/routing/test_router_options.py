"""Every option that would be ignored, or would fail at run time elsewhere, is refused with its place and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks, read_yaml
from moefw.core.errors import MoefwError
from moefw.core.site import Machine
from moefw.plugins.models.decoder import Decoder
from moefw.plugins.routers.topk.options import check_stages
from moefw.testing.announce import with_plugins

SIZES = {"num_experts": 8, "top_k": 2}


def resolved(routing: str, **sizes: int) -> Assembly:
    tree: dict[str, Any] = read_yaml(f"routing: {routing}", Marks("spec"), [])
    tree["model"] = {**SIZES, **sizes}
    return assemble_tree(tree, Marks("spec"), defaults=defaults(), registry=with_plugins(()), machine=Machine())


REFUSED: list[tuple[str, dict[str, int], list[str]]] = [
    ("{balance: [{kind: foo}]}", {}, ["routing.balance[0].kind", "'foo' is not one of the choices"]),
    ("{balance: [{kind: aux_loss}, {kind: foo}]}", {}, ["routing.balance[1].kind", "aux_loss, expert_bias, quantile"]),
    ("{balance: [{kind: sinkhorn}]}", {}, ["'sinkhorn' is not one of the choices"]),
    ("{score: foo}", {}, ["routing.score", "'foo' is not one of the choices. Known: sigmoid, softmax, sqrtsoftplus"]),
    ("{capacity: {factor: 1.0, drop: foo}}", {}, ["routing.capacity.drop", "Known: position, probs"]),
    ("{dtype: bf16}", {}, ["routing.dtype", "'bf16' is not one of the choices", "fp32"]),
    ("{}", {"top_k": 16}, ["top_k 16 of 8 experts", "between 1 and 8"]),
    ("{}", {"top_k": 0}, ["model.top_k", "must be >= 1"]),
    ("{groups: {count: 4, keep: 3}}", {}, ["routing.groups.keep", "keep 3 does not divide top_k 2"]),
    ("{groups: {count: 4, keep: 2}}", {"top_k": 3}, ["routing.groups.keep", "keep 2 does not divide top_k 3"]),
    ("{groups: {count: 3, keep: 1}}", {}, ["routing.groups.count", "8 experts do not divide into 3 groups"]),
    ("{groups: {count: 2, keep: 4}}", {}, ["routing.groups.keep", "4 groups of 2 cannot be kept"]),
    ("{groups: {count: 4, keep: 2, best: 3}}", {}, ["groups.best", "a group of 2 experts cannot be scored by its best 3"]),
    ("{groups: {count: 4, keep: 1}}", {"top_k": 4}, ["groups.keep", "1 groups of 2 experts have 2, and top_k is 4"]),
    ("{groups: {count: 0, keep: 1}}", {}, ["routing.groups.count", "must be >= 1"]),
    ("{groups: {count: 4}}", {}, ["routing.groups.keep", "'keep' is missing"]),
    ("{aux_coeff: 0.1}", {}, ["'aux_coeff' is not an option here"]),
    ("{balance: [{kind: expert_bias, coeff: 0.1}], score: sigmoid}", {}, ["balance[0].coeff", "expert_bias, which has rate"]),
    ("{balance: [{kind: z_loss, over: sequence}]}", {}, ["balance[0].over", "z_loss, which has coeff"]),
    ("{balance: [{kind: z_loss}, {kind: aux_loss, ema: 0.5}]}", {}, ["balance[1].ema", "has coeff and over"]),
    ("{balance: [{kind: quantile, rate: 0.5}]}", {}, ["balance[0].rate", "quantile, which has ema"]),
    ("{balance: [{kind: z_loss, coeff: -1}]}", {}, ["balance[0].coeff", "must be >= 0"]),
    ("{balance: [{kind: aux_loss, coeff: -1}]}", {}, ["balance[0].coeff", "must be >= 0"]),
    ("{balance: [{kind: expert_bias, rate: -1}], score: sigmoid}", {}, ["balance[0].rate", "must be >= 0"]),
    ("{balance: [{kind: quantile, ema: 1}]}", {}, ["balance[0].ema", "must be < 1"]),
    ("{balance: [{kind: aux_loss, over: batch}]}", {}, ["balance[0].over", "Did you mean 'micro_batch'"]),
    ("{balance: [{kind: aux_loss, over: sequence}, {kind: aux_loss, over: sequence}]}", {}, ["aux_loss over sequence more than once"]),
    ("{balance: [{kind: aux_loss}, {kind: aux_loss, over: micro_batch}]}", {}, ["aux_loss over micro_batch more than once"]),
    ("{balance: [{kind: z_loss}, {kind: z_loss}]}", {}, ["z_loss more than once"]),
    ("{score: softmax, balance: [{kind: expert_bias}]}", {}, ["routing.balance", "expert bias", "sqrtsoftplus"]),
    ("{score: softmax, pre_softmax: true, balance: [{kind: expert_bias}]}", {}, ["expert bias"]),
    ("{balance: [{kind: quantile}, {kind: aux_loss}]}", {}, ["quantile and aux_loss both balance"]),
    ("{score: sigmoid, balance: [{kind: quantile}, {kind: expert_bias}]}", {}, ["quantile and expert_bias both balance"]),
    ("{balance: [{kind: quantile}]}", {"top_k": 8}, ["quantile needs an expert that is not chosen", "8 of 8"]),
    ("{balance: [{kind: quantile}], groups: {count: 4, keep: 2}}", {}, ["routing.groups", "quantile compares all experts"]),
    ("{score: softmax}", {"top_k": 1}, ["routing.score", "softmax over one chosen expert", "pre_softmax: true"]),
    ("{score: softmax, renormalise: true}", {}, ["routing.renormalise", "no option of score: softmax"]),
    ("{score: softmax, pre_softmax: true, renormalise: false}", {}, ["routing.renormalise"]),
    ("{score: sigmoid, pre_softmax: false}", {}, ["routing.pre_softmax", "no option of score: sigmoid"]),
    ("{score: sqrtsoftplus, pre_softmax: true}", {}, ["routing.pre_softmax", "no option of score: sqrtsoftplus"]),
    ("{score: sigmoid, renormalise: true}", {"top_k": 1}, ["routing.renormalise", "divided by itself"]),
    ("{jitter: -1}", {}, ["routing.jitter", "must be >= 0"]),
    ("{jitter: 1}", {}, ["routing.jitter", "must be < 1"]),
    ("{scale: 0}", {}, ["routing.scale", "must be > 0"]),
    ("{capacity: {factor: 0}}", {}, ["routing.capacity.factor", "must be > 0"]),
    ("{capacity: {factor: -1}}", {}, ["routing.capacity.factor", "must be > 0"]),
    ("{capacity: {pad: true}}", {}, ["'factor' is missing"]),
    ("{capacity: {factor: 1.0, pad: true, over: micro_batch}}", {}, ["routing.capacity.over", "over all ranks"]),
    ("{capacity: {factor: 1.0}, balance: [{kind: quantile}]}", {}, ["routing.capacity", "kind quantile"]),
    ("{capacity: {factor: 1.0}, score: sigmoid, balance: [{kind: expert_bias}]}", {}, ["kind expert_bias"]),
    ("{use: sinkhorn, balance: [{kind: aux_loss, coeff: 0.1}]}", {}, ["'balance' is not an option here"]),
    ("{use: sinkhorn, aux_coeff: 0.1}", {}, ["'aux_coeff' is not an option here"]),
    ("{use: sinkhorn, capacity: {factor: 1.0}}", {}, ["'capacity' is not an option here"]),
    ("{use: sinkhorn, z_loss: -1}", {}, ["routing.z_loss", "must be >= 0"]),
    ("{use: sinkhorn}", {"top_k": 16}, ["top_k 16 of 8 experts"]),
    ("{use: forced}", {"top_k": 16}, ["top_k 16 of 8 experts"]),
    ("{use: forced, balance: []}", {}, ["'balance' is not an option here"]),
]  # fmt: skip

ACCEPTED: list[tuple[str, dict[str, int]]] = [
    ("{}", {}),
    ("{score: softmax, pre_softmax: true}", {"top_k": 1}),
    ("{score: softmax, pre_softmax: false}", {}),
    ("{score: sigmoid}", {"top_k": 1}),
    ("{score: sigmoid, renormalise: false}", {"top_k": 1}),
    ("{score: sigmoid, groups: {count: 4, keep: 2}, balance: [{kind: expert_bias}]}", {"top_k": 4}),
    ("{balance: [{kind: aux_loss}, {kind: aux_loss, over: sequence}, {kind: aux_loss, over: global_batch}]}", {}),
    ("{balance: [{kind: aux_loss, over: model, coeff: 0.001}, {kind: z_loss}]}", {}),
    ("{balance: [{kind: quantile}, {kind: z_loss}]}", {"top_k": 7}),
    ("{capacity: {factor: 1.25, drop: position}, balance: [{kind: aux_loss}, {kind: z_loss}]}", {}),
    ("{use: sinkhorn, z_loss: 0.01}", {"top_k": 1}),
    ("{use: forced}", {}),
]

PARTITIONS = {
    "{}": "token",
    "{score: sigmoid, jitter: 0.1, balance: [{kind: expert_bias}]}": "token",
    "{balance: [{kind: aux_loss, over: global_batch}, {kind: z_loss}]}": "token",
    "{balance: [{kind: aux_loss, over: sequence}]}": "sequence",
    "{balance: [{kind: aux_loss, over: sequence}, {kind: aux_loss}]}": "micro_batch",
    "{balance: [{kind: aux_loss, over: model}]}": "micro_batch",
    "{balance: [{kind: quantile}]}": "micro_batch",
    "{capacity: {factor: 1.0}}": "rank",
    "{capacity: {factor: 1.0, over: micro_batch}}": "micro_batch",
    "{use: sinkhorn}": "micro_batch",
    "{use: forced}": "micro_batch",
}


@pytest.mark.parametrize(("routing", "sizes", "words"), REFUSED, ids=[f"{row[0]} {row[1] or ''}" for row in REFUSED])
def test_what_would_be_ignored_or_fail_later_is_refused(routing: str, sizes: dict[str, int], words: list[str]) -> None:
    with pytest.raises(MoefwError) as caught:
        resolved(routing, **sizes)
    (problem,) = caught.value.problems
    assert problem.fix or "must be" in problem.what
    for word in words:
        assert word in str(problem)


@pytest.mark.parametrize(("routing", "sizes"), ACCEPTED)
def test_what_makes_sense_is_accepted_and_survives_being_spelled_out(routing: str, sizes: dict[str, int]) -> None:
    found = resolved(routing, **sizes)
    again = assemble_tree(
        found.resolved(), Marks("again"), defaults=defaults(), registry=with_plugins(()), machine=Machine()
    )
    assert again.parts.routing == found.parts.routing


@pytest.mark.parametrize(("routing", "partition"), PARTITIONS.items())
def test_a_router_says_which_tokens_it_looks_at_together(routing: str, partition: str) -> None:
    layers = resolved(routing).layers
    assert {layer.facts["partition"] for layer in layers.values()} == {partition}


def test_padding_to_the_capacity_asks_for_padded_rows() -> None:
    rows = [resolved(f"{{capacity: {{factor: 1.0, pad: {pad}}}}}").layers[0].facts["rows"] for pad in ("true", "false")]
    assert rows == ["padded", "ragged"]


def test_a_loss_over_the_model_needs_one_stage_and_a_model_that_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    routing = "{balance: [{kind: aux_loss, over: model}]}"
    rules = resolved(routing).parts.routing.balance
    assert not list(check_stages(1, rules))
    assert "2 pipeline stages split them" in next(check_stages(2, rules)).what
    whole = Decoder.offers
    monkeypatch.setattr(Decoder, "offers", lambda *given: {**whole(*given), "layer_losses": False})
    with pytest.raises(MoefwError, match="topk needs losses over all MoE layers"):
        resolved(routing)
