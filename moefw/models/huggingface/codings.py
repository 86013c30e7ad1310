"""Formats of codes in which a folder can be written: of whose weights, and what ``config.json`` says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from moefw.models.huggingface.stored import Coded, Fp8, Mxfp4, Nvfp4


@frozen(kw_only=True)
class Coding:
    """A way to write a folder.

    ``weights`` is a pattern of the tensors that become codes, and ``families`` are those whose models readers of the
    format know. ``cuts_blocks_short``: whether the last block of a row may be smaller. ``config`` returns
    ``quantization_config``, given the modules whose matrices stay values. ``joins``: whether matrices that are
    multiplied with the same rows are encoded together, because servers join them and want one number of all.
    """

    stored: type[Coded]
    weights: str
    families: frozenset[str]
    cuts_blocks_short: bool
    config: Callable[[Sequence[str]], dict[str, Any]]
    joins: bool = False

    def becomes_codes(self, tensor: str) -> bool:
        """Whether a tensor of a folder becomes codes."""
        return re.fullmatch(self.weights, tensor) is not None

    def joined(self, tensor: str) -> str:
        """What servers make of a tensor, if the format ``joins``: the same for all that are encoded together."""
        for pattern, all_of_them in JOINED.items():
            tensor = re.sub(pattern, all_of_them, tensor)
        return tensor


JOINED: Final[Mapping[str, str]] = {
    r"\.(q|k|v)_proj\.": ".qkv_proj.",
    r"\.(q_a_proj|kv_a_proj_with_mqa)\.": ".qkv_a_proj.",
    r"\.(gate|up)_proj\.": ".gate_up_proj.",
    r"\.w[13]\.": ".w13.",
}
"""Matrices that servers such as vLLM join into one."""
MATRICES: Final = r"model\.layers\.\d+\.(self_attn|mlp|block_sparse_moe)\..*(_proj|_proj_with_mqa|w[123])\.weight"
"""Those of attention, MLPs and experts, as in DeepSeek-V3 and Qwen3: no embedding, head, router or ``eh_proj``."""
SEPARATE: Final = frozenset(
    {"qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2"}
)
"""Families whose folders have an expert a tensor."""
ENCODED: Final = SEPARATE | {"llama", "mistral", "qwen2", "qwen3"}
"""Families all of whose matrices are tensors of their own: those with an expert a tensor, and those without experts."""


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


def _nvfp4_config(values: Sequence[str]) -> dict[str, Any]:
    """What ``compressed-tensors`` says of weights in NVFP4 beside activations in bf16."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": Nvfp4.format.columns,
        "symmetric": True,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(values),
    }


CODINGS: Final[Mapping[str, Coding]] = {
    "fp8": Coding(
        stored=Fp8,
        weights=MATRICES,
        families=ENCODED,
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
    "nvfp4": Coding(
        stored=Nvfp4,
        weights=MATRICES,
        families=ENCODED,
        cuts_blocks_short=False,
        config=_nvfp4_config,
        joins=True,
    ),
}
"""By the name of the format, as users write it."""
