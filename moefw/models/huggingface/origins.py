"""Where a file of Hugging Face holds a parameter of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import frozen


@frozen
class Origin:
    """The tensor ``name``, or its piece ``[cut]``, transposed if ``transposed``."""

    name: str
    cut: tuple[Any, ...] = ()
    transposed: bool = False

    def of(self, tensor: Any) -> Any:
        """Return our parameter, a view of the tensor."""
        piece = tensor[self.cut] if self.cut else tensor
        return piece.T if self.transposed else piece


Rule = tuple[str, Callable[..., Origin]]
"""A pattern of our names, and the origin of what matches, a function of the pattern's groups."""


def to(template: str) -> Callable[..., Origin]:
    """Return the rule's function for a whole tensor, whose name has the pattern's groups in it."""
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
)
"""The names that most families share. A family's own rules come first."""


def origin_of(name: str, rules: Sequence[Rule]) -> Origin:
    """Return the origin of our parameter or state ``name``. Raises KeyError if no rule matches."""
    for pattern, origin in rules:
        found = re.fullmatch(pattern, name)
        if found:
            return origin(*found.groups())
    raise KeyError(name)


@frozen
class Family:
    """A family of models: what a configuration says in a spec, and where files hold parameters."""

    sections: Callable[[Any], Mapping[str, Mapping[str, Any]]]
    rules: Sequence[Rule]
