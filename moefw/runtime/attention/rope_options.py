"""Kinds of rotary positions, as options of an attention. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from attrs import field, frozen
from attrs.validators import and_, ge, gt, le, optional

from moefw.core.errors import Problem

OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "linear": {"factor": None},
    "llama3": {"factor": None, "trained_positions": None, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {
        "factor": None,
        "trained_positions": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
        "attention_factor": 0.0,
    },
}
"""The options of each kind, with their defaults. None: the option must be set."""

OPTIONS: Final = tuple(dict.fromkeys(name for options in OWN.values() for name in options))

_positive = optional(gt(0.0))


@frozen(kw_only=True)
class Rope:
    """Rotary positions (arXiv 2104.09864). Each kind but ``default`` stretches positions to a longer context."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    """Kind of stretching, which has its own options. ``linear`` {factor} (arXiv 2306.15595).

    ``llama3`` {factor, trained_positions, low_freq_factor, high_freq_factor}. ``yarn`` {factor, trained_positions,
    beta_fast, beta_slow, truncate, mscale, mscale_all_dim, attention_factor} (arXiv 2309.00071).
    """
    theta: float = field(default=10000.0, validator=gt(1.0))
    """Base of the frequencies: pair i of d/2 turns by ``theta ** (-2 * i / d)`` from a position to the next."""
    pairs: Literal["halves", "neighbours"] = "halves"
    """Values that turn together: (i, i + d/2) in ``halves``, (2i, 2i + 1) as ``neighbours``."""
    partial_rotary_factor: float | None = field(default=None, validator=optional(and_(gt(0.0), le(1.0))))
    """Share of a head's values that turn, the first ones, which are the d of other options; null: all."""
    factor: float | None = field(default=None, validator=optional(ge(1.0)))
    """Length of the longer context, as a multiple of the trained one. All kinds but ``default`` need it."""
    trained_positions: int | None = field(default=None, validator=optional(ge(1)))
    """Number of positions of the trained context, which ``llama3`` and ``yarn`` need."""
    low_freq_factor: float | None = field(default=None, validator=_positive)
    """Number of turns over the trained context up to which ``llama3`` divides a frequency by ``factor``; null: 1."""
    high_freq_factor: float | None = field(default=None, validator=_positive)
    """Number of turns over the trained context from which ``llama3`` keeps a frequency; null: 4.

    It is above ``low_freq_factor``; frequencies between are blended.
    """
    beta_fast: float | None = field(default=None, validator=_positive)
    """Number of turns over the trained context from which ``yarn`` keeps a frequency; null: 32."""
    beta_slow: float | None = field(default=None, validator=_positive)
    """Number of turns over the trained context up to which ``yarn`` divides a frequency by ``factor``; null: 1."""
    truncate: bool | None = None
    """Whether ``yarn`` blends from a whole pair to a whole pair, and not between fractions; null: true."""
    mscale: float | None = field(default=None, validator=optional(ge(0.0)))
    """Weight s of ``0.1 * s * ln(factor) + 1``, which ``yarn`` divides by that of ``mscale_all_dim``; null: 0.

    The quotient is the factor of cosines and sines if both weights are above 0.
    """
    mscale_all_dim: float | None = field(default=None, validator=optional(ge(0.0)))
    """Weight s of ``0.1 * s * ln(factor) + 1``, by whose square ``yarn`` multiplies scores; null: 0. DeepSeek-V3."""
    attention_factor: float | None = field(default=None, validator=_positive)
    """Factor of ``yarn``'s cosines and sines.

    null: that of ``mscale`` and ``mscale_all_dim``, or ``0.1 * ln(factor) + 1`` without them (arXiv 2309.00071 eq. 22).
    """

    def turning(self, width: int) -> int:
        """Number of values that turn, of a head of ``width``."""
        return width if self.partial_rotary_factor is None else int(width * self.partial_rotary_factor)

    def option(self, name: str) -> Any:
        """Option of this kind: as set, else its default."""
        value = getattr(self, name)
        return OWN[self.kind][name] if value is None else value

    @property
    def length_factor(self) -> float:
        """The factor of cosines and sines: 1, or yarn's ``0.1 ln(factor) + 1`` (arXiv 2309.00071 eq. 22)."""
        if self.kind != "yarn":
            return 1.0
        attention_factor = self.option("attention_factor")
        if attention_factor:
            return float(attention_factor)
        mscale = self.option("mscale")
        mscale_all_dim = self.option("mscale_all_dim")
        if mscale and mscale_all_dim:
            return self._mscale(mscale) / self._mscale(mscale_all_dim)
        return self._mscale(1.0)

    @property
    def score_factor(self) -> float:
        """The factor of attention scores: 1, or the square of yarn's for ``mscale_all_dim`` (DeepSeek-V3)."""
        if self.kind != "yarn":
            return 1.0
        return self._mscale(self.option("mscale_all_dim")) ** 2

    def _mscale(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.option("factor")) + 1.0


def check_rope(rope: Rope, width: int, width_name: str) -> Iterator[Problem]:
    """Yield the problems of options for heads of ``width`` values."""
    turning = rope.turning(width)
    if turning % 2 and turning == width:
        problem = f"{width_name} {width} is odd, and RoPE turns pairs of values."
        yield Problem(problem, "Use an even size.", width_name)
    elif turning % 2 or not turning:
        problem = f"of {width_name} {width} {turning} values turn, and RoPE turns pairs of values."
        yield Problem(problem, f"Use 2 / {width}, or a multiple of it.", "rope.partial_rotary_factor")
    own_options = OWN[rope.kind]
    for name in OPTIONS:
        is_set = getattr(rope, name) is not None
        if is_set and name not in own_options:
            names = f"which has {', '.join(own_options)}" if own_options else "which has none"
            yield Problem(f"{name} is no option of rope kind {rope.kind}, {names}.", "Leave it out.", f"rope.{name}")
        elif not is_set and name in own_options and own_options[name] is None:
            yield Problem(f"rope kind {rope.kind} needs {name}.", f"Set rope.{name}.", "rope")
    if rope.kind == "llama3" and rope.option("low_freq_factor") >= rope.option("high_freq_factor"):
        problem = "low_freq_factor is not below high_freq_factor, between which frequencies are blended."
        yield Problem(problem, "Use for example 1.0 and 4.0.", "rope.low_freq_factor")
