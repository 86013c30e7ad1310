"""Bytes of checkpoints of DeepSeek-V3 on 1,024 ranks, by arithmetic: of all indexes, and what a rank writes and reads.

Models of ranks are built on tensors without memory, under FSDP as they train, and list the parts that they would write.
Ranks at even distances are built, some in each stage of a pipeline, and what they have is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from attrs import evolve, frozen
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

import record
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.recording.fake_tensors import fake_world
from moefw.runtime.parallel.local_shards import num_stored
from moefw.runtime.safetensors_dtypes import NAMES
from moefw.training.checkpoint.files import CHUNK_BYTES, HASH_LENGTH, SavedFile, described, file_of, laid_out
from moefw.training.checkpoint.manifest import Manifest, SavedTensor
from moefw.training.checkpoint.parts import Part, parts_of

WORLD: Final = 1024
LIMIT_BYTES: Final = 128 << 20
"""The most that all indexes and the manifest may have: every rank reads them."""
MODEL: Final[Mapping[str, Any]] = {
    "model": {"preset": "deepseek-v3", "mtp_layers": 1},
    "routing": {"balance": [{"kind": "expert_bias", "rate": 1e-3}]},
    "precision": {"use": "bf16"},
    "train": {"micro_batch": 1, "seq_len": 4096, "tokens_per_step": 4096 * 16 * WORLD},
    "run": {"device": "cpu"},
}
EXPERTS: Final = {"ep": 64, "shard": "all"}
LAYOUTS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "pp 16, ep 64": (32, {"pp": 16, "experts": {"ep": 64}}),
    "FSDP over 64 ranks, ep 64": (4, {"dense": {"shard": 64}, "experts": EXPERTS}),
    "FSDP over 1,024 ranks, ep 64": (2, {"dense": {"shard": "all"}, "experts": EXPERTS}),
}
"""Each with the number of ranks to build."""
HASH: Final = "A" * HASH_LENGTH
DIGEST: Final = "0" * 64
"""As long as the hash of a chunk, and that of an index."""


@frozen(kw_only=True)
class OfRank:
    """Bytes of a rank: of its index, of the parts that it writes, and of all that it stores."""

    index: int
    written: int
    stored: int


def main() -> None:
    """Count, print and record."""
    manifest = manifest_bytes(MODEL, WORLD)
    found = {}
    for name, (built, parallel) in LAYOUTS.items():
        row = {**count({**MODEL, "parallel": parallel}, WORLD, built), "manifest": manifest}
        found[name] = row
        read_by_all = row["indexes"] + manifest
        verdict = "under" if read_by_all < LIMIT_BYTES else "over"
        print(
            f"{name}: {row['checkpoint'] / 1e12:.2f} TB. Manifest and indexes {read_by_all / 2**20:.0f} MiB, {verdict} "
            f"{LIMIT_BYTES >> 20}. A rank writes at most {row['written'] / 1e9:.1f} GB, and reads at most "
            f"{row['read'] / 1e9:.1f} GB to go on in this layout.",
            flush=True,
        )
    print(record.write("checkpoint_sizes", {"world": WORLD, "layouts": found}))


def count(spec: Mapping[str, Any], world: int, built: int) -> dict[str, int]:
    """Return bytes: of all indexes and of the checkpoint, and the most that a rank writes and reads."""
    times = world // built
    ranks = [of_rank(spec, number * times + number % times, world) for number in range(built)]
    return {
        "indexes": times * sum(rank.index for rank in ranks),
        "checkpoint": times * sum(rank.written for rank in ranks),
        "written": max(rank.written for rank in ranks),
        "read": max(rank.stored for rank in ranks),
    }


def of_rank(spec: Mapping[str, Any], rank: int, world: int) -> OfRank:
    """Return the bytes of a rank. In the layout that wrote a checkpoint, a rank reads just what it stores."""
    with saved(spec, rank, world) as (model, parts):
        placed = laid_out(map(described, parts))
        hashed = tuple(evolve(part, chunks=(HASH,) * len(part.ranges(CHUNK_BYTES))) for part in placed)
        same = {part.name: part.same for part in parts if part.same}
        index = SavedFile(file=file_of(rank), chunk_bytes=CHUNK_BYTES, parts=hashed, same=same).index
        stored = sum(num_stored(parameter) for parameter in model.parameters())
        return OfRank(
            index=len(index),
            written=sum(part.nbytes for part in placed),
            stored=stored * torch.float32.itemsize * 3,  # a parameter and two moments
        )


def manifest_bytes(spec: Mapping[str, Any], world: int) -> int:
    """Return the bytes of the manifest, which are almost the same in every layout."""
    with saved(spec, 0, 1) as (_, parts):
        tensors = {part.name: SavedTensor(NAMES[part.values.dtype], part.whole) for part in parts}
    files = {file_of(rank): DIGEST for rank in range(world)}
    return len(Manifest(step=100_000, tensors=tensors, files=files).sealed())


@contextmanager
def saved(spec: Mapping[str, Any], rank: int, world: int) -> Iterator[tuple[nn.Module, list[Part]]]:
    """Build the model of a rank with the states of AdamW, and list the parts that it writes."""
    machine = Machine(device="cpu")
    assembly = assemble_tree(dict(spec), Marks("sizes"), defaults=defaults(), world=world, machine=machine)
    with fake_world(rank, world):
        layout = open_layout(assembly, "cpu")
        shared = Shared()
        model = build_model(assembly, layout, torch.device("cpu"), shared)
        optimizer = torch.optim.AdamW(model.parameters())
        with unset_fake_temporarily():
            step = torch.ones(())  # its value is read
        for parameter in model.parameters():
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {**moments, "step": step}
        with unset_fake_temporarily():
            parts = parts_of(model, optimizer, layout)
        yield model, parts
        shared.close()


if __name__ == "__main__":
    main()
