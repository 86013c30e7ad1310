"""Program of the process that renders and tokenizes conversations, within limits; run with ``-m``.

Messages are those of :mod:`moefw.plugins.data.encoding_child`. The first request has the ``tokenizer.json`` and the
template as parts, and in its head ``variables``, ``today``, ``train_on`` and ``limits``. The parts of each later one
are conversations in JSON. An answer says of each conversation how many samples it gives, or why none: ``{"chats":
[{"samples": 1}, {"error": why}]}``. A sample is three parts: text, ids, uint32, and whether each trains, uint8. A
request with ``{"roles": true}`` is answered with ``{"roles": {"user": [tokens, of which train]}}`` instead, and one
with ``{"ask": true}`` with the ids of each conversation and of the prompt for an answer, one part each.
"""

from __future__ import annotations

import json
import resource
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any, final

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
    streams,
)

Tokenized = Sequence[tuple[Sample, Any]]
"""Samples and what the tokenizer makes of their texts."""


def main() -> None:
    """Answer requests until the other process is gone."""
    requests, answers = streams()
    request = receive(requests)
    if request is None:
        return
    head, (content, source) = request
    try:
        worker = _Worker(head, content, source)
    except BaseException as error:
        return send(answers, {"error": first_line(error)})
    send(answers, {})
    while (request := receive(requests)) is not None:
        asked, chats = request
        try:
            if asked.get("ask"):
                outcomes, parts = worker.prompts(chats)
            elif asked.get("roles"):
                outcomes, parts = worker.count(chats)
            else:
                outcomes, parts = worker.encode(chats)
        except BaseException as error:
            send(answers, {"error": first_line(error)})
        else:
            send(answers, {"chats": outcomes, "sizes": list(map(len, parts))}, parts)


@final
class _Worker:
    """Renders and tokenizes. Raises RenderError if the tokenizer or the template cannot be read."""

    def __init__(self, head: Mapping[str, Any], content: bytes, source: bytes) -> None:
        self._train_on = head["train_on"]
        self._cpu_s = head["limits"]["cpu_s"]
        self._bytes = LOAD_BYTES + LOAD_BYTES_PER_BYTE * len(content) + head["limits"]["bytes"]
        _limit_cpu(LOAD_CPU_S)
        limit(resource.RLIMIT_DATA, self._bytes)
        try:
            self._tokenizer = _tokenizer(content)
        except BaseException as error:
            raise RenderError(f"its tokenizer.json cannot be read: {first_line(error)}") from error
        _limit_cpu(self._cpu_s)  # Jinja computes what is constant in a template as it reads it
        today = date.fromisoformat(head["today"]) if head["today"] else None
        most_chars = head["limits"]["chars"]
        try:
            self._template = Template(source.decode(), head["variables"], today=today, most_chars=most_chars)
        except BaseException as error:
            raise RenderError(f"its chat template cannot be read: {first_line(error)}") from error

    def encode(self, contents: Sequence[bytes]) -> tuple[list[Any], list[bytes]]:
        """Outcome of each conversation, and three parts of each sample: text, ids, and whether each trains."""
        outcomes: list[Any] = []
        parts: list[bytes] = []
        for _, tokenized in self._tokenized(contents):
            if isinstance(tokenized, str):
                outcomes.append({"error": tokenized})
                continue
            outcomes.append({"samples": len(tokenized)})
            for sample, encoding in tokenized:
                ids = array("I", encoding.ids)
                parts += (sample.text.encode(), ids.tobytes(), _trains(sample, encoding))
        return outcomes, parts

    def prompts(self, contents: Sequence[bytes]) -> tuple[list[Any], list[bytes]]:
        """Outcome of each conversation, and the ids of it and of the prompt for an answer."""
        limit(resource.RLIMIT_DATA, self._bytes)
        outcomes: list[Any] = []
        parts: list[bytes] = []
        for content in contents:
            _limit_cpu(self._cpu_s)
            chat = json.loads(content)
            try:
                text = self._template.render(chat["messages"], chat["tools"], add_generation_prompt=True).text
            except RenderError as error:
                outcomes.append({"error": str(error)})
                continue
            outcomes.append({})
            parts.append(array("I", self._tokenizer.encode(text, add_special_tokens=False).ids).tobytes())
        return outcomes, parts

    def count(self, contents: Sequence[bytes]) -> tuple[list[Any], list[bytes]]:
        """Numbers of tokens of each role of each conversation, and of those that train; no parts."""
        outcomes: list[Any] = []
        for chat, tokenized in self._tokenized(contents):
            if isinstance(tokenized, str):
                outcomes.append({"error": tokenized})
                continue
            _limit_cpu(self._cpu_s)
            outcomes.append({"roles": self._counted(tokenized, chat["tools"])})
        return outcomes, []

    def _tokenized(self, contents: Sequence[bytes]) -> Iterator[tuple[Mapping[str, Any], Tokenized | str]]:
        """Yield conversations, and their samples with what these are encoded to, or why there are none."""
        limit(resource.RLIMIT_DATA, self._bytes)
        chats = [json.loads(content) for content in contents]
        rendered = [self._rendered(chat) for chat in chats]
        texts = [sample.text for each in rendered if not isinstance(each, str) for sample in each]
        size = sum(map(len, texts))
        _limit_cpu(self._cpu_s + ENCODE_CPU_S_PER_MIB * (size >> 20))
        limit(resource.RLIMIT_DATA, self._bytes + ENCODE_BYTES_PER_BYTE * size)
        encodings = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        for chat, each in zip(chats, rendered, strict=True):
            yield chat, each if isinstance(each, str) else [(sample, next(encodings)) for sample in each]

    def _rendered(self, chat: Mapping[str, Any]) -> Sequence[Sample] | str:
        """Samples of a conversation, or why there are none."""
        _limit_cpu(self._cpu_s)
        try:
            return samples(self._template, chat, self._train_on)
        except RenderError as error:
            return str(error)
        except MemoryError:
            return "it took more memory than any text needs"

    def _counted(self, tokenized: Tokenized, tools: Any) -> Mapping[str, Sequence[int]]:
        """Number of tokens of each role, and of those that train."""
        roles: dict[str, list[int]] = {}
        for sample, encoding in tokenized:
            ends = iter(role_ends(self._template, sample, tools))
            stop, role = next(ends)
            for (begin, _), trains in zip(encoding.offsets, _trains(sample, encoding), strict=True):
                while begin >= stop:
                    stop, role = next(ends, (len(sample.text) + 1, role))
                counts = roles.setdefault(role, [0, 0])
                counts[0] += 1
                counts[1] += trains
        return roles


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
