"""The resolved spec of a run: kept in its folder, and compared with an earlier one and between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from moefw.compose.assembly import Assembly
from moefw.compose.spec.source import KeyPath, dotted, show
from moefw.core.errors import PlanError, Problem
from moefw.runtime.communication.agreement import everywhere
from moefw.system.files import replaced_file
from moefw.training.folder import kept_spec, sealed
from moefw.training.learning_rate import is_another_curve


def write_resolved(assembly: Assembly, run_dir: Path) -> list[str]:
    """Write ``spec.yaml`` into the run's folder; return the changes since it was last written, one line each.

    Raises OSError if it cannot be written.
    """
    path = run_dir / "spec.yaml"
    resolved = kept_spec(assembly)
    before: Any = resolved
    if path.is_file():
        try:
            before = YAML(typ="safe").load(path)
        except (YAMLError, ValueError):
            before = None
    text = StringIO()
    YAML().dump(resolved, text)
    with replaced_file(path) as scratch:
        scratch.write_text(sealed(text.getvalue()), encoding="utf-8")
    if not isinstance(before, dict):
        return [f"{path} was damaged, and is written anew"]
    return [_change(assembly, *difference) for difference in _differences(before, resolved, ())]


def _change(assembly: Assembly, key: str, old: Any, new: Any) -> str:
    line = f"{key}: {show(old)} is {show(new)} now"
    if key == "train.steps" and isinstance(old, int) and is_another_curve(assembly, steps_before=old):
        return f"{line}, so the learning rate follows another curve"
    return line


def agree_on_spec(assembly: Assembly, versions: Mapping[str, str]) -> None:
    """Compare spec, world, and versions of plugins and libraries over all ranks.

    ``versions``: those of this rank's libraries by name. Collective; raises PlanError with every difference.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    own = [assembly.digest(), dict(versions)]
    if all(other == own for other in everywhere(own, group)):
        return
    identity = {
        "spec": assembly.resolved(),
        "world": assembly.layout.world,
        "plugin": {f"{hook.removeprefix('moefw_')} {name}": have for hook, name, *have in assembly.versions()},
        "version": dict(versions),
    }
    answers = everywhere(identity, group)
    fix = "Give every node the same spec and the same environment."
    problems = [
        Problem(f"rank {rank} differs from rank 0 in {key}: {show(there)} instead of {show(here)}.", fix)
        for rank, other in enumerate(answers)
        for key, here, there in _differences(answers[0], other, ())
    ]
    raise PlanError(problems)


def _differences(before: Any, now: Any, path: KeyPath) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), (*path, key))
    elif before != now:
        yield dotted(path), before, now
