"""Speed of encoding a corpus: in parts on all cores, against piece by piece on one core, with the same ids.

Both alternate over the sources of the standard library with a BPE of 2048 ids. Their speeds are written to
``benchmarks/results/encoding.json``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import record
from moefw.plugins.data.bpe import train_bpe
from moefw.plugins.data.corpus import Document, find_corpus, text_documents
from moefw.plugins.data.corpus_ids import write_tokens
from moefw.plugins.data.encoding import EncodingProcess
from moefw.plugins.data.tokenizers import JsonTokenizer
from timing import race


def main(rounds: int = 3) -> None:
    """Measure, print and write."""
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), rounds)
    print(measured)
    print(record.write("encoding", measured))


def measure(folder: Path, rounds: int) -> dict[str, float]:
    """Return the median MB/s of both ways and their ratio, after checking that their ids are equal."""
    text = b"".join(piece for document in text_documents(find_corpus(None, ())) for piece in document.pieces())
    tokenizer = JsonTokenizer(train_bpe([text], 2048))
    (folder / "text").write_bytes(text)
    document = Document("text", folder / "text", 0, len(text), 0)

    def one_by_one() -> np.ndarray:
        return np.concatenate([tokenizer.encode(piece) for piece in document.pieces()])

    def on_all_cores() -> np.ndarray:
        with EncodingProcess(tokenizer.content or b"") as process:
            write_tokens(folder / "ids", [document], tokenizer, process.encode, lambda _: None)
        return np.fromfile(folder / "ids", dtype="<u2")

    assert np.array_equal(one_by_one(), on_all_cores())
    seconds = race({"one by one": one_by_one, "on all cores": on_all_cores}, rounds, warm_up=0)
    speeds = {f"{name}, MB/s": round(len(text) / 1e6 / taken, 2) for name, taken in seconds.items()}
    return {
        "MB": round(len(text) / 1e6, 1),
        **speeds,
        "ratio": round(seconds["one by one"] / seconds["on all cores"], 2),
    }


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
