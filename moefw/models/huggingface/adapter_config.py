"""The ``adapter_config.json`` of PEFT: what of it an adapter of ours can be; the rest is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from packaging.version import InvalidVersion, Version

from moefw.core.errors import CheckpointError, Problem
from moefw.models.huggingface.values import LARGEST, Kind, shown
from moefw.models.sizes import WIDEST
from moefw.system.untrusted_files import read_regular

CONFIG: Final = "adapter_config.json"
MAX_BYTES: Final = 1 << 24
"""16 MiB, room for the full names of all linear layers."""
HARMLESS: Final = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base as it is."""
OFF: Final[tuple[Any, ...]] = (None, False, "none", [], {})
"""Values of options that are not used."""
_OF_SOME_LAYERS: Final = ("exclude_modules", "layers_to_transform")
"""Options that leave layers out; the names of tensors say which."""
NEUTRAL: Final = frozenset(
    {
        *("auto_mapping", "inference_mode", "revision", "task_type", "runtime_config"),
        *("megatron_core", "eva_config", "qalora_group_size", "layers_pattern"),
        *_OF_SOME_LAYERS,
    }
)
"""Keys that change nothing that an adapter computes."""


@frozen
class AdapterConfig:
    """What an adapter computes with its tensors: ``scale * B @ A`` more than the weight of the model ``base``.

    ``dropout`` is a probability, of the inputs in training. ``rslora`` divides ``alpha`` by the root of the rank
    (arXiv 2312.03732). ``dora`` scales rows of dense weights to magnitudes of their own (arXiv 2402.09353).
    """

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    dora: bool = False
    base: str | None = None

    @property
    def scale(self) -> float:
        """Factor of ``B @ A``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@frozen
class Targets:
    """The names by which PEFT finds what is adapted; ``modules`` is None if other options decide, too."""

    modules: Sequence[str] | None = ()
    parameters: Sequence[str] = ()

    def name_module(self, module: str) -> bool:
        """Whether a linear layer is named, by itself or by its weight."""
        return _named(module, self.modules or ()) or self.name_parameter(f"{module}.weight")

    def name_parameter(self, parameter: str) -> bool:
        """Whether a parameter is named."""
        return _named(parameter, self.parameters)


def _named(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def written_config(config: AdapterConfig, targets: Targets) -> str:
    """Content of an ``adapter_config.json``.

    ``lora_dropout``, which only training uses, is 0 where PEFT takes no other.
    """
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0 if targets.parameters else config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "inference_mode": True,
        "target_modules": targets.modules,
        "target_parameters": targets.parameters,
    }
    return json.dumps(values, indent=2) + "\n"


def read_adapter_config(folder: Path) -> tuple[AdapterConfig, Targets, str | None]:
    """Configuration of a folder, the names of what is adapted, and the version of PEFT that has written it.

    Raises CheckpointError with all keys that are missing, wrong, or say what no adapter of ours can be.
    """
    path = folder / CONFIG
    try:
        values = json.loads(read_regular(path, max_bytes=MAX_BYTES))
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}."
        raise CheckpointError(what, "Name a folder that PEFT's save_pretrained has written.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.", "Write or download the adapter again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no mapping.", "Write or download the adapter again.")
    problems = [Problem(f"{path}: {what}", fix) for what, fix in _problems(values)]
    if problems:
        raise CheckpointError(problems)
    config = AdapterConfig(
        rank=values["r"],
        alpha=float(values["lora_alpha"]),
        rslora=bool(values.get("use_rslora")),
        dropout=float(values.get("lora_dropout") or 0.0),
        dora=bool(values.get("use_dora")),
        base=values.get("base_model_name_or_path"),
    )
    modules = values.get("target_modules") or ()
    some_layers = any(values.get(name) not in OFF for name in _OF_SOME_LAYERS) or values.get("layers_to_transform") == 0
    targets = Targets(
        modules=None if some_layers or isinstance(modules, str) else modules,
        parameters=values.get("target_parameters") or (),
    )
    return config, targets, values.get("peft_version")


def is_older_than(version: str | None, first: str) -> bool:
    """Whether a version of PEFT is known to be older than ``first``."""
    try:
        return version is not None and Version(version) < Version(first)
    except InvalidVersion:  # of a development build, which is newer than what is asked for
        return False


def _names(value: object) -> bool:
    return type(value) is list and all(type(item) is str for item in value)


_NAME: Final = Kind("a name", lambda value: type(value) is str)
_FLAG: Final = Kind("true or false", lambda value: type(value) is bool)
_KINDS: Final[Mapping[str, Kind]] = {
    "peft_type": Kind("'LORA'", lambda value: value == "LORA"),
    "r": Kind(f"a whole number from 1 to {WIDEST:,}", lambda value: type(value) is int and 1 <= value <= WIDEST),
    "lora_alpha": Kind(
        f"a number above 0 and at most {LARGEST:g}", lambda value: type(value) in (int, float) and 0 < value <= LARGEST
    ),
    "lora_dropout": Kind("a number from 0 to below 1", lambda value: type(value) in (int, float) and 0 <= value < 1),
    "use_rslora": _FLAG,
    "use_dora": _FLAG,
    "base_model_name_or_path": _NAME,
    "peft_version": _NAME,
    "target_modules": Kind("a list of names, or one text", lambda value: type(value) is str or _names(value)),
    "target_parameters": Kind("a list of names", _names),
}
"""What each key may be, if it is not null."""
_REQUIRED: Final = ("peft_type", "r", "lora_alpha")


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a configuration, and what to do."""
    for name in _REQUIRED:
        if values.get(name) is None:
            yield f"{name} is missing.", "Write or download the adapter again."
    for name, value in sorted(values.items()):
        if name in _KINDS:
            if value is not None and not _KINDS[name].holds(value):
                what = f"{name} {shown(value)} is not {_KINDS[name].words}."
                yield what, "Only adapters of LoRA and DoRA can be read."
        elif name == "init_lora_weights":
            if value not in HARMLESS:
                what = (
                    f"init_lora_weights {shown(value)} has changed the base, and the adapter fits only what came of it."
                )
                yield what, "Let PEFT convert it: save_pretrained with path_initial_model_for_weight_conversion."
        elif name not in NEUTRAL and value not in OFF:
            key = name if name.isidentifier() and len(name) <= 60 else shown(name)
            yield f"{key} {shown(value)} is not supported.", "Train an adapter without it, or merge it with PEFT."
