"""The page of facts, which ``moefw plugins --facts`` prints: the words of ``offers`` and ``needs``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from moefw.core.facts import ANY, FACTS, Fact, Rule

HEAD = """# Facts

The words that `offers` and `needs` of a plugin may use. Written by `moefw plugins --facts`; a test compares.

`moefw.offers(rows=("ragged", "padded"))` offers, `moefw.need("rows", ("ragged",), reason=...)` needs. Parts of the
sections under *offered by* offer a fact, any part may need it. Such a part that does not mention it offers what stands
under *unsaid*. Needs of a fact that nothing offers are unmet. `context.facts[FACT]`, in `build`, is the value on which
the parts of a layer agree.
"""

MEANINGS: Final[Mapping[str, str]] = {
    "row_alignment": "a number: the rows of each expert's group are a multiple of it",
    "rows": "`ragged`: groups of any size; `padded`: of a capacity at least; `static`: their sum is known beforehand",
    "repeats": "equal calls bring an expert's rows in the same order, (source rank, token)",
    "budget": "a number: static rows over those of a balanced rank; a step with more runs again without a budget",
    "operand": "formats of the operands of GEMMs: `fp32`, `bf16`, or codes that multiply themselves, such as `fp8`",
    "wire": "formats of rows on their way to experts: `fp32`, `bf16`, `fp8`",
    "counts": "where the numbers of rows of each expert are known: `host`, `device`",
    "axis": "axes: `pp`, `dp`, `cp`, `tp`, `edp`, `ep`, `etp`. The plan of the layout offers them",
    "axis_divides": "pairs of an axis and its size, or in a need the number to divide; offered in the same way",
    "split": "axes along which a model can be split: `pp`, `cp`, `tp`",
    "core": "what computes attention in the hands of `context.core`: `sdpa`, `flex`, or scores of an attention's `own`",
    "heads": "a number: the heads of an attention; a need is how many ranks share them evenly",
    "logits": "what attention logits are in proportion to: `weights`, the rows that `Attention.logit_rows` names; "
    "`norms` or a `clip` of queries and keys, which take the scale of weights away",
    "token_ids": "a number: how many token ids a model accepts",
    "partition": "tokens on which a routing depends: of a `token`, `sequence`, `micro_batch`, `global_batch` or `rank`",
    "region": 'pairs (region, mechanism) that memory policies may use: `("experts", "offload")`',
    "update": "`elementwise`: rows or columns of a parameter that are updated alone get the bits of the whole. A "
    "`region` of the optimizer promises it, too",
    "by_pass": "GEMMs go through `moefw.linear`, or quantize for each pass of backward themselves",
    "named_products": "each GEMM has a recipe of its own, `Precision.at(name, groups=...)`, that may remember steps",
    "formula": "what experts compute: `swiglu`, `clamped_swiglu`, and `bias` if they can have biases (`moefw.Dims`)",
    "activations_kept": "activations that backward reads are saved through `Precision.keep_activation`",
    "adapter": "names of weights with whose adapters a part multiplies, `attention.q_proj`; a need is a pattern of one",
    "row_keys": "each row that a GEMM gets comes with the key of its token, if the recipe draws random numbers",
    "layer_losses": "the model's losses include those that `Router.over_layers` makes of all layers' `Routing.pooled`",
    "replays": "where a part runs the same operators on the same shapes whatever the values, and the host reads none, "
    "so that `train.graphs` replays it: `alone` (a rank with all experts), `shared` (ranks that share them), `never`",
    "device": "device types: `cpu`, `cuda`",
    "capability": "compute capabilities of a GPU: `9.0`",
    "package": "a package that is installed, or a part of one",
}
"""The values of each fact, and what they mean."""

SETTLED: Final[Mapping[Rule, tuple[str, str, str]]] = {
    "multiple": (
        "a tuple of numbers, or `moefw.ANY`",
        "a number",
        "a number in every offer is a multiple of all needs; the smallest is taken",
    ),
    "one of": (
        "a tuple, or `moefw.ANY`",
        "a tuple",
        "an alternative is in every offer and every need; the first in the needs is taken, then in the offers",
    ),
    "some": ("a tuple of items", "an item", "some offer has the item"),
    "some at least": ("a tuple of one number", "a number", "some offer is at least as large"),
    "some like": ("a tuple of names", "a pattern", "some offer has a name that matches it; `*` is any characters"),
    "some dividing": ("a tuple of pairs", "a pair", "the axis has a size that divides the number"),
    "all": ("`True` or `False`", "`True`", "every part offers `True`"),
}
"""By rule: what an offer is, what a need is, and when they fit."""


def page() -> Iterator[str]:
    """Yield docs/guides/facts.md in pieces, which newlines join."""
    yield HEAD
    yield "| fact | offered by | rule | values | unsaid |\n|---|---|---|---|---|"
    for name, fact in FACTS.items():
        sections = ", ".join(fact.offered_by) or "the machine"
        yield f"| `{name}` | {sections} | {fact.rule} | {MEANINGS[name]} | {_unsaid(fact)} |"
    yield "\n| rule | an offer is | a need is | they fit if |\n|---|---|---|---|"
    for rule, words in SETTLED.items():
        yield f"| {rule} | {' | '.join(words)} |"


def _unsaid(fact: Fact) -> str:
    if fact.silence is None:
        return ""
    return "`moefw.ANY`" if fact.silence == ANY else f"`{fact.silence}`"
