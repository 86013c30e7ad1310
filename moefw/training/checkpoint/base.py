"""The base of a run: the folder whose weights ``train.freeze`` keeps. Checkpoints name it, and leave these weights out.

A base with other bits would be another model, silently. So its files are hashed whenever a run begins or is read.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from moefw.compose.assembly import Assembly
from moefw.core.contracts import Layout
from moefw.core.errors import CheckpointError, MoefwError, os_reason
from moefw.runtime.communication.agreement import everywhere, raise_together
from moefw.system.stamps import stamp
from moefw.training.checkpoint.manifest import Base

CONFIG = "config.json"


def base_of(assembly: Assembly, layout: Layout | None) -> Base | None:
    """Base of a run, its files hashed by all ranks of ``layout`` in turn; None: nothing is frozen. Collective.

    ``layout`` None: this process is alone. Raises CheckpointError on all ranks if one of them cannot read a file.
    """
    weights = assembly.spec.train.weights
    if not assembly.frozen:
        return None
    assert weights is not None, "a spec that freezes weights names their folder"
    folder = Path(weights)
    rank, world = (0, 1) if layout is None else (layout.rank, layout.plan.world)
    group = None if layout is None else layout.host_group()
    hashes: list[tuple[str, str]] = []
    problem: MoefwError | None = None
    try:
        for path in [folder / CONFIG, *sorted(folder.glob("*.safetensors"))][rank::world]:
            stamp(f"hashing {path.name} of the frozen weights", slow=True)
            with path.open("rb") as file:
                hashes.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    except OSError as error:
        what = f"train.weights {folder} cannot be read: {os_reason(error)}."
        problem = CheckpointError(what, "Frozen weights are not in checkpoints: bring the folder back.")
    raise_together(problem, group)
    files = sorted((str(name), str(digest)) for own in everywhere(hashes, group) for name, digest in own)
    return Base(folder=str(folder), freeze=assembly.frozen, files=tuple(files))


def require_same_base(checkpoint: Path, saved: Base | None, here: Base | None) -> None:
    """Raise CheckpointError unless a checkpoint was saved over the base that is in use here."""
    frozen_then = () if saved is None else saved.freeze
    frozen_now = () if here is None else here.freeze
    if frozen_then != frozen_now:
        what = f"{checkpoint} was saved with train.freeze {[*frozen_then]}, and here it is {[*frozen_now]}."
        fix = "Keep it. To train other weights of this model, export it, and start a run from that folder."
        raise CheckpointError(what, fix)
    if saved is None or here is None or saved.files == here.files:
        return
    before, now = dict(saved.files), dict(here.files)
    names = before.keys() | now.keys()
    differing = min(name for name in names if before.get(name) != now.get(name))
    what = f"{checkpoint} was trained over the frozen weights of {saved.folder}"
    fix = "Name the folder with the same files as train.weights: frozen weights are not in checkpoints."
    raise CheckpointError(f"{what}; {here.folder} is another one: its {differing} differs.", fix)
