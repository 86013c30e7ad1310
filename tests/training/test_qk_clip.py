"""QK-Clip: heads whose largest logit is above the threshold get smaller weights, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import pytest
import torch
from attrs import frozen
from torch import Tensor

import moefw
from layout_runs import EPS
from moefw.core.errors import PlanError
from moefw.core.site import Site
from moefw.core.stages import Batch
from moefw.plugins.attention.gqa import GroupedQuery
from moefw.runtime.attention import largest_logits as measured
from moefw.testing.training import SMALL, short_run
from resolved_specs import problems_of, registry, resolved

MUON: Final = {"use": "muon", "newton_schulz": "fp32", "adamw_eps": EPS}
GQA: Final = {"use": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": "none"}
MLA: Final = {"use": "mla", "num_heads": 4, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "v_dim": 5}
ATTENTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "heads of their own": {**GQA, "num_kv_heads": 4},
    "shared keys, biases": {**GQA, "qkv_bias": True, "window": 5, "sinks": True},
    "latents": MLA,
    "latents of queries, too": {**MLA, "q_rank": 10},
}
TAU: Final = 0.5
ABOVE_ALL: Final = 1e4
LAYERS: Final = range(3)


def tree(attention: Mapping[str, Any], clip: float | None, lr: float = 1e-3, **parts: Any) -> dict[str, Any]:
    """Return the spec of a small model with logits of about 1."""
    model = {**SMALL["model"], "vocab_size": 64, "init_std": 0.15}
    optimizer = MUON if clip is None else {**MUON, "qk_clip": clip}
    train = {**SMALL["train"], "lr": lr, "optimizer": {**optimizer, **parts.pop("optimizer", {})}}
    return {**SMALL, "model": model, "attention": dict(attention), "train": train, **parts}


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Largest logits ``(H)`` that the dense scores have, of each forward of each layer."""
    noted: list[Tensor] = []
    measure = measured.largest_logits

    def noting(q: Tensor, k: Tensor, mask: Any, cut: Any, *, scale: float | None) -> Tensor:
        spread = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q @ spread.mT).double() * (q.shape[-1] ** -0.5 if scale is None else scale)
        hidden = ~mask.visible(q.shape[2], k.shape[2], q.device)
        noted.append(scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3)))
        return measure(q, k, mask, cut, scale=scale)

    monkeypatch.setattr(measured, "largest_logits", noting)
    return noted


def factors(attention: Mapping[str, Any], largest_H: Tensor, tau: float, alpha: float) -> dict[str, Tensor]:
    """Return by hand the factor of each row of the tensors of an attention, by name."""
    groups = attention.get("num_kv_heads", attention["num_heads"])
    gamma_G = (tau / largest_H.view(groups, -1).amax(1)).clamp(max=1.0)

    def of_rows(*parts: tuple[float, int], heads: int) -> Tensor:
        gamma_N1 = gamma_G.repeat_interleave(heads // groups).unsqueeze(1)
        return torch.cat([gamma_N1.pow(power).expand(-1, rows) for power, rows in parts], 1).flatten()

    if attention["use"] == "mla":
        queries = "q_b_proj" if attention.get("q_rank") else "q_proj"
        return {
            f"{queries}.weight": of_rows((alpha, 6), (1.0, 4), heads=4),
            "kv_b_proj.weight": of_rows((1 - alpha, 6), (0.0, 5), heads=4),
        }
    found = {"q_proj": of_rows((alpha, 8), heads=4), "k_proj": of_rows((1 - alpha, 8), heads=groups)}
    return {f"{name}.{tensor}": rows for name, rows in found.items() for tensor in ("weight", "bias")}


@pytest.mark.parametrize("alpha", [0.5, 0.3])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_weights_are_scaled_by_hand(logits: list[Tensor], name: str, alpha: float) -> None:
    attention = ATTENTIONS[name]
    plain = short_run(tree(attention, ABOVE_ALL), 1)
    largest_LH = torch.stack(logits).view(-1, len(LAYERS), logits[0].numel()).amax(0)
    tau = largest_LH.median().item()  # so that some heads are above it, also of those that share a key, and some below
    clipped = short_run(tree(attention, tau, optimizer={"qk_clip_alpha": alpha}), 1)
    (result,) = clipped.results
    assert result.largest_logit == pytest.approx(largest_LH.max().item(), rel=1e-5)
    wanted = dict(plain.last)
    of_an_attention = factors(attention, largest_LH[0], tau, alpha)
    for layer in LAYERS:
        for tensor, factor_R in factors(attention, largest_LH[layer], tau, alpha).items():
            tensor_name = f"layers.{layer}.attention.{tensor}"
            if tensor_name in wanted:
                before = wanted[tensor_name]
                wanted[tensor_name] = (before.double() * factor_R.view(-1, *[1] * (before.dim() - 1))).float()
    changed = [key for key in wanted if not torch.equal(wanted[key], plain.last[key])]
    assert {key.split(".")[-2] for key in changed} == {tensor.split(".")[0] for tensor in of_an_attention}
    for key, weight in wanted.items():
        if key in changed:
            torch.testing.assert_close(clipped.last[key], weight, rtol=1e-5, atol=0)
        else:
            assert torch.equal(clipped.last[key], weight), key


def the_same(assembly: Any, layout: Any) -> Any:
    """Read the same tokens at each step."""
    ids_BS, labels_BS = torch.randint(64, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    return lambda step: [Batch(ids_BS=ids_BS, labels_BS=labels_BS)]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_same_batch_has_logits_at_the_threshold_after_a_clip(name: str) -> None:
    """Of one layer: the tokens of a second one are changed by the clip of the first."""
    spec = tree(ATTENTIONS[name], TAU, lr=1e-12)
    spec["model"] |= {"num_layers": 1, "num_dense_layers": 0}
    before, after = (result.largest_logit or 0.0 for result in short_run(spec, 2, read=the_same).results)
    assert before > 1.2 * TAU
    assert after == pytest.approx(TAU, rel=1e-4)


def test_a_threshold_above_all_logits_changes_no_bit() -> None:
    plain = short_run(tree(MLA, None), 3)
    clipped = short_run(tree(MLA, ABOVE_ALL), 3)
    assert all(torch.equal(clipped.last[name], weight) for name, weight in plain.last.items())
    assert [result.loss for result in clipped.results] == [result.loss for result in plain.results]
    assert plain.results[0].largest_logit is None


MEMORY: Final[Mapping[str, Any]] = {
    "bf16": [{"use": "optimizer-bf16"}],
    "8 bits, on the host": [{"use": "optimizer-8bit", "block": 16}, {"use": "optimizer-offload"}],
    "updated on the host": [{"use": "optimizer-offload", "update": "host"}],
    "recomputed": [{"use": "recompute", "regions": ["attention"]}],
}


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
def test_memory_policies_leave_a_clip_as_it_is(memory: Any) -> None:
    """Policies of states change updates, and not by what a clip scales them."""
    plain, clipped = (short_run(tree(MLA, clip, memory=memory), 1) for clip in (ABOVE_ALL, TAU))
    wanted_plain, wanted = (short_run(tree(MLA, clip), 1) for clip in (ABOVE_ALL, TAU))
    assert clipped.results[0].largest_logit == wanted.results[0].largest_logit
    name = "layers.1.attention.kv_b_proj.weight"
    scales = wanted.last[name] / wanted_plain.last[name]
    assert scales.min() < 0.9
    torch.testing.assert_close(clipped.last[name], plain.last[name] * scales, rtol=1e-5, atol=0)


@frozen(kw_only=True)
class OwnAttention(GroupedQuery):
    """An attention that says nothing of its logits."""

    name: ClassVar[str] = "says-nothing"

    def offers(self, site: Site) -> moefw.Offers:
        return {fact: value for fact, value in super().offers(site).items() if fact != "logits"}


CLIP: Final = {"train": {"optimizer": {"use": "muon", "qk_clip": 100.0}}}


@pytest.mark.parametrize(
    ("attention", "offered"),
    [
        ({}, "gqa offers norms"),
        ({"qk_norm": "all"}, "gqa offers norms"),
        ({"qk_norm": "none", "clip": 8.0}, "gqa offers clip"),
        ({"use": "says-nothing"}, "says-nothing offers unsaid"),
    ],
)
def test_logits_that_do_not_follow_weights_are_refused(attention: dict[str, Any], offered: str) -> None:
    text = json.dumps({**CLIP, "attention": attention})
    with pytest.raises(PlanError) as refused:
        resolved(text, registry=registry(attentions=[OwnAttention]))
    (problem,) = refused.value.problems
    assert problem.where.endswith("train.optimizer.use")
    assert "attention logits in proportion to weights: the optimizer muon clips the logits of a head" in problem.what
    assert offered in problem.what
    assert "gqa with qk_norm: none" in problem.fix


@pytest.mark.parametrize("frozen", [{"train": {"freeze": ["embed.*"]}}, {"adapter": {"use": "lora"}}])
def test_frozen_weights_are_refused(frozen: dict[str, Any]) -> None:
    train = {**CLIP["train"], "weights": "of-no-folder", **frozen.get("train", {})}
    problems = problems_of(json.dumps({"attention": {"qk_norm": "none"}, **frozen, "train": train}))
    assert len(problems) == 1
    assert "muon scales weights of attention to clip logits (QK-Clip), and weights are frozen" in problems[0]
