"""The spec: what the user writes. Options of a part live with its plugin, not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import Factory, field, frozen
from attrs.validators import ge, gt, optional

from moefw.core.errors import Problem
from moefw.core.source import KeyPath, Marks, Tree
from moefw.core.structure import structure

RESERVED = ("use", "preset")


@frozen
class Choice:
    """A plugin by name, and the options written beside ``use:`` (a ``preset:`` names a set of them)."""

    use: str
    options: Mapping[str, Any] = Factory(dict)

    @classmethod
    def from_data(cls, data: object, path: KeyPath, marks: Marks, problems: list[Problem]) -> Choice:
        """Read ``{use: name, option: value, ...}``; what cannot be read chooses nothing (``use`` is empty)."""
        if not isinstance(data, Mapping):
            what = f"{data!r} is not a mapping that names a plugin."
            problems.append(Problem(what, "Write {use: name, option: value}.", marks.where(path)))
            return cls("")
        use = data.get("use")
        if not isinstance(use, str):
            what = "'use' is missing" if use is None else f"{use!r} is not the name of a plugin"
            problems.append(Problem(f"{what}.", "`moefw plugins` lists them.", marks.where((*path, "use"))))
            use = ""
        return cls(use, {key: value for key, value in data.items() if key != "use"})

    def to_data(self) -> dict[str, object]:
        """Return the mapping as it stands in a file."""
        return {"use": self.use, **self.options}


def chosen(hook: str, **kwargs: Any) -> Any:
    """Declare a spec field that holds a :class:`Choice` among the plugins of ``hook``."""
    return field(metadata={"hook": hook}, **kwargs)


@frozen(kw_only=True)
class TrainSpec:
    """How long and how fast to train. Token counts are global, ``micro_batch`` is sequences a rank."""

    steps: int = field(default=300, validator=ge(1))
    tokens_per_step: int = field(default=8192, validator=ge(1))
    micro_batch: int = field(default=4, validator=ge(1))
    seq_len: int = field(default=512, validator=ge(2))
    lr: float = field(default=3e-3, validator=gt(0.0))
    optimizer: Choice = chosen("moefw_optimizers")
    schedule: Choice = chosen("moefw_schedules")
    clip_norm: float | None = field(default=1.0, validator=optional(gt(0.0)))
    eval_every: int = field(default=0, validator=ge(0))
    eval_tokens: int = field(default=262144, validator=ge(1))
    checkpoint_every: int = field(default=0, validator=ge(0))
    keep_checkpoints: int = field(default=2, validator=ge(1))


@frozen(kw_only=True)
class RunSpec:
    """Where a run writes, its seed, the device, and the observers that watch it."""

    dir: str = "runs/default"
    seed: int = field(default=0, validator=ge(0))
    device: Literal["auto", "cpu", "cuda"] = "auto"
    observers: tuple[str, ...] = ()


@frozen(kw_only=True)
class Spec:
    """A whole spec file. Sections without a default are filled from the defaults file when left out."""

    model: Choice = chosen("moefw_models")
    routing: Choice = chosen("moefw_routers")
    dispatch: Choice = chosen("moefw_dispatchers")
    gemm: Choice = chosen("moefw_gemms")
    precision: Choice = chosen("moefw_precisions")
    memory: tuple[Choice, ...] = chosen("moefw_memory_policies", default=())
    parallel: Choice = chosen("moefw_layouts")
    data: Choice = chosen("moefw_data_sources")
    train: TrainSpec
    run: RunSpec = RunSpec()


def with_defaults(tree: Tree, defaults: Tree) -> Tree:
    """Return ``tree`` with the keys of ``defaults`` that it leaves out, section by section.

    The options of a default choice are dropped when the user chose another plugin for that place.
    """
    filled = dict(tree)
    for key, default in defaults.items():
        value = tree.get(key)
        if key not in tree or value is None:
            filled[key] = default
        elif isinstance(default, dict) and isinstance(value, dict):
            other = "use" in default and value.get("use", default["use"]) != default["use"]
            filled[key] = value if other else with_defaults(value, default)
    return filled


def structure_spec(tree: Tree, marks: Marks, problems: list[Problem]) -> Spec | None:
    """Return the spec in ``tree`` and report everything wrong; None if a section without a default is unreadable."""
    return structure(Spec, tree, (), marks, problems)
