"""Where a file of Hugging Face holds a parameter of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from attrs import frozen


@frozen
class Origin:
    """The tensor ``name``, its piece ``[cut]``, of that the first or second half, transposed if ``transposed``."""

    name: str
    cut: tuple[Any, ...] = ()
    half: Literal[0, 1] | None = None
    transposed: bool = False

    def of(self, tensor: Any) -> Any:
        """Our parameter, a view of the tensor."""
        piece = tensor[self.cut] if self.cut else tensor
        if self.half is not None:
            piece = piece.chunk(2, 0)[self.half]
        return piece.T if self.transposed else piece


Rule = tuple[str, Callable[..., Origin]]
"""A pattern of our names, and the origin of what matches, a function of the pattern's groups."""


def to(template: str) -> Callable[..., Origin]:
    """The rule's function for a whole tensor, whose name has the pattern's groups in it."""
    return lambda *groups: Origin(template.format(*groups))


DECODER: Final[Sequence[Rule]] = (
    (r"embed\.weight", to("model.embed_tokens.weight")),
    (r"norm\.weight", to("model.norm.weight")),
    (r"head\.weight", to("lm_head.weight")),
    (r"layers\.(\d+)\.attention_norm\.weight", to("model.layers.{}.input_layernorm.weight")),
    (r"layers\.(\d+)\.mlp_norm\.weight", to("model.layers.{}.post_attention_layernorm.weight")),
    (r"layers\.(\d+)\.attention\.(.*)", to("model.layers.{}.self_attn.{}")),
    (r"layers\.(\d+)\.mlp\.(.*)", to("model.layers.{}.mlp.{}")),
    (r"layers\.(\d+)\.moe\.router\.weight", to("model.layers.{}.mlp.gate.weight")),
    (r"layers\.(\d+)\.moe\.experts\.(\d+)\.(.*)", to("model.layers.{}.mlp.experts.{}.{}")),
    (
        r"layers\.(\d+)\.moe\.experts\.(\d+)\.(gate|up)_proj\.weight",
        lambda layer, expert, part: Origin(
            f"model.layers.{layer}.mlp.experts.gate_up_proj", (int(expert),), half=0 if part == "gate" else 1
        ),
    ),
    (
        r"layers\.(\d+)\.moe\.experts\.(\d+)\.down_proj\.weight",
        lambda layer, expert: Origin(f"model.layers.{layer}.mlp.experts.down_proj", (int(expert),)),
    ),
)
"""The names that most families share, those of stacked experts last. A family's own rules come first."""


def origins_of(name: str, rules: Sequence[Rule]) -> Iterator[Origin]:
    """Yield the places that may hold our parameter or state ``name``, the usual one first."""
    for pattern, origin in rules:
        match = re.fullmatch(pattern, name)
        if match:
            yield origin(*match.groups())


def origin_of(name: str, rules: Sequence[Rule]) -> Origin:
    """Usual place of our parameter or state ``name``. Raises KeyError if there is none."""
    for origin in origins_of(name, rules):
        return origin
    raise KeyError(name)


@frozen
class Family:
    """A family of models: what a configuration says in a spec, and where files hold parameters."""

    sections: Callable[[Any], Mapping[str, Mapping[str, Any]]]
    rules: Sequence[Rule]
