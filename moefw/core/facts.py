"""Facts, and the offers and needs with which parts agree on them. docs/guides/facts.md says what each fact means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import frozen

from moefw.core.errors import PluginError, nearest

ANY: Final = "any"
"""An offer that meets every need for a fact, for example every row alignment."""

Offers = Mapping[str, Any]
Rule = Literal["multiple", "one of", "some", "some at least", "some dividing", "some like", "all"]
"""How offers and needs settle a fact: see :mod:`moefw.compose.fitting`."""


@frozen
class Fact:
    """A property that parts agree on.

    ``asks`` is the wording of a need in an error, ``rule`` how offers meet needs. ``offered_by`` names the sections of
    a spec that may offer the fact; the machine needs no entry. With ``itemised``, an offer lists items, each identified
    by its first element. ``silence`` is the offer of a part in these sections that states none; None: no offer.
    ``values`` are all that an offer may list; None: parts may agree on others.
    """

    name: str
    asks: str
    rule: Rule
    offered_by: tuple[str, ...] = ()
    itemised: bool = False
    silence: Any = None
    values: tuple[str, ...] | None = None


@frozen
class Need:
    """A need of one part for the others: a fact, the needed value, and the reason that an error prints.

    ``option`` is the option of the asking part that the user may change. The error points to it.
    """

    fact: str
    value: Any
    reason: str
    fix: str = ""
    option: str = ""

    def __attrs_post_init__(self) -> None:
        _check_fact(self.fact, self.value)


def offers(**facts: Any) -> Offers:
    """Checked offers. Raises PluginError for an unknown fact, or a string where a tuple is due."""
    for name, value in facts.items():
        _check_fact(name, value)
    return facts


def need(fact: str, value: Any, *, reason: str, fix: str = "", option: str = "") -> Need:
    """Need. Raises PluginError for an unknown fact, or a string where a tuple is due."""
    return Need(fact=fact, value=value, reason=reason, fix=fix, option=option)


FACTS: Final[Mapping[str, Fact]] = {
    fact.name: fact
    for fact in (
        Fact("row_alignment", "rows aligned to {}", "multiple", ("dispatch",)),
        Fact("rows", "{} rows", "one of", ("dispatch",), values=("ragged", "padded", "static")),
        Fact("repeats", "rows in the same order each time", "all", ("dispatch",), silence=True),
        Fact("budget", "a budget of rows that a second run lifts", "some at least", ("dispatch",)),
        Fact("operand", "{} operands", "one of", ("precision",)),
        Fact("wire", "{} rows on the wire", "one of", ("precision",)),
        Fact("counts", "counts on the {}", "one of", ("dispatch",), values=("host", "device")),
        Fact("axis", "axis {}", "some", ("parallel",), itemised=True),
        Fact("axis_divides", "a size of axis {} that divides {}", "some dividing", ("parallel",), itemised=True),
        Fact("split", "a model that is split along {}", "some", ("model",), itemised=True),
        Fact("core", "attention around the core {}", "one of", ("attention",), values=("sdpa", "flex", "own")),
        Fact("heads", "attention heads that {} ranks share evenly", "multiple", ("attention",)),
        Fact(
            "logits",
            "attention logits in proportion to {}",
            "one of",
            ("attention",),
            silence=("unsaid",),
            values=("weights", "norms", "clip", "unsaid"),
        ),
        Fact("token_ids", "{} token ids", "some at least", ("model",), silence=ANY),
        Fact(
            "partition",
            "routing that looks at one {}",
            "one of",
            ("routing",),
            values=("token", "sequence", "micro_batch", "global_batch", "rank"),
        ),
        Fact("region", "region {} to allow {}", "some", ("model", "attention", "gemm", "optimizer"), itemised=True),
        Fact("update", "an update that is {}", "one of", ("optimizer",), values=("elementwise",)),
        Fact("by_pass", "operands quantized for each pass", "all", ("model", "attention", "gemm"), silence=False),
        Fact("named_products", "GEMMs with recipes of their own", "all", ("model", "attention", "gemm"), silence=False),
        Fact("adapter", "an adapter of {}", "some like", ("model", "attention", "gemm"), itemised=True, silence=()),
        Fact(
            "formula",
            "experts with {}",
            "some",
            ("gemm",),
            silence=("swiglu",),
            values=("swiglu", "clamped_swiglu", "bias"),
        ),
        Fact("activations_kept", "activations that a recipe may save as codes", "all", ("gemm",), silence=False),
        Fact("row_keys", "a key with each row", "all", ("model", "attention", "dispatch", "gemm"), silence=False),
        Fact("layer_losses", "losses over all MoE layers", "all", ("model",), silence=False),
        Fact(
            "replays",
            "the same operators and shapes at every step ({})",
            "one of",
            ("model", "attention", "context_parallel", "routing", "dispatch", "gemm", "precision", "memory"),
            silence=("never",),
            values=("alone", "shared", "never"),
        ),
        Fact("device", "device {}", "one of"),
        Fact("capability", "compute capability {}", "one of"),
        Fact("package", "package {}", "some", itemised=True),
    )
}


def _check_fact(name: str, value: Any) -> None:
    """Raise PluginError for an unknown fact, or a string where a tuple is due."""
    if name not in FACTS:
        raise PluginError(f"{name!r} is not a fact that parts agree on.", nearest(name, FACTS))
    if FACTS[name].rule == "one of" and isinstance(value, str) and value != ANY:
        raise PluginError(f"fact {name} takes a tuple of alternatives, not {value!r}.", f"Write ({value!r},).")
