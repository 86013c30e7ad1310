"""How fast a corpus becomes ids: in parts on all cores, and piece by piece on one, the same ids.

Takes 64 MB of the standard library's sources, repeated, and a BPE of 2048 ids; writes ``benchmarks/results/encoding.json``.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import record

from moefw.training.data.bpe import train_bpe
from moefw.training.data.corpus import Document, find_corpus, pieces, text_documents
from moefw.training.data.corpus_ids import write_tokens
from moefw.training.data.encoding import EncodingProcess
from moefw.training.data.tokenizers import JsonTokenizer

SIZE = 64_000_000


def main() -> None:
    """Measure, print and write."""
    sources = b"".join(piece for document in text_documents(find_corpus(None, ())) for piece in pieces(document))
    tokenizer = JsonTokenizer(train_bpe([sources], 2048))
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_bytes((sources * (SIZE // len(sources) + 1))[:SIZE].decode("utf-8", "ignore").encode())
        document = Document("text", text, 0, text.stat().st_size, 0)
        begun = time.perf_counter()
        one_by_one = np.concatenate([tokenizer.encode(piece) for piece in pieces(document)])
        middle = time.perf_counter()
        with EncodingProcess(tokenizer.content or b"") as process:
            write_tokens(Path(folder) / "ids", [document], tokenizer, process.encode, lambda _: None)
        ended = time.perf_counter()
        assert np.array_equal(np.fromfile(Path(folder) / "ids", dtype="<u2"), one_by_one)
    before, after = SIZE / 1e6 / (middle - begun), SIZE / 1e6 / (ended - middle)
    measured = {"one_by_one_mb_per_s": round(before, 2), "on_all_cores_mb_per_s": round(after, 2)}
    measured["ratio"] = round(after / before, 2)
    print(measured)
    print(record.write("encoding", measured))


if __name__ == "__main__":
    main()
