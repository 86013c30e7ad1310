"""Which characters of a conversation train: those inside ``{% generation %}``, else what prefixes tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moefw.plugins.data.chat.template import Message, Rendered, RenderError, Span, Template

ASSISTANT: Final = "assistant"
SHOWN: Final = 24
"""Characters that an error shows on each side of a place."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The text of ``messages``, to tokenize whole; tokens that overlap one of the ``spans`` train."""

    messages: Sequence[Message]
    text: str
    spans: Sequence[Span]


def samples(template: Template, chat: Mapping[str, Any], train_on: str) -> list[Sample]:
    """Samples of a conversation: with ``each``, one for each answer that trains, else one. Raises RenderError.

    ``chat`` has ``messages``, ``tools`` or null, and ``first``, before which no message trains.
    """
    messages: Sequence[Message] = chat["messages"]
    tools = chat["tools"]
    if train_on == "all":
        text = template.render(messages, tools).text
        return [Sample(messages=messages, text=text, spans=[(0, len(text))])]
    answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    chosen = [index for index in answers if index >= chat["first"]]
    if not chosen:
        raise RenderError(f"no message of the {ASSISTANT} is left to train on; use train_on: all, or leave it out")
    if train_on == "each":
        return [_last_answer(template, messages[: index + 1], tools) for index in chosen]
    if train_on == "last":
        chosen = chosen[-1:]
    whole = template.render(messages, tools)
    if template.has_marks:
        return [Sample(messages=messages, text=whole.text, spans=_marked(template, whole, messages, tools, chosen[0]))]
    return [
        Sample(
            messages=messages,
            text=whole.text,
            spans=[_span(template, whole, messages, tools, index) for index in chosen],
        )
    ]


def role_ends(template: Template, sample: Sample, tools: Any) -> list[tuple[int, str]]:
    """The character behind each message in the text of a sample, and the message's role.

    Prefixes tell. Where one is not rendered, or is none of the text, messages count as one with those behind them, and
    their roles are joined: ``system+user``.
    """
    ends = []
    roles: list[str] = []
    for count, message in enumerate(sample.messages, 1):
        roles.append(message["role"])
        try:
            text = template.render(sample.messages[:count], tools).text
        except RenderError:
            continue
        if sample.text.startswith(text):
            ends.append((len(text), "+".join(dict.fromkeys(roles))))
            roles = []
    return ends


def _last_answer(template: Template, messages: Sequence[Message], tools: Any) -> Sample:
    """Sample of the conversation up to an answer, its last message, as inference saw it."""
    whole = template.render(messages, tools)
    last = len(messages) - 1
    if template.has_marks:
        return Sample(messages=messages, text=whole.text, spans=_marked(template, whole, messages, tools, last))
    prompt = template.render(messages[:last], tools, add_generation_prompt=True).text
    if not whole.text.startswith(prompt):
        what = f"before messages[{last}], an answer, the prompt of inference is no prefix of its text"
        raise RenderError(f"{what}: {_parting(prompt, whole.text)}; {_MARK_IT}")
    return Sample(messages=messages, text=whole.text, spans=[(len(prompt), len(whole.text))])


def _marked(template: Template, whole: Rendered, messages: Sequence[Message], tools: Any, first: int) -> Sequence[Span]:
    """Spans of the marks of the messages from ``first`` on: the others are those of the messages before it."""
    if not any(message["role"] == ASSISTANT for message in messages[:first]):
        return whole.spans
    return whole.spans[len(template.render(messages[:first], tools).spans) :]


def _span(template: Template, whole: Rendered, messages: Sequence[Message], tools: Any, index: int) -> Span:
    """Span of an answer: behind what inference prompts with, to the end of the turn."""
    prompt = template.render(messages[:index], tools, add_generation_prompt=True).text
    with_answer = template.render(messages[: index + 1], tools).text
    for name, prefix in (("before", prompt), ("up to", with_answer)):
        if not whole.text.startswith(prefix):
            what = f"the text {name} messages[{index}], an answer, is another one when messages follow"
            raise RenderError(f"{what}: {_parting(prefix, whole.text)}; {_USE_EACH}, or {_MARK_IT}")
    return len(prompt), len(with_answer)


_MARK_IT: Final = "mark answers in the template with {% generation %}"
_USE_EACH: Final = "use train_on: each, which makes a sample of each answer, as inference sees it"


def _parting(prefix: str, whole: str) -> str:
    """Where a text stops being a prefix of another one, and how both go on."""
    pairs = enumerate(zip(prefix, whole, strict=False))
    place = next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(prefix), len(whole)))
    before = whole[max(0, place - SHOWN) : place]
    ways = [repr(text[place : place + SHOWN]) for text in (prefix, whole)]
    return f"at character {place}, behind {before!r}, the one goes on {ways[0]} and the other {ways[1]}"
