"""Every dispatcher, GEMM, recipe, policy and layout computes what ``transformers`` does, under two unlike families."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from hf_models import VOCABULARY, theirs
from hf_steps import Step, Tokens, our_step, their_step
from moefw.models.huggingface.families import FAMILIES
from moefw.models.huggingface.origins import origin_of
from moefw.testing.combinations import usable_here
from moefw.testing.fit import Fit
from moefw.testing.pool import RankPool
from moefw.testing.variants import Variant
from pairwise import deep, each_value

SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_experts_per_tok": 2, "initializer_range": 0.2},
}
ALL_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"num_experts_per_tok": 8},
    "deepseek_v3": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
}
"""With these, rounding changes no choice."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"num_local_experts": 8, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5},
    "deepseek_v3": {
        **{"n_routed_experts": 8, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
        **{"num_key_value_heads": 4, "first_k_dense_replace": 1},
    },
}
REGIONS = {"gpt_oss": ("qkv", "core_attn", "attn_proj"), "deepseek_v3": ("mla_up_proj", "core_attn", "attn_proj")}
SECTIONS = ("dispatch", "gemm", "precision", "memory", "parallel")
SEQUENCES, POSITIONS = 4, 12
ENOUGH = 8.0
"""A budget that holds all rows, as no engine is here that would run a step again."""


@cache
def here() -> Fit:
    """Return all parts but routers, which a family has."""
    return usable_here(fixed={"routing": {"use": "topk"}})


@cache
def saved(family: str, all_experts: bool) -> tuple[Path, Tokens, Step]:
    """Return a saved model, tokens, and what ``transformers`` computes of them."""
    folder = Path(tempfile.mkdtemp())
    oracle = theirs(family, {**SIZES, **MODELS[family], **(ALL_EXPERTS[family] if all_experts else {})})
    oracle.save_pretrained(folder)
    ids = torch.randint(VOCABULARY, (SEQUENCES, POSITIONS + 1), generator=torch.Generator().manual_seed(0))
    tokens = Tokens(ids_BS=ids[:, :-1], labels_BS=ids[:, 1:], lengths=((POSITIONS,),) * SEQUENCES)
    return folder, tokens, their_step(oracle, tokens)


def difference(
    pool: RankPool, family: str, sections: Mapping[str, Any], world: int, *, all_experts: bool
) -> tuple[float, float]:
    """Return the error of all gradients over their norm, or of the loss if that is larger; and the gradients' cosine."""
    folder, tokens, wanted = saved(family, all_experts)
    train = {"tokens_per_step": 16 * 12, "micro_batch": 1, "seq_len": 16}
    steps = pool.run(our_step, world, folder, tokens, {**sections, "train": train})
    mine, theirs = [], []
    for name, grad in {name: grad for step in steps for name, grad in step.grads.items()}.items():
        origin = origin_of(name, FAMILIES[family].rules)
        mine.append(grad.double().flatten())
        theirs.append(origin.of(wanted.grads[origin.name]).double().flatten())
    got, right = torch.cat(mine), torch.cat(theirs)
    off = max(float((got - right).norm() / right.norm()), abs(steps[0].loss - wanted.loss) / wanted.loss)
    return off, float(got @ right / (got.norm() * right.norm()))


def check(pool: RankPool, family: str, parts: Mapping[str, Variant]) -> None:
    """Check a combination of parts. With recipes, gradients are off by noise, and point where they should."""
    if family == "gpt_oss" and "shared_experts" in parts["memory"].regions:
        return
    sections = {section: parts[section].choice for section in SECTIONS}
    if "rank_capacity" in sections["dispatch"]:
        sections["dispatch"] = {**sections["dispatch"], "rank_capacity": ENOUGH}
    is_exact = parts["precision"].label == "fp32"
    off, cosine = difference(pool, family, sections, parts["parallel"].world, all_experts=not is_exact)
    assert off <= (1e-5 if is_exact else 2 * sum(part.rtol for part in parts.values())), parts
    assert cosine >= 0.5, parts


# Layouts take longest. Some are drawn below, and others equal one rank elsewhere.
@pytest.mark.parametrize(
    ("section", "family"),
    [
        *each_value(SECTIONS[:-1], MODELS),
        *(pytest.param("parallel", family, marks=pytest.mark.deep) for family in MODELS),
    ],
)
def test_each_part_computes_what_transformers_does(pool: RankPool, family: str, section: str) -> None:
    for variant in here().sections[section]:
        parts = here().company(variant)
        assert parts is not None
        check(pool, family, parts)


@pytest.mark.parametrize("examples", [4, *deep(200)])
@pytest.mark.parametrize("family", MODELS)
def test_so_do_parts_together(pool: RankPool, family: str, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        parts = {name: data.draw(st.sampled_from(list(ways))) for name, ways in here().sections.items()}
        assume(here().refusal(parts) is None)
        check(pool, family, parts)

    run()


@pytest.mark.parametrize(
    ("where", "way"),
    each_value([(family, region) for family in REGIONS for region in REGIONS[family]], ["recompute", "offload"]),
)
def test_so_does_an_attention_under_memory_policies(pool: RankPool, where: tuple[str, str], way: str) -> None:
    family, region = where
    sections = {"memory": [{"use": way, "regions": [region]}], "parallel": {"dense": {"tp": 2}, "experts": {"ep": 2}}}
    assert difference(pool, family, sections, 2, all_experts=False)[0] <= 1e-5
