"""A chat template: Jinja in a sandbox, with what ``transformers`` adds to it. Runs in the process of :mod:`.child`.

A template is somebody else's program. The sandbox keeps it from attributes and from changing what it is given; nested
loops, long strings and powers pass, so time, memory and length are limited by the process that runs it.
"""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any, Final, final

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from moefw.plugins.data.chat.messages import REASONING

Message = Mapping[str, Any]
Span = tuple[int, int]
"""First character, and the one behind the last."""

_FILE: Final = "<template>"
"""The file name that Jinja gives to the code of a template without one."""


class RenderError(Exception):
    """A conversation that cannot be rendered: the message says why, with the line of the template if it is known."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The text of a conversation, and the spans that the template marks with ``{% generation %}``, in order."""

    text: str
    spans: Sequence[Span]


@final
class Template:
    """A compiled template. Raises RenderError if ``source`` is none.

    ``variables`` are those beside the conversation, such as ``eos_token``; ``today`` is the day of ``strftime_now``.
    A text has at most ``most_chars`` characters.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], *, today: date | None, most_chars: int) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime(today),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self._variables = variables
        self._most_chars = most_chars
        self._generation: Any = environment.extensions[_Generation.identifier]
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise RenderError(f"line {error.lineno}: {error.message}") from error
        except (TemplateError, RecursionError) as error:
            raise RenderError(_said(error)) from error

    @property
    def has_marks(self) -> bool:
        """Whether ``{% generation %}`` is in the template."""
        return bool(self._generation.is_used)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, add_generation_prompt: bool = False
    ) -> Rendered:
        """Text of messages. Raises RenderError, MemoryError."""
        random.seed(0)  # what Jinja's filter ``random`` draws is the same in every run, and in every prefix
        generation = self._generation
        generation.begin()
        pieces = []
        conversation = {
            "messages": [_as_templates_expect(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            for piece in self._template.generate(**{**self._variables, **conversation}):
                pieces.append(piece)
                generation.num_written += len(piece)
                if generation.num_written > self._most_chars:
                    raise RenderError(f"it writes more than {self._most_chars:,} characters")
        except (RenderError, MemoryError):
            raise
        except Exception as error:
            raise RenderError(_with_line(error)) from error
        text = "".join(pieces)
        for begin, answer in generation.answers:
            # A macro, {% set %} or {% filter %} holds text back, and where it will be written is not known inside.
            if not text.startswith(answer, begin):
                raise RenderError(
                    "{% generation %} is inside a macro, set, filter or call block, where its place is not known; "
                    "put it outside"
                )
        return Rendered(text=text, spans=[(begin, begin + len(answer)) for begin, answer in generation.answers])


class _Generation(Extension):
    """The block ``{% generation %}``, which changes no text: notes what is written inside, and from which character."""

    tags = {"generation"}

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.is_used = False
        self.begin()

    def begin(self) -> None:
        """Start a text."""
        self.num_written = 0
        self.answers: list[tuple[int, str]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        """Call of :meth:`_note` with what the block renders."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        answer = caller()
        self.answers.append((self.num_written, answer))
        return answer


class _Dict:
    """The global ``dict``, without the attributes of the type."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """The global ``namespace``, whose names do not begin with an underscore: these would reach Python's own."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *pairs = args
        values = dict(*pairs, **named)
        for name in values:
            _require_plain(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain(name)
        super().__setitem__(name, value)


def _require_plain(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name that begins with an underscore, such as {name!r}")


@final
class _Arguments(dict[str, Any]):
    """Arguments of a tool call that a row has as JSON in a text: an object, and the text where it is joined to one.

    So templates that encode arguments themselves do not encode them twice, and those that write them as they are still
    do. Servers such as vLLM decode them, too.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, behind: str) -> str:
        return self._text + behind

    def __radd__(self, before: str) -> str:
        return before + self._text


def _with_arguments(call: Any) -> Any:
    """A tool call, or the ``function`` in it, whose arguments are an object if they are JSON of one in a text."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"])}
    text = call.get("arguments")
    if isinstance(text, str):
        with suppress(ValueError, RecursionError):
            values = json.loads(text or "{}")  # OpenAI's API writes an empty text where there are none
            if isinstance(values, dict):
                return {**call, "arguments": _Arguments(values, text)}
    return call


def _as_templates_expect(message: Message) -> Message:
    """Message without keys that are null, its reasoning under the names that templates read, its arguments objects."""
    seen = {key: value for key, value in message.items() if value is not None}
    if isinstance(seen.get("tool_calls"), list):
        seen["tool_calls"] = [_with_arguments(call) for call in seen["tool_calls"]]
    reasoning = next((seen[key] for key in REASONING if key in seen), None)
    return seen if reasoning is None else {"thinking": reasoning, **seen, "reasoning_content": reasoning}


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON; Jinja's own filter would write HTML's ``<`` as an escape."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime(today: date | None) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        if today is None:
            raise TemplateError("it writes the date of today, and the spec has none: set data.date: '2026-01-31'")
        return datetime.combine(today, time()).strftime(format)

    return strftime_now


def _with_line(error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    return f"line {lines[-1]}: {_said(error)}" if lines else _said(error)


def _said(error: BaseException) -> str:
    """First line of an exception's message."""
    return next(iter(str(error).splitlines()), type(error).__name__)
