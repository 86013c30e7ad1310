"""Decoders without experts, to be trained as they are or upcycled: Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moefw.models.huggingface.config import Keys, Sections, dense_decoder_of, heads_of, rope_of, windows_of
from moefw.models.huggingface.origins import DECODER, Family


def _sections(keys: Keys, **attention: Any) -> Sections:
    """Sections of a spec that describe the model of a configuration. ``attention``: options of the family alone."""
    model = dense_decoder_of(keys)
    eps = keys.take("rms_norm_eps", default=1e-6)
    layers = {"num_dense_layers": model["num_layers"], "dense_dim": keys.take("intermediate_size")}
    return {
        "model": {**model, **layers, "norm_eps": eps},
        "attention": {**heads_of(keys), "rope": rope_of(keys), "norm_eps": eps, "qk_norm": "none", **attention},
    }


def _llama(keys: Keys) -> Sections:
    keys.only("mlp_bias", False, default=False)
    bias = keys.take("attention_bias", default=False)
    return _sections(keys, qkv_bias=bias, out_bias=bias)


def _mistral(keys: Keys) -> Sections:
    unset = None if keys.has("sliding_window") else 4096
    return _sections(keys, window=keys.take("sliding_window", default=unset))


def _qwen2(keys: Keys) -> Sections:
    return _sections(keys, qkv_bias=True, **_windows(keys))


def _qwen3(keys: Keys) -> Sections:
    bias = keys.take("attention_bias", default=False)
    return _sections(keys, qk_norm="head", qkv_bias=bias, out_bias=bias, **_windows(keys))


def _windows(keys: Keys) -> dict[str, Any]:
    """Which layers have a window: by default those from ``max_window_layers`` on, if ``use_sliding_window``."""
    windowed = keys.take("use_sliding_window", default=False)
    window = keys.take("sliding_window", default=4096)
    below = keys.take("max_window_layers", default=28)
    layers = range(keys.take("num_hidden_layers", default=0))
    usual = ["sliding_attention" if windowed and layer >= below else "full_attention" for layer in layers]
    return windows_of(keys, usual, window)


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(_llama, DECODER),
    "mistral": Family(_mistral, DECODER),
    "qwen2": Family(_qwen2, DECODER),
    "qwen3": Family(_qwen3, DECODER),
}
