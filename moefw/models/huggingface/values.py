"""The values that keys of a configuration may have: one table for all families, held against it before any is used."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from attrs import frozen

from moefw.models.sizes import MOST, WIDEST

FARTHEST: Final = 2**40
"""The most positions, a hundred thousand times as many as any model has. Larger values are mistakes."""
LARGEST: Final = 1e38
"""The largest number that is no size; fp32 holds hardly larger ones."""


@frozen
class Kind:
    """Values of one type and range: in words, and as a test of a value."""

    words: str
    holds: Callable[[Any], bool]


def _whole(least: int, most: int) -> Kind:
    words = f"a whole number from {least} to {most:,} (no model has more)"
    return Kind(words, lambda value: type(value) is int and least <= value <= most)


def _above(least: float) -> Kind:
    # A comparison is false for NaN, and exact for whole numbers that no float can hold.
    return Kind(
        f"a number above {least:g} and at most {LARGEST:g}",
        lambda value: type(value) in (int, float) and least < value <= LARGEST,
    )


def _from(least: float) -> Kind:
    return Kind(
        f"a number from {least:g} to {LARGEST:g}",
        lambda value: type(value) in (int, float) and least <= value <= LARGEST,
    )


def _list_of(words: str, holds: Callable[[Any], bool]) -> Kind:
    return Kind(
        f"a list of at most {MOST:,} {words}",
        lambda value: type(value) is list and len(value) <= MOST and all(map(holds, value)),
    )


_SIZE: Final = _whole(1, WIDEST)
_COUNT: Final = _whole(1, MOST)
_COUNT_OR_ZERO: Final = _whole(0, MOST)
_POSITIONS: Final = _whole(1, FARTHEST)
_SHARE: Final = Kind("a number above 0 and at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1)
_FLAG: Final = Kind("true or false", lambda value: type(value) is bool)
_NAME: Final = Kind("a name", lambda value: type(value) is str)
_OPTIONS: Final = Kind("a mapping of options", lambda value: type(value) is dict)
_ATTENTIONS: Final = ("full_attention", "sliding_attention")

KINDS: Final[Mapping[str, Kind]] = {
    "vocab_size": _whole(2, WIDEST),
    "pad_token_id": _whole(0, WIDEST),
    **dict.fromkeys(
        (
            *("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "qk_head_dim"),
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        ),
        _SIZE,
    ),
    "shared_expert_intermediate_size": _whole(0, WIDEST),
    **dict.fromkeys(
        (
            *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok"),
            *("num_experts", "num_local_experts", "n_routed_experts", "n_group", "topk_group", "decoder_sparse_step"),
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            *("n_shared_experts", "first_k_dense_replace", "max_window_layers"),
            *("num_nextn_predict_layers", "num_mtp_layers"),
        ),
        _COUNT_OR_ZERO,
    ),
    "max_position_embeddings": _POSITIONS,
    "sliding_window": _whole(0, FARTHEST),  # transformers writes 0 where no layer has a window
    **dict.fromkeys(
        (
            *("tie_word_embeddings", "attention_bias", "qkv_bias", "norm_topk_prob"),
            *("use_sliding_window", "rope_interleave", "use_qk_norm"),
        ),
        _FLAG,
    ),
    "layer_types": _list_of(" or ".join(_ATTENTIONS), lambda item: item in _ATTENTIONS),
    "attn_type_list": _list_of("numbers, 0 or 1", lambda item: type(item) is int and item in (0, 1)),
    "mlp_only_layers": _list_of("numbers of layers", _COUNT_OR_ZERO.holds),
    **dict.fromkeys(("rms_norm_eps", "swiglu_limit", "swiglu_alpha", "clip_qkv", "routed_scaling_factor"), _above(0.0)),
    "router_aux_loss_coef": _from(0.0),
    "rope_theta": _above(1.0),
    "partial_rotary_factor": _SHARE,
    "rotary_dim": _SIZE,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _OPTIONS),
}
"""What each key may be, if it is not null. Others are compared with the few values that are supported."""

ROPE_KINDS: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("rope_type", "type"), _NAME),
    "rope_theta": _above(1.0),
    "partial_rotary_factor": _SHARE,
    "factor": _from(1.0),
    "original_max_position_embeddings": _POSITIONS,
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _above(0.0)),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"), _from(0.0)),
    "truncate": _FLAG,
}
"""What each option in ``rope_parameters`` and ``rope_scaling`` may be, if it is not null."""


def wrong_values(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key whose value is of the wrong type or size, and what is wrong with it."""
    for name, value in config.items():
        yield from ((name, what) for what in _wrong(name, value, KINDS))
        if name in ("rope_parameters", "rope_scaling") and type(value) is dict:
            for option, inner in value.items():
                yield from ((name, f"{name}.{what}") for what in _wrong(option, inner, ROPE_KINDS))


def _wrong(name: str, value: Any, kinds: Mapping[str, Kind]) -> Iterator[str]:
    if value is not None and name in kinds and not kinds[name].holds(value):
        yield f"{name} {shown(value)} is not {kinds[name].words}."


def shown(value: object) -> str:
    """Value of a configuration as an error prints it: short, and in one line."""
    return reprlib.repr(value)
