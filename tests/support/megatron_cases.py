"""Pairs of files as Megatron-LM's preprocessing writes them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_pair(root: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16") -> Path:
    """Write ``root.bin`` and ``root.idx``; a document is a list of sequences of ids."""
    sequences = [np.array(ids, dtype) for document in documents for ids in document]
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    pointers = np.cumsum([0, *(ids.nbytes for ids in sequences)])[:-1].astype(np.int64)
    indices = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(lengths), len(indices))
    root.parent.mkdir(parents=True, exist_ok=True)
    root.with_suffix(".bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    root.with_suffix(".idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + indices.tobytes())
    return root


def bytes_of(*texts: str) -> list[list[list[int]]]:
    """Return documents of one sequence each, with byte 0 at the end, as ``--append-eod`` writes them."""
    return [[[*text.encode(), 0]] for text in texts]
