"""Options of ``use: topk`` and their checks. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from attrs import field, frozen
from attrs.validators import and_, ge, gt, lt, optional

from moefw.core.errors import Problem
from moefw.core.site import Dims

OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "expert_bias": {"rate": 1e-3},
    "aux_loss": {"coeff": 1e-2, "over": "micro_batch"},
    "z_loss": {"coeff": 1e-2},
    "quantile": {"ema": 0.9},
}
"""The options of each kind of balance rule, with their defaults."""
OVER_MODEL: Final = "aux_loss over model"
"""The level of the rule that pools all layers."""


@frozen(kw_only=True)
class Balance:
    """One rule that balances the load of experts. Each kind has its own options."""

    kind: Literal["expert_bias", "aux_loss", "z_loss", "quantile"]
    """Kind of rule.

    ``expert_bias`` {rate}: a bias on the scores that is updated once per step, without gradient (DeepSeek-V3, arXiv
    2412.19437 section 2.1.2). ``aux_loss`` {coeff, over}: the Switch loss (arXiv 2101.03961). ``z_loss`` {coeff} (arXiv
    2202.08906). ``quantile`` {ema}: a bias that would have given each expert its fair share, set once per step.
    """
    rate: float | None = field(default=None, validator=optional(ge(0.0)))
    """Change of an expert's bias in a step of ``expert_bias``; null: 0.001."""
    coeff: float | None = field(default=None, validator=optional(ge(0.0)))
    """Factor of the loss of ``aux_loss`` or ``z_loss``; null: 0.01."""
    over: Literal["micro_batch", "sequence", "global_batch", "model"] | None = None
    """Tokens of ``aux_loss``: those of a micro-batch or of each sequence; null: ``micro_batch``.

    ``global_batch``: against the load of the last whole global batch, one step late on purpose, so that nothing is
    exchanged in forward and no split of the batch changes it. ``model``: the loss of ``transformers``, over all layers
    of a micro-batch together: ``coeff`` is ``router_aux_loss_coef``, and equally loaded experts make it top_k, the
    others 1.
    """
    ema: float | None = field(default=None, validator=optional(and_(ge(0.0), lt(1.0))))
    """Share of its earlier bias that ``quantile`` keeps in a step; null: 0.9."""

    def option(self, name: str) -> Any:
        """Option of this rule's kind: as set, else its default."""
        value = getattr(self, name)
        return OWN[self.kind][name] if value is None else value

    @property
    def level(self) -> str:
        """The rule in words. No two rules may have the same words."""
        if self.kind == "aux_loss":
            return f"aux_loss over {self.option('over')}"
        return self.kind


@frozen(kw_only=True)
class Groups:
    """Experts in ``count`` equal groups, of which a token uses the ``keep`` best (DeepSeek-V3 section 2.1.2)."""

    count: int = field(validator=ge(1))
    """Number of groups; it divides ``model.num_experts``."""
    keep: int = field(validator=ge(1))
    """Number of groups that a token uses."""
    best: int | None = field(default=None, validator=optional(ge(1)))
    """Number of a group's best experts, the sum of which scores the group; null: top_k / keep."""


@frozen(kw_only=True)
class Capacity:
    """The most choices that an expert takes: ``ceil(T * K / E * factor)`` of T tokens, those of ``over``.

    The others are dropped; the remaining weights do not change. Evaluation and generation drop nothing (DeepSeek-V2,
    arXiv 2405.04434 section 2.1.4).
    """

    factor: float = field(validator=gt(0.0))
    """Capacity of an expert, as a multiple of its fair share of the choices."""
    drop: Literal["probs", "position"] = "probs"
    """Choices that are kept: ``probs``, those with the largest weights, or ``position``, those of the first tokens."""
    pad: bool = False
    """Whether every expert gets exactly this number of rows from each rank. Not with ``over: micro_batch``."""
    over: Literal["rank", "micro_batch"] = "rank"
    """Tokens T: a rank's of a micro-batch, or those of the whole micro-batch, which ranks of cp and tp share.

    The latter is full-sequence dropping (arXiv 2504.14960): no split of the micro-batch changes what is dropped.
    """


@frozen(kw_only=True)
class Options:
    """The options that the router and its memory depend on: see :class:`moefw.plugins.routers.topk.TopK`."""

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Score of an expert. ``softmax``: experts compete by logits, and weights are the softmax over the chosen ones.

    ``sigmoid`` or ``sqrtsoftplus`` (the root of softplus): weights are the chosen scores.
    """
    pre_softmax: bool | None = None
    """Whether ``score: softmax`` is over all experts, before the choice, and not renormalised; null: false."""
    renormalise: bool | None = None
    """Whether chosen scores other than softmax are divided by their sum; null: if top_k is above 1."""
    scale: float = field(default=1.0, validator=gt(0.0))
    """Factor of the weights."""
    bias: bool = False
    """Whether logits have a learned bias."""
    groups: Groups | None = None
    """Groups of experts, to the best of which a token is limited; null: all experts are one."""
    balance: tuple[Balance, ...] = ()
    """Rules that balance the load of experts."""
    capacity: Capacity | None = None
    """Limit of an expert's choices; null: it takes all."""
    jitter: float = field(default=0.0, validator=and_(ge(0.0), lt(1.0)))
    """Half-width eps of the random numbers, from 1-eps to 1+eps, by which training multiplies the router's input."""
    dtype: Literal["fp32", "fp64"] = "fp32"
    """Dtype of the gating GEMM and of all scores."""

    def renormalised(self, top_k: int) -> bool:
        """Whether chosen scores other than softmax are divided by their sum."""
        if self.renormalise is None:
            return top_k > 1
        return self.renormalise


def check_options(rules: Sequence[Balance]) -> Iterator[Problem]:
    """Yield a problem for each option of a rule that belongs to another kind."""
    for index, rule in enumerate(rules):
        for name in ("rate", "coeff", "over", "ema"):
            value = getattr(rule, name)
            if value is not None and name not in OWN[rule.kind]:
                own = " and ".join(OWN[rule.kind])
                what = f"{name} {value} is no option of balance kind {rule.kind}, which has {own}."
                yield Problem(what, "Leave it out, or use another kind.", f"balance[{index}].{name}")


def check_rules(score: str, rules: Sequence[Balance]) -> Iterator[Problem]:
    """Yield the problems of rules: duplicates, conflicts with other rules or with the score."""
    kinds = {rule.kind for rule in rules}
    levels = [rule.level for rule in rules]
    for level in sorted({level for level in levels if levels.count(level) > 1}):
        yield Problem(f"balance names {level} more than once.", "Keep one.", "balance")
    if "quantile" in kinds:
        for rival in sorted(kinds & {"aux_loss", "expert_bias"}):
            what = f"quantile and {rival} both balance: quantile already gives every expert its fair share."
            yield Problem(what, f"Keep quantile or {rival}.", "balance")
    if "expert_bias" in kinds and score == "softmax":
        what = "an expert bias is added to scores that do not depend on each other, and score: softmax has none."
        yield Problem(what, "Use score: sigmoid or sqrtsoftplus, or balance by aux_loss.", "balance")


def check_stages(stages: int, rules: Sequence[Balance]) -> Iterator[Problem]:
    """Yield a problem of a loss that pools layers of several pipeline stages."""
    if stages > 1 and OVER_MODEL in {rule.level for rule in rules}:
        what = f"a loss over the model pools the routings of all layers, and {stages} pipeline stages split them."
        yield Problem(what, "Use pp: 1, or over: micro_batch.", "balance")


def check_quantile(dims: Dims, groups: Groups | None, rules: Sequence[Balance]) -> Iterator[Problem]:
    """Yield problems of quantile, whose threshold is a token's best score not chosen, among all experts."""
    if "quantile" not in {rule.kind for rule in rules}:
        return
    if dims.top_k >= dims.num_experts:
        what = f"balance kind quantile needs an expert that is not chosen; top_k is {dims.top_k} of {dims.num_experts}."
        yield Problem(what, "Use a smaller model.top_k, or leave quantile out.", "balance")
    if groups is not None:
        what = "balance kind quantile compares all experts, and groups take some out of a token's reach."
        yield Problem(what, "Leave groups out, or balance by aux_loss.", "groups")


def check_groups(dims: Dims, groups: Groups) -> Iterator[Problem]:
    """Yield problems of groups that are unequal, or too small to choose from and to score a group by."""
    experts = dims.num_experts
    k = dims.top_k
    count = groups.count
    keep = groups.keep
    if experts % count:
        what = f"{experts} experts do not divide into {count} groups."
        yield Problem(what, "Use a divisor of model.num_experts.", "groups.count")
        return
    if keep > count:
        yield Problem(f"{keep} groups of {count} cannot be kept.", f"Use at most {count}.", "groups.keep")
        return
    group_size = experts // count
    if groups.best is None and k % keep:
        what = f"a group is scored by its best top_k / keep experts, and keep {keep} does not divide top_k {k}."
        yield Problem(what, "Use a divisor of model.top_k, or set groups.best.", "groups.keep")
    elif groups.best is not None and groups.best > group_size:
        what = f"a group of {group_size} experts cannot be scored by its best {groups.best}."
        yield Problem(what, f"Use at most {group_size}.", "groups.best")
    elif k > keep * group_size:
        what = f"{keep} groups of {group_size} experts have {keep * group_size}, and top_k is {k}."
        yield Problem(what, "Keep more groups, or lower model.top_k.", "groups.keep")


def check_capacity(capacity: Capacity, rules: Sequence[Balance]) -> Iterator[Problem]:
    """Yield a problem of padding to a capacity that is not that of a rank, and for each rule that sets a bias.

    A bias would chase a load that the capacity has cut.
    """
    if capacity.pad and capacity.over != "rank":
        yield Problem(
            "capacity.pad gives each expert as many rows of every rank, and capacity.over micro_batch counts them over "
            "all ranks.",
            "Use capacity.over: rank, or capacity.pad: false.",
            "capacity.over",
        )
    for kind in sorted({rule.kind for rule in rules} & {"expert_bias", "quantile"}):
        what = f"capacity drops choices, and balance kind {kind} counts on every choice being served."
        yield Problem(what, f"Leave capacity or {kind} out; aux_loss goes with capacity.", "capacity")
