"""Reads a ``config.json``: every key is used, neutral or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moefw.core.errors import Problem, SpecError, nearest
from moefw.models.huggingface.values import ROPE_KINDS, shown, wrong_values
from moefw.system.untrusted_files import read_regular

MAX_BYTES: Final = 1 << 24
"""16 MiB; a configuration has a few kilobytes."""

NEUTRAL: Final = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "model_type", "problem_type", "transformers_version"),
        *("dtype", "torch_dtype", "quantization_config", "pretraining_tp", "ep_size"),
        *("bos_token_id", "eos_token_id", "id2label", "label2id", "num_labels"),
        *("max_position_embeddings", "initializer_range", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder"),
        *("router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "experts_implementation"),
    }
)
"""Keys that cannot change a logit, the loss or a gradient, given the weights, or that matter only beside another key.

``router_aux_loss_coef`` matters with ``output_router_logits`` (:func:`balance_of`), ``max_position_embeddings`` where
RoPE lacks the trained length, and ``quantization_config`` when the folder's tensors are read.
"""

Sections = dict[str, dict[str, Any]]
"""Options of a spec that describe a model, by section."""

_MISSING: Final[Any] = object()


class Keys:
    """The keys of a configuration. Which ones are read is remembered, problems are collected.

    A value of the wrong type or size is a problem, and counts as not set.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.where = where
        self.problems: list[Problem] = []
        self._values = dict(values)
        self._read: set[str] = set()
        self._wrong: set[str] = set()
        for name, what in wrong_values(values):
            self._wrong.add(name)
            self.tell(what, "Correct it, or download the configuration again.")

    def take(self, *names: str, default: Any = _MISSING) -> Any:
        """Value of the first of ``names`` that is set, else ``default``. They are names of one thing.

        None if it must be set and is not, or is wrong, which is a problem.
        """
        self._read.update(names)
        usable = [name for name in names if name not in self._wrong]
        values_by_name = {name: self._values[name] for name in usable if self._values.get(name) is not None}
        for name, value in values_by_name.items():
            first = next(iter(values_by_name))
            if value != values_by_name[first]:
                what = f"{name} {shown(value)} contradicts {first} {shown(values_by_name[first])}."
                self.tell(what, "Leave one of them out.")
        if not values_by_name and default is _MISSING:
            if len(usable) == len(names):
                self.tell(f"{names[0]} is missing.", f"Set {' or '.join(names)}.")
            return None
        return next(iter(values_by_name.values()), default)

    def has(self, name: str) -> bool:
        """Whether a key is written, be it as null."""
        return name in self._values

    def only(self, name: str, *supported: Any, default: Any) -> None:
        """Report a value of ``name`` other than the ``supported`` ones; ``default`` is the value if it is not set."""
        value = self.take(name, default=default)
        if value not in supported:
            known = " or ".join(map(repr, supported))
            self.tell(f"{name} {shown(value)} is not supported.", f"Supported: {known}.")

    def tell(self, what: str, fix: str) -> None:
        """Report a problem."""
        self.problems.append(Problem(f"{self.where}: {what}", fix))

    def raise_problems(self) -> None:
        """Raise SpecError with all problems, keys that nobody read among them."""
        for name in self._values.keys() - self._read - NEUTRAL - self._wrong:
            if self._values[name] is not None:
                known = nearest(name, self._read | NEUTRAL).split(" Known:")[0]
                self.tell(f"{_key(name)} is not supported for {self._values.get('model_type')!r}.", known)
        if self.problems:
            raise SpecError(sorted(self.problems, key=lambda problem: problem.what))


def _key(name: str) -> str:
    """Key as an error prints it: one that is no word, in quotes."""
    return name if name.isidentifier() and len(name) <= 60 else shown(name)


def read_config(path: Path) -> Mapping[str, Any]:
    """Configuration in a ``config.json``, or in the folder that holds one. Raises SpecError."""
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(read_regular(path, max_bytes=MAX_BYTES))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.", "Name a folder with a config.json.") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}.", "Download it again.") from error
    if not isinstance(values, dict):
        raise SpecError(f"{path} holds no mapping.", "Download it again.")
    return values


def rope_of(
    keys: Keys, pairs: str = "halves", default: Mapping[str, Any] | None = None, partial: float | None = None
) -> dict[str, Any]:
    """Options of RoPE: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older files.

    ``partial``: share of values that turn in a family that has such; None: all values do.
    """
    written = keys.take("rope_parameters", default=None) or keys.take("rope_scaling", default=None)
    options_written = {name: value for name, value in (written or default or {}).items() if value is not None}
    theta = keys.take("rope_theta", default=options_written.pop("rope_theta", 10000.0))
    kind = options_written.pop("rope_type", options_written.pop("type", "default"))
    options_written.pop("type", None)
    share = _partial_rotary_factor(keys, options_written.pop("partial_rotary_factor", None), partial)
    options = {"kind": kind, "theta": float(theta), "pairs": pairs}
    if share != 1.0:
        options["partial_rotary_factor"] = share
    if kind not in _ROPE:
        keys.tell(f"RoPE of type {shown(kind)} is not supported.", f"Supported: {', '.join(_ROPE)}.")
        return {}
    if kind == "default":  # an option of another kind changes nothing; what is none may, such as a RoPE for each layer
        for name in options_written.keys() - ROPE_KINDS.keys():
            keys.tell(f"{_key(name)} is no option of RoPE.", "Leave it out.")
        return options
    longest = keys.take("max_position_embeddings", default=None)
    trained = options_written.pop("original_max_position_embeddings", None) or longest
    if "trained_positions" in _ROPE[kind]:
        options["trained_positions"] = trained
    if options_written.get("factor") is None and kind == "yarn" and trained and longest:
        options_written["factor"] = longest / trained
    for name, value in options_written.items():
        if name not in _ROPE[kind]:
            keys.tell(f"{_key(name)} is no option of RoPE of type {kind!r}.", "Leave it out.")
        else:
            options[name] = value
    return {name: value for name, value in options.items() if not (name in _UNSET_AT_ZERO and not value)}


def _partial_rotary_factor(keys: Keys, inside: float | None, partial: float | None) -> float:
    """Share of a head's values that turn. ``inside``: as the options of RoPE say; ``partial``: see :func:`rope_of`."""
    share = keys.take("partial_rotary_factor", default=inside)
    if inside not in (None, share):
        what = f"partial_rotary_factor {shown(share)} contradicts that of rope_parameters, {shown(inside)}."
        keys.tell(what, "Leave one of them out.")
    if share is None:
        return 1.0 if partial is None else partial
    if partial is None and share != 1.0:
        keys.tell("partial_rotary_factor is not supported.", "All values of a head turn.")
    return float(share)


_ROPE: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "trained_positions", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "trained_positions", "beta_fast", "beta_slow", "truncate"),
        *("mscale", "mscale_all_dim", "attention_factor"),
    ),
}
_UNSET_AT_ZERO: Final = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")


def decoder_of(keys: Keys) -> dict[str, Any]:
    """Options of ``model:`` that all families with experts have: those of dense ones, and the number of choices."""
    return {**dense_decoder_of(keys), "top_k": keys.take("num_experts_per_tok")}


def dense_decoder_of(keys: Keys) -> dict[str, Any]:
    """Return what all families say of the model, and report the options that none of them may set."""
    keys.only("hidden_act", "silu", "swish", default="silu")
    keys.only("attention_dropout", 0, 0.0, default=0.0)
    return {
        "vocab_size": keys.take("vocab_size"),
        "pad_id": keys.take("pad_token_id", default=None),
        "dim": keys.take("hidden_size"),
        "num_layers": keys.take("num_hidden_layers"),
        "tie_embeddings": keys.take("tie_word_embeddings", default=False),
    }


def balance_of(keys: Keys, coeff: float = 0.001) -> dict[str, Any]:
    """Rule that balances experts if ``output_router_logits`` adds its loss. ``coeff``: the family's own."""
    coeff_written = keys.take("router_aux_loss_coef", default=coeff)
    keys.only("output_router_logits", False, True, default=False)
    if not keys.take("output_router_logits", default=False):
        return {}
    return {"balance": [{"kind": "aux_loss", "over": "model", "coeff": coeff_written}]}


def heads_of(keys: Keys, *, head_dim: bool = True) -> dict[str, Any]:
    """Heads of a grouped-query attention. ``head_dim``: whether the family has this key."""
    heads = keys.take("num_attention_heads")
    width = keys.take("head_dim", default=None) if head_dim else None
    dim = keys.take("hidden_size")
    return {
        "use": "gqa",
        "num_heads": heads,
        "num_kv_heads": keys.take("num_key_value_heads", default=heads),
        "head_dim": width or (dim // heads if dim and heads else None),
    }


def windows_of(keys: Keys, usual: Sequence[str], window: int) -> dict[str, Any]:
    """Options of an attention that has a window in some layers. ``usual``: the kinds of all layers if
    ``layer_types`` does not give them; none if the number of layers is not known.
    """
    kinds = keys.take("layer_types", default=usual)
    if usual and len(kinds) != len(usual):
        keys.tell(f"layer_types has {len(kinds)} entries for {len(usual)} layers.", "Give one for each layer.")
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if len(full) == len(kinds):
        return {"window": None, "full_layers": []}
    return {"window": window, "full_layers": full}
