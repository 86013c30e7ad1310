"""Reads conversations: rows of JSON lines and Parquet files, in three forms, made one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moefw.core.errors import Problem, nearest
from moefw.plugins.data.chat.messages import INSTEAD_OF_CONTENT
from moefw.plugins.data.chat.problems import Problems
from moefw.plugins.data.corpus import Corpus, unreadable
from moefw.plugins.data.tables import table_rows

PARQUET: Final = ".parquet"
ENDINGS: Final = (".jsonl", PARQUET)
COLUMNS: Final = ("messages", "conversations", "prompt", "completion", "tools", "system")
"""What is read of a row; other keys, such as an id, are not looked at."""
ROLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
    "system": "system",
}
"""Roles of ShareGPT's ``from``."""
_FIX: Final = "Correct the row, or take it out."
_FORMS: Final = "Write messages, conversations, or prompt and completion."


class RowError(Exception):
    """A row that is no conversation: the message says where in it, and why."""


def read_chats(corpus: Corpus) -> Iterator[tuple[str, str]]:
    """Yield the place of each conversation, and it as JSON: ``messages``, ``tools`` or null, and ``first``.

    Before message ``first``, none trains. Rows that are no conversations are told together, as many as an error lists.
    Raises DataError.
    """
    problems = Problems()
    for file in corpus.files:
        rows = _of_table if file.path.suffix == PARQUET else _of_lines
        for place, row in rows(file.path):
            if isinstance(row, Problem):
                problems.add(row)
                continue
            try:
                yield place, _written(conversation(row))
            except RowError as error:
                problems.add(Problem(f"{error}.", _FIX, place))
    problems.raise_any()


def _of_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the content of each line that is not blank; of one that is no JSON, the problem."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                place = f"{path}:{number}"
                try:
                    yield place, json.loads(line.decode())
                except json.JSONDecodeError as error:
                    yield place, _no_json(f"{place}:{error.colno}", error.msg)
                except UnicodeDecodeError as error:
                    yield place, _no_json(f"{place}:{error.start + 1}", "the byte there is not UTF-8")
                except (ValueError, RecursionError) as error:
                    yield place, _no_json(place, str(error))
    except OSError as error:
        raise unreadable(error, path) from error


def _no_json(place: str, reason: str) -> Problem:
    return Problem(f"this is not JSON: {reason}.", "Write an object a line, or leave the line out.", place)


def _of_table(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the content of each row.

    All values of a column have one structure, so a key that a row does not have is null in it, and is left out.
    """
    for place, row in table_rows(path, lambda schema: [name for name in schema.names if name in COLUMNS]):
        yield place, _without_null(row)


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def conversation(row: Any) -> Mapping[str, Any]:
    """Conversation of a row. Raises RowError."""
    if not isinstance(row, Mapping):
        raise RowError(f"the row is {_kind(row)} and no object")
    forms = {name: read for name, read in FORMS.items() if row.get(name) is not None}
    if len(forms) != 1:
        has = f"has {' and '.join(forms)}, and one says all" if forms else f"has none of {', '.join(FORMS)}"
        raise RowError(f"the row {has}. {_FORMS}".rstrip("."))
    (read,) = forms.values()
    messages, first = read(row)
    return {"messages": messages, "tools": _tools(row.get("tools")), "first": first}


def _messages(row: Mapping[str, Any]) -> tuple[list[Any], int]:
    return _checked("messages", row["messages"]), 0


def _conversations(row: Mapping[str, Any]) -> tuple[list[Any], int]:
    """Messages of ShareGPT's form, ``from`` and ``value``; those that have a role are as they are."""
    turns = row["conversations"]
    messages = []
    for index, turn in enumerate(_listed("conversations", turns)):
        where = f"conversations[{index}]"
        if not isinstance(turn, Mapping):
            raise RowError(f"{where} is {_kind(turn)} and no object")
        if "from" not in turn:
            messages.append(turn)
            continue
        role = turn["from"]
        if not isinstance(role, str) or role not in ROLES:
            raise RowError(f"{where}.from: {role!r} is no role. {nearest(str(role), ROLES)}".rstrip("."))
        if turn.get("value") is None:
            raise RowError(f"{where} has no value: write it, as an empty text if nothing was said")
        messages.append({"role": ROLES[role], "content": turn["value"]})
    system = row.get("system")
    if isinstance(system, str) and system:
        messages.insert(0, {"role": "system", "content": system})
    return _checked("conversations", messages), 0


def _completion(row: Mapping[str, Any]) -> tuple[list[Any], int]:
    """Messages of a prompt and of a completion, texts or messages; those of the prompt do not train."""
    sides = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(name)
        if value is None:
            raise RowError(f"the row has no {name}")
        sides.append(_checked(name, [{"role": role, "content": value}] if isinstance(value, str) else value))
    prompt, completion = sides
    return [*prompt, *completion], len(prompt)


FORMS: Final[Mapping[str, Callable[[Mapping[str, Any]], tuple[list[Any], int]]]] = {
    "messages": _messages,
    "conversations": _conversations,
    "prompt": _completion,
}


def _checked(name: str, messages: Any) -> list[Any]:
    """Messages, each with a role, and with content that is text or parts, or with what stands in its place."""
    for index, message in enumerate(_listed(name, messages)):
        where = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            raise RowError(f"{where} is {_kind(message)} and no object")
        if not isinstance(message.get("role"), str):
            raise RowError(f"{where}.role is {_kind(message.get('role'))} and no text")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise RowError(f"{where}.content is {_kind(content)}, and neither text nor a list of parts")
        if content is None and not any(message.get(key) for key in INSTEAD_OF_CONTENT):
            raise RowError(f"{where} has no content: write it, as an empty text if nothing was said")
    return list(messages)


def _listed(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise RowError(f"{name} is {_kind(value)} and no list of messages")
    return value


def _tools(value: Any) -> list[Any] | None:
    """Tools of a row, a list or the JSON of one, as tables have it; None for an empty one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"tools is text that is not JSON: {error}") from error
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)):
        raise RowError(f"tools is {_kind(value)} and no list of objects")
    return value or None


def _written(chat: Mapping[str, Any]) -> str:
    """JSON of a conversation, all of whose text can be UTF-8."""
    try:
        content = json.dumps(chat, ensure_ascii=False, allow_nan=False)
        content.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"it holds half a character, {error.object[error.start]!r}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"it holds what JSON cannot say: {error}") from error
    return content


def _kind(value: Any) -> str:
    if isinstance(value, list | Mapping | str) and not value:
        return f"an empty {_KINDS[type(value)]}"
    return "null" if value is None else f"a {_KINDS.get(type(value), type(value).__name__)}"


_KINDS: Final = {str: "text", list: "list", dict: "object", int: "number", float: "number", bool: "boolean"}
