"""What a part promises (offers), what it asks for (needs), and the facts that both are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import frozen

from moefw.core.errors import PluginError, nearest

ANY: Final = "any"
"""An offer that meets every need for a fact, for example every row alignment."""

NONE: Final = "none"
"""Where a number is offered: that there is none."""

Offers = Mapping[str, Any]
Rule = Literal["multiple", "one of", "some", "some at least", "some dividing", "given", "all"]
"""How a fact settles: see :mod:`moefw.compose.fitting`."""


@frozen
class Fact:
    """A word that parts agree on.

    ``asks`` is how an error says a need, ``rule`` how offers meet needs. ``offered_by`` names the sections of a spec
    that may offer the fact, the machine apart. An offer that is ``itemised`` lists items, each about its first word.
    ``silence`` is what a part of these sections says that says nothing; None: it has no say.
    """

    name: str
    asks: str
    rule: Rule
    offered_by: tuple[str, ...] = ()
    itemised: bool = False
    silence: Any = None


@frozen
class Need:
    """What a part asks of the others: a fact, the value that is needed, and the reason that an error prints.

    ``option`` is the key of the asking part that the user may change, for the error's place.
    """

    fact: str
    value: Any
    reason: str
    fix: str = ""
    option: str = ""

    def __attrs_post_init__(self) -> None:
        _look_at(self.fact, self.value)


def offers(**facts: Any) -> Offers:
    """Return a checked set of promises. Raises PluginError for an unknown fact."""
    for name, value in facts.items():
        _look_at(name, value)
    return facts


def need(fact: str, value: Any, *, reason: str, fix: str = "", option: str = "") -> Need:
    """Return a need. Raises PluginError for an unknown fact."""
    return Need(fact, value, reason, fix, option)


FACTS: Final[Mapping[str, Fact]] = {
    fact.name: fact
    for fact in (
        # rows of an expert's group are a multiple of this
        Fact("row_alignment", "rows aligned to {}", "multiple", ("dispatch",)),
        # ragged: groups end to end; padded: groups of equal size; static: size known beforehand
        Fact("rows", "{} rows", "one of", ("dispatch",)),
        # static rows as a multiple of a balanced rank's: a step that overflows them is run again without the budget
        Fact("budget", "a budget of rows that a second run lifts", "given", ("dispatch",), silence=(NONE,)),
        # the format in which a GEMM gets its operands, and in which rows travel
        Fact("operand", "{} operands", "one of", ("precision",)),
        Fact("wire", "{} rows on the wire", "one of", ("precision",)),
        # where the numbers of rows per expert are known: host, device
        Fact("counts", "counts on the {}", "one of", ("dispatch",)),
        # axes of the layout: that exist, and (axis, size) whose size divides a number
        Fact("axis", "axis {}", "some", ("parallel",), itemised=True),
        Fact("axis_divides", "a size of axis {} that divides {}", "some dividing", ("parallel",), itemised=True),
        # axes along which a model can be split
        Fact("split", "a model that is split along {}", "some", ("model",), itemised=True),
        # how many different token ids a model takes
        Fact("token_ids", "{} token ids", "some at least", ("model",), silence=ANY),
        # the set of tokens that routing looks at: token, sequence, micro_batch, global_batch
        Fact("partition", "routing that looks at one {}", "one of", ("routing",)),
        # (region, mechanism) pairs that memory policies may use
        Fact("region", "region {} to allow {}", "some", ("model", "gemm", "optimizer"), itemised=True),
        # products go through moefw.linear, or quantize for each pass of backward themselves
        Fact("by_pass", "operands quantized for each pass", "all", ("model", "gemm"), silence=False),
        # what backward reads of activations is saved through Precision.keep_activation
        Fact("activations_kept", "activations that a recipe may save as codes", "all", ("gemm",), silence=False),
        # a key of its token comes with every row that an expert or a linear layer gets, if the recipe draws
        Fact("row_keys", "a key with each row", "all", ("model", "dispatch", "gemm"), silence=False),
        # what the machine has
        Fact("device", "device {}", "one of"),
        Fact("capability", "compute capability {}", "one of"),
        Fact("package", "package {}", "some", itemised=True),
    )
}


def _look_at(name: str, value: Any) -> None:
    if name not in FACTS:
        raise PluginError(f"{name!r} is not a fact that parts agree on.", nearest(name, FACTS))
    if FACTS[name].rule == "one of" and isinstance(value, str) and value != ANY:
        raise PluginError(f"fact {name} takes a tuple of alternatives, not {value!r}.", f"Write ({value!r},).")
    str(value)  # one that rests on an option that could not be read fails here, inside the part that says it
