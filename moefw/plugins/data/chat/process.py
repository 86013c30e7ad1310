"""Renders and tokenizes conversations in a separate process: template and tokenizer are somebody else's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
from attrs import asdict, frozen
from numpy.typing import NDArray

from moefw.plugins.data.child import Child, EncodingError


@frozen(kw_only=True)
class Limits:
    """What a request may take besides tokenizing: seconds of a core, bytes of memory; and characters of a text."""

    cpu_s: int = 20
    bytes: int = 1 << 29
    chars: int = 1 << 22


LIMITS: Final = Limits()


@frozen(kw_only=True)
class Recipe:
    """How conversations become tokens. ``today`` is an ISO date, or None; ``variables`` are those of the template."""

    tokenizer: bytes
    template: str
    variables: Mapping[str, Any]
    today: str | None
    train_on: str


@frozen(kw_only=True)
class Encoded:
    """A sample: its text, the ids of the whole of it, uint32, and which of them train, bool."""

    text: str
    ids: NDArray[np.integer[Any]]
    trained_mask: NDArray[np.bool_]


@final
class ChatProcess:
    """Renders and tokenizes by a recipe; a context manager, and its child ends with it.

    Raises EncodingError if the tokenizer or the template cannot be read. A child that a conversation has ended is
    replaced by another one.
    """

    def __init__(self, recipe: Recipe, limits: Limits = LIMITS) -> None:
        self._recipe = recipe
        self._limits = limits
        self._start()

    def samples(self, chats: Sequence[bytes]) -> Iterator[list[Encoded] | EncodingError]:
        """Yield the samples of each conversation, JSON, or why it has none.

        One by one where a conversation has ended the child: each of them may take all of its time.
        """
        try:
            outcomes = self._ask(chats)
        except EncodingError:
            yield from map(self._ask_alone, chats)
        else:
            yield from outcomes

    def roles(self, chats: Sequence[bytes]) -> dict[str, list[int]]:
        """Number of tokens of each role, and of those that train, over conversations that have samples.

        Raises EncodingError.
        """
        head, _ = self._child.ask({"roles": True}, chats)
        sums: dict[str, list[int]] = {}
        for outcome in head["chats"]:
            for role, (tokens, trained) in outcome["roles"].items():
                before = sums.get(role, [0, 0])
                sums[role] = [before[0] + tokens, before[1] + trained]
        return sums

    def ask(self, question: str) -> list[int]:
        """Ids of a question of the user, with the prompt for an answer. Raises EncodingError."""
        chat = {"messages": [{"role": "user", "content": question}], "tools": None}
        head, parts = self._child.ask({"ask": True}, [json.dumps(chat).encode()])
        (outcome,) = head["chats"]
        if "error" in outcome:
            raise EncodingError(outcome["error"])
        ids: list[int] = np.frombuffer(parts[0], dtype=np.uint32).tolist()
        return ids

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def _ask(self, chats: Sequence[bytes]) -> list[list[Encoded] | EncodingError]:
        head, parts = self._child.ask({}, chats)
        each = iter(parts)
        encoded = [
            Encoded(
                text=text.decode(),
                ids=np.frombuffer(next(each), dtype=np.uint32),
                trained_mask=np.frombuffer(next(each), dtype=np.bool_),
            )
            for text in each
        ]
        rest = iter(encoded)
        return [
            EncodingError(outcome["error"]) if "error" in outcome else [next(rest) for _ in range(outcome["samples"])]
            for outcome in head["chats"]
        ]

    def _ask_alone(self, chat: bytes) -> list[Encoded] | EncodingError:
        """Outcome of one conversation, as a batch does not report which of its conversations ends the process."""
        try:
            if self._child.has_ended:
                self.close()
                self._start()
            (outcome,) = self._ask([chat])
        except EncodingError as error:
            return error
        return outcome

    def _start(self) -> None:
        recipe = self._recipe
        self._child = Child("-m", "moefw.plugins.data.chat.child")
        head = {
            "variables": dict(recipe.variables),
            "today": recipe.today,
            "train_on": recipe.train_on,
            "limits": asdict(self._limits),
        }
        try:
            self._child.ask(head, [recipe.tokenizer, recipe.template.encode()])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ChatProcess:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
