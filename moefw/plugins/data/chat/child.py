"""Program of the process that renders and tokenizes conversations, within limits; run with ``-m``.

Messages are those of :mod:`moefw.plugins.data.encoding_child`. The first request has the ``tokenizer.json`` and the
template as parts, and in its head ``variables``, ``today``, ``train_on`` and ``limits``. The parts of each later one
are conversations in JSON. An answer says of each conversation how many samples it gives, or why none: ``{"chats":
[{"samples": 1}, {"error": why}]}``. A sample is three parts: text, ids, uint32, and whether each trains, uint8. A
request with ``{"roles": true}`` is answered with ``{"roles": {"user": [tokens, of which train]}}`` instead.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from moefw.plugins.data.chat.spans import Sample, role_ends, samples
from moefw.plugins.data.chat.template import RenderError, Template
from moefw.plugins.data.encoding_child import (
    ENCODE_BYTES_PER_BYTE,
    ENCODE_CPU_S_PER_MIB,
    LOAD_BYTES,
    LOAD_BYTES_PER_BYTE,
    LOAD_CPU_S,
    first_line,
    limit,
    receive,
    send,
)


def main() -> None:
    """Answer requests until the other process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the requesting process decides
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit(resource.RLIMIT_CORE, 0)
    request = receive(requests)
    if request is None:
        return
    head, (content, source) = request
    limits = head["limits"]
    load_bytes = LOAD_BYTES + LOAD_BYTES_PER_BYTE * len(content)
    _limit_cpu(LOAD_CPU_S)
    limit(resource.RLIMIT_DATA, load_bytes)
    try:
        tokenizer = _tokenizer(content)
    except BaseException as error:
        return send(answers, {"error": f"its tokenizer.json cannot be read: {first_line(error)}"})
    _limit_cpu(limits["cpu_s"])  # Jinja computes what is constant in a template as it reads it
    limit(resource.RLIMIT_DATA, load_bytes + limits["bytes"])
    try:
        template = Template(
            source.decode(),
            head["variables"],
            today=date.fromisoformat(head["today"]) if head["today"] else None,
            most_chars=limits["chars"],
        )
    except BaseException as error:
        return send(answers, {"error": f"its chat template cannot be read: {first_line(error)}"})
    send(answers, {})
    while (request := receive(requests)) is not None:
        asked, chats = request
        _limit_cpu(limits["cpu_s"])
        limit(resource.RLIMIT_DATA, load_bytes + limits["bytes"])
        try:
            rendered = [_rendered(template, json.loads(chat), head["train_on"]) for chat in chats]
            texts = [sample.text for each in rendered if not isinstance(each, str) for sample in each]
            size = sum(map(len, texts))
            _limit_cpu(limits["cpu_s"] + ENCODE_CPU_S_PER_MIB * (size >> 20))
            limit(resource.RLIMIT_DATA, load_bytes + limits["bytes"] + ENCODE_BYTES_PER_BYTE * size)
            encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
            if asked.get("roles"):
                outcomes = _counted(template, rendered, chats, encodings)
                parts: list[bytes] = []
            else:
                outcomes, parts = _encoded(rendered, encodings)
        except BaseException as error:
            send(answers, {"error": first_line(error)})
        else:
            send(answers, {"chats": outcomes, "sizes": list(map(len, parts))}, parts)


def _limit_cpu(seconds: int) -> None:
    """Limit what the process computes from now on."""
    limit(resource.RLIMIT_CPU, int(time.process_time()) + seconds)


def _tokenizer(content: bytes) -> Any:
    """Tokenizer to which names of special tokens are these tokens: the template writes them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _rendered(template: Template, chat: Mapping[str, Any], train_on: str) -> Sequence[Sample] | str:
    """Samples of a conversation, or why there are none."""
    try:
        return samples(template, chat, train_on)
    except RenderError as error:
        return str(error)
    except MemoryError:
        return "it took more memory than any text needs"


def _encoded(rendered: Sequence[Sequence[Sample] | str], encodings: Iterator[Any]) -> tuple[list[Any], list[bytes]]:
    """Outcome of each conversation, and three parts of each sample: text, ids, and whether each trains."""
    outcomes: list[Any] = []
    parts: list[bytes] = []
    for each in rendered:
        if isinstance(each, str):
            outcomes.append({"error": each})
            continue
        outcomes.append({"samples": len(each)})
        for sample in each:
            encoding = next(encodings)
            parts += (sample.text.encode(), array("I", encoding.ids).tobytes(), _trains(sample, encoding))
    return outcomes, parts


def _counted(
    template: Template, rendered: Sequence[Sequence[Sample] | str], chats: Sequence[bytes], encodings: Iterator[Any]
) -> list[Any]:
    """Numbers of tokens of each role of each conversation, and of those that train."""
    outcomes: list[Any] = []
    for each, chat in zip(rendered, chats, strict=True):
        if isinstance(each, str):
            outcomes.append({"error": each})
            continue
        roles: dict[str, list[int]] = {}
        for sample in each:
            encoding = next(encodings)
            ends = iter(role_ends(template, sample, json.loads(chat)["tools"]))
            stop, role = next(ends)
            for (begin, _), trains in zip(encoding.offsets, _trains(sample, encoding), strict=True):
                while begin >= stop:
                    stop, role = next(ends, (len(sample.text) + 1, role))
                counts = roles.setdefault(role, [0, 0])
                counts[0] += 1
                counts[1] += trains
        outcomes.append({"roles": roles})
    return outcomes


def _trains(sample: Sample, encoding: Any) -> bytes:
    """Whether each token trains: whether it overlaps a span, both in characters."""
    trains = bytearray(len(encoding.ids))
    spans = iter(sample.spans)
    span = next(spans, None)
    for index, (begin, end) in enumerate(encoding.offsets):
        while span is not None and begin >= span[1]:
            span = next(spans, None)
        if span is None:
            break
        trains[index] = end > span[0]
    return bytes(trains)


if __name__ == "__main__":
    main()
