"""Program of the encoding process: loads a ``tokenizer.json`` within limits and turns texts into ids and back.

Run as a file; it imports nothing of moefw and starts in 50 ms. A message is a line of JSON and parts of the sizes in
bytes that it gives. The first request holds the ``tokenizer.json``, each later one a batch: ``{"sizes": [...]}`` of
texts, or ``{"decode": true, "sizes": [...]}`` of ids, uint32. Answers are ``{"sizes": [...]}`` with the ids of each
text, or the text of each batch of ids, or ``{"error": why}``. docs/adr/0028 says why this is no pool of processes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

LOAD_CPU_S = 60
LOAD_BYTES = 1 << 30
LOAD_BYTES_PER_BYTE = 32
"""Limits of loading. A ``tokenizer.json`` of 256 MiB takes a quarter of them."""
ENCODE_CPU_S_PER_MIB = 60
ENCODE_BYTES_PER_BYTE = 512
"""Limits of encoding: a hundred times the time of BPE, and five times its memory. Also of decoding, by bytes of ids."""
SAMPLE = "".join(map(chr, range(32, 127))) + "\n\tThe quick brown fox: Grüße, 你好 🙂 " + "a" * 100


def send(file: IO[bytes], head: Mapping[str, Any], parts: Sequence[bytes] = ()) -> None:
    """Write a message."""
    file.write(json.dumps(head).encode() + b"\n")
    file.writelines(parts)
    file.flush()


def receive(file: IO[bytes]) -> tuple[dict[str, Any], list[bytes]] | None:
    """Message and its parts; None if the other process is gone."""
    line = file.readline()
    if not line.endswith(b"\n"):
        return None
    head: dict[str, Any] = json.loads(line)
    sizes = list(head.get("sizes", ()))
    parts = [file.read(size) for size in sizes]
    return (head, parts) if list(map(len, parts)) == sizes else None


def streams() -> tuple[IO[bytes], IO[bytes]]:
    """Streams of requests and answers of a child that begins.

    What libraries print goes to its errors. Ctrl-C is for the requesting process, and no core is dumped.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit(resource.RLIMIT_CORE, 0)
    return sys.stdin.buffer, answers


def main() -> None:
    """Answer requests until the other process is gone."""
    requests, answers = streams()
    request = receive(requests)
    if request is None:
        return
    (content,) = request[1]
    load_bytes = LOAD_BYTES + LOAD_BYTES_PER_BYTE * len(content)
    limit(resource.RLIMIT_CPU, LOAD_CPU_S)
    limit(resource.RLIMIT_DATA, load_bytes)
    try:
        tokenizer = _load(content)
    except BaseException as error:
        return send(answers, {"error": first_line(error)})
    send(answers, {})
    while (request := receive(requests)) is not None:
        head, parts = request
        size = sum(map(len, parts))
        spent_s = int(time.process_time())
        limit(resource.RLIMIT_CPU, spent_s + LOAD_CPU_S + ENCODE_CPU_S_PER_MIB * (size >> 20))
        limit(resource.RLIMIT_DATA, load_bytes + ENCODE_BYTES_PER_BYTE * size)
        try:
            if head.get("decode"):
                answer = [_decode(tokenizer, part) for part in parts]
            else:
                encoded = _encode(tokenizer, [text.decode("utf-8", "replace") for text in parts])
                answer = [ids.tobytes() for ids in encoded]
        except BaseException as error:
            send(answers, {"error": first_line(error)})
        else:
            send(answers, {"sizes": list(map(len, answer))}, answer)


def _load(content: bytes) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    with suppress(BaseException):  # only a crash matters here: the actual texts may still be encodable
        (ids,) = _encode(tokenizer, [SAMPLE])
        _decode(tokenizer, ids.tobytes())
    return tokenizer


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[array[int]]:
    return [array("I", encoding.ids) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _decode(tokenizer: Any, ids: bytes) -> bytes:
    """Text of ids, UTF-8: special tokens by their names; ids past the vocabulary are left out."""
    text: str = tokenizer.decode(array("I", ids).tolist(), skip_special_tokens=False)
    return text.encode("utf-8", "replace")


def first_line(error: BaseException) -> str:
    """First line of an exception's message. A Rust panic is a BaseException, not an Exception."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def limit(kind: int, most: int) -> None:
    """Set a soft limit of this process, or the hard one if that is lower."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
