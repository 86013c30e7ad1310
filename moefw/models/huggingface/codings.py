"""Formats of codes in which a folder can be written: of whose weights, and what ``config.json`` says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from moefw.models.huggingface.folder import Coded, Fp8, Mxfp4


@frozen(kw_only=True)
class Coding:
    """A way to write a folder.

    ``weights`` is a pattern of the tensors that become codes, and ``families`` are those whose models readers of the
    format know. ``cuts_blocks_short``: whether the last block of a row may be smaller. ``config`` returns
    ``quantization_config``, given the modules whose matrices stay values.
    """

    stored: type[Coded]
    weights: str
    families: frozenset[str]
    cuts_blocks_short: bool
    config: Callable[[Sequence[str]], dict[str, Any]]

    def becomes_codes(self, tensor: str) -> bool:
        """Whether a tensor of a folder becomes codes."""
        return re.fullmatch(self.weights, tensor) is not None


def _fp8_config(values: Sequence[str]) -> dict[str, Any]:
    """What DeepSeek-V3 says of its weights, and the modules that Qwen3 names besides."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [Fp8.format.rows, Fp8.format.columns],
        "modules_to_not_convert": list(values),
    }


def _mxfp4_config(values: Sequence[str]) -> dict[str, Any]:
    """What gpt-oss says, whose experts are the only codes."""
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"quant_method": "mxfp4", "modules_to_not_convert": others}


CODINGS: Final[Mapping[str, Coding]] = {
    "fp8": Coding(
        stored=Fp8,
        # Matrices of attention, MLPs and experts, as in DeepSeek-V3 and Qwen3: no embedding, head, router or eh_proj.
        weights=r"model\.layers\.\d+\.(self_attn|mlp|block_sparse_moe)\..*(_proj|_proj_with_mqa|w[123])\.weight",
        families=frozenset({"qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3"}),
        cuts_blocks_short=True,
        config=_fp8_config,
    ),
    "mxfp4": Coding(
        stored=Mxfp4,
        weights=r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj",
        families=frozenset({"gpt_oss"}),
        cuts_blocks_short=False,
        config=_mxfp4_config,
    ),
}
"""By the name of the format, as users write it."""
