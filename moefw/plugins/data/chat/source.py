"""Serves prepared conversations, and shows what of them trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from moefw.core.data import DataSource, TokenStream
from moefw.core.errors import DataError
from moefw.plugins.data.chat.process import ChatProcess, Recipe
from moefw.plugins.data.child import EncodingError
from moefw.plugins.data.source import PreparedSource
from moefw.system.files import replaced_file

SHOWN_SAMPLES: Final = 2
SHOWN_TOKENS: Final = 400
"""Tokens of a sample that are shown: more of them would push other lines off a screen."""
BEGIN, END = "⟦", "⟧"
"""What trains is between these."""


@final
class ChatSource(DataSource):
    """Prepared conversations.

    ``beside`` are the files that a run hands on, ``meta`` is what the folder tells; ``recipe`` makes ids of questions,
    and ``ends`` are those behind answers.
    """

    def __init__(
        self,
        source: PreparedSource,
        *,
        beside: Mapping[str, bytes],
        meta: Mapping[str, Any],
        recipe: Recipe,
        ends: frozenset[int],
    ) -> None:
        self.train = source.train
        self.heldout = source.heldout
        self.vocab_size = source.vocab_size
        self.fingerprint = source.fingerprint
        self.digest = source.digest
        self._source = source
        self._beside = beside
        self._meta = meta
        self._recipe = recipe
        self._ends = ends

    @property
    def heldout_bytes(self) -> bytes:  # type: ignore[override]
        """The rendered texts of the held-out samples. Raises DamagedDataError."""
        return self._source.heldout_bytes

    @property
    def num_heldout_bytes(self) -> int:
        """The number of their bytes."""
        return self._source.num_heldout_bytes

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without the template. Raises DataError."""
        return self._source.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Raises DataError."""
        return self._source.decode(ids)

    def ask(self, question: str) -> list[int]:
        """Ids of a conversation that begins with a question of the user, up to the answer. Raises DataError."""
        try:
            with ChatProcess(self._recipe) as process:
                return process.ask(question)
        except EncodingError as error:
            raise DataError(f"the question cannot be rendered: {error.reason}.", "Use another template.") from error

    @property
    def ends(self) -> frozenset[int]:
        """Ids behind answers, as the tokenizer's folder names them."""
        return self._ends

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer, the template that was used, and the configurations beside them."""
        self._source.save_tokenizer(folder)
        for name, content in self._beside.items():
            path = folder / name
            if not (path.is_file() and path.read_bytes() == content):
                with replaced_file(path) as scratch:
                    scratch.write_bytes(content)

    def preview(self) -> Sequence[str]:
        """Shares of the tokens that train, what became of long samples, and the first samples, marked."""
        return [*self._counted(), *self._shown()]

    def _counted(self) -> Iterator[str]:
        train = self._meta["samples"]["train"]
        share = train["trained"] / train["tokens"]
        on = self._meta["train_on"]
        yield f"{train['samples']:,} samples to train on; {share:.1%} of their tokens train (train_on: {on})"
        roles = self._meta["roles"]
        total = sum(tokens for tokens, _ in roles.values())
        parts = [f"{role} {tokens / total:.1%} ({trained:,} train)" for role, (tokens, trained) in roles.items()]
        yield f"  tokens by role, of the first conversations: {', '.join(parts) or 'not known'}"
        if not train["special"]:
            yield "  no special token trains: if one ends an answer, the model does not learn to end answers"
        for name, told in _TOLD.items():
            numbers = {side: counts[name] for side, counts in self._meta["samples"].items() if counts[name]}
            if numbers:
                yield f"  {told}: {', '.join(f'{count:,} of {side}' for side, count in numbers.items())}"

    def _shown(self) -> Iterator[str]:
        stream = self.train
        starts = _starts(stream)
        yield f"the first of them, what trains between {BEGIN} and {END}:"
        for begin, end in pairwise([*starts, len(stream)][: SHOWN_SAMPLES + 1]):
            yield from self._marked(begin, end - begin).splitlines()

    def _marked(self, start: int, length: int) -> str:
        """Text of a sample, or of the part around the first token that trains, with brackets around what trains."""
        trained = self.train.trained(start, length)
        assert trained is not None
        count = min(length, SHOWN_TOKENS)
        first = min(max(0, int(trained.argmax()) - count // 2), length - count)
        shown = trained[first : first + count]
        ids = self.train.read(start + first, count)
        cuts = (np.flatnonzero(np.diff(shown)) + 1).tolist()
        runs = [(self.decode(ids[begin:end].tolist()), shown[begin]) for begin, end in pairwise([0, *cuts, count])]
        text = "".join(f"{BEGIN}{run}{END}" if trains else run for run, trains in runs)
        before = f"{first:,} tokens ... " if first else ""
        behind = f" ... {length - count - first:,} tokens" if length - count - first else ""
        return f"{before}{text}{behind}"


_TOLD: Final = {
    "truncated": "cut at max_tokens",
    "dropped": "dropped, as they are longer than max_tokens",
    "untrained": "without any token that trains",
}


def _starts(stream: TokenStream) -> list[int]:
    """Where the first samples start, and the one behind those that are shown, if there is one."""
    count = 1 << 16
    while True:
        starts = stream.document_starts(0, min(count, len(stream)))
        assert starts is not None
        if len(starts) > SHOWN_SAMPLES or count >= len(stream):
            return list(starts[: SHOWN_SAMPLES + 1].tolist())
        count *= 2
