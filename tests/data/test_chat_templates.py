"""Conversations become the tokens of ``transformers``; those that train are those of its mask, or what prefixes tell."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from chat_cases import CONVERSATIONS, GLM_45, HARMONY, LLAMA, MIXTRAL, QWEN3, STYLES, TODAY, tokenizer, without_marks
from moefw.plugins.data.chat.process import ChatProcess, Encoded, Limits, Recipe
from moefw.plugins.data.child import EncodingError

EACH_STYLE = pytest.mark.parametrize("style", STYLES)
EACH_CONVERSATION = pytest.mark.parametrize("conversation", CONVERSATIONS)
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
ASK = [{"role": "user", "content": "a"}]
ANSWERED = [*ASK, {"role": "assistant", "content": "b"}]
TWICE = [*ANSWERED, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]


def recipe(template: str, *, train_on: str = "assistant", today: str | None = TODAY) -> Recipe:
    return Recipe(
        tokenizer=tokenizer().to_str().encode(),
        template=template,
        variables=VARIABLES,
        today=today,
        train_on=train_on,
    )


def chat(messages: list[Any], tools: list[Any] | None = None, *, first: int = 0) -> bytes:
    return json.dumps({"messages": messages, "tools": tools, "first": first}).encode()


def samples(template: str, content: bytes, limits: Limits = Limits(), **more: Any) -> list[Encoded]:  # noqa: B008
    with ChatProcess(recipe(template, **more), limits) as process:
        (outcome,) = process.samples([content])
    if isinstance(outcome, EncodingError):
        raise outcome
    return outcome


def reason(template: str, content: bytes, limits: Limits = Limits(), **more: Any) -> str:  # noqa: B008
    with pytest.raises(EncodingError) as caught:
        samples(template, content, limits, **more)
    return caught.value.reason


def marked(sample: Encoded) -> list[str]:
    """The runs of trained tokens, as text."""
    made = tokenizer()
    runs: list[list[int]] = []
    before = False
    for id, trains in zip(sample.ids.tolist(), sample.trained_mask.tolist(), strict=True):
        if trains:
            runs = runs if before else [*runs, []]
            runs[-1].append(id)
        before = trains
    return [made.decode(run, skip_special_tokens=False) for run in runs]


@pytest.fixture
def at_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """``transformers`` has no date but that of the clock."""
    from datetime import datetime

    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.fromisoformat(TODAY)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


@EACH_CONVERSATION
@EACH_STYLE
@pytest.mark.parametrize("with_marks", [True, False])
def test_ids_and_masks_are_those_of_transformers(
    style: str, conversation: str, with_marks: bool, at_today: None
) -> None:
    from transformers import PreTrainedTokenizerFast

    template = STYLES[style] if with_marks else without_marks(STYLES[style])
    messages, tools = (CONVERSATIONS[conversation].get(name) for name in ("messages", "tools"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=template, **VARIABLES)
    due = theirs.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    (sample,) = samples(template, chat(messages, tools), train_on="assistant" if with_marks else "all")
    assert sample.ids.tolist() == due["input_ids"]
    assert sample.text == theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    if with_marks:
        assert sample.trained_mask.tolist() == [bool(trains) for trains in due["assistant_masks"]]
        assert 0 < sample.trained_mask.mean() < 1


@pytest.mark.fault(
    "a template without {% generation %} (Megatron-Bridge#3359)",
    "spans come from prefixes, neither all tokens nor none",
)
@pytest.mark.parametrize("style", ["DeepSeek-V3", "Mixtral", "GLM-4.5"])
@EACH_CONVERSATION
def test_without_marks_prefixes_tell_the_same_tokens(style: str, conversation: str) -> None:
    messages, tools = (CONVERSATIONS[conversation].get(name) for name in ("messages", "tools"))
    (with_marks,) = samples(STYLES[style], chat(messages, tools))
    (without,) = samples(without_marks(STYLES[style]), chat(messages, tools))
    assert without.ids.tolist() == with_marks.ids.tolist()
    assert without.trained_mask.tolist() == with_marks.trained_mask.tolist()


@pytest.mark.fault("a key that is null, as tables have it, which a template writes as None", "it is left out")
def test_a_key_of_a_message_that_is_null_is_left_out() -> None:
    template = "{{ messages[0].name | default('nobody') }} {{ messages[0].keys() | join(',') }}"
    (sample,) = samples(template, chat([{"role": "user", "content": "a", "name": None}]), train_on="all")
    assert sample.text == "nobody role,content"


def test_the_end_of_a_turn_trains_and_the_header_of_the_role_does_not() -> None:
    (sample,) = samples(without_marks(LLAMA), chat(TWICE))
    assert marked(sample) == ["b<|eot_id|>", "d<|eot_id|>"]


def test_a_token_that_is_in_a_span_with_a_part_trains() -> None:
    template = "a{{ messages[0].content[:2] }}{% generation %}{{ messages[0].content[2:] }}{% endgeneration %}"
    (sample,) = samples(template, chat([{"role": "assistant", "content": "Hello there"}]))
    assert marked(sample)[0].endswith("llo there"), "the token that begins before the span is whole"


@pytest.mark.parametrize("with_marks", [True, False])
def test_only_the_last_answer_trains_or_those_of_a_completion(with_marks: bool) -> None:
    template = LLAMA if with_marks else without_marks(LLAMA)
    (last,) = samples(template, chat(TWICE), train_on="last")
    assert marked(last) == ["d<|eot_id|>"]
    (completion,) = samples(template, chat(TWICE, first=2))
    assert marked(completion) == ["d<|eot_id|>"]
    (each,) = samples(template, chat(TWICE, first=2), train_on="each")
    assert marked(each) == ["d<|eot_id|>"]


@pytest.mark.fault("a template that drops earlier reasoning, whose prefixes differ", "an error with the place, or each")
def test_a_template_that_writes_earlier_answers_otherwise_is_an_error_that_names_each() -> None:
    content = chat(CONVERSATIONS["three turns"]["messages"])
    said = reason(without_marks(QWEN3), content)
    assert said.startswith("the text up to messages[2], an answer, is another one when messages follow: at character ")
    assert "the one goes on '<think>\\n" in said
    assert "use train_on: each" in said
    assert "{% generation %}" in said


@pytest.mark.parametrize("template", [QWEN3, without_marks(QWEN3), HARMONY, without_marks(HARMONY)])
def test_each_answer_is_a_sample_as_inference_sees_it(template: str) -> None:
    messages = CONVERSATIONS["three turns"]["messages"]
    each = samples(template, chat(messages), train_on="each")
    assert len(each) == 3
    for sample, count in zip(each, (3, 5, 7), strict=True):
        (alone,) = samples(template, chat(messages[:count]), train_on="last")
        assert sample.ids.tolist() == alone.ids.tolist()
        assert sample.trained_mask.tolist() == alone.trained_mask.tolist()
        assert len(marked(sample)) == 1
    assert "a number" in marked(each[1])[0]
    assert "a number" not in each[2].text


def test_a_conversation_without_an_answer_is_told() -> None:
    assert reason(LLAMA, chat(ASK)).startswith("no message of the assistant is left to train on")
    (whole,) = samples(LLAMA, chat(ASK), train_on="all")
    assert whole.trained_mask.all()


def test_the_date_is_that_of_the_spec_or_an_error() -> None:
    (sample,) = samples(HARMONY, chat(ANSWERED), today="2020-02-29")
    assert "Today: 2020-02-29" in sample.text
    said = reason(HARMONY, chat(ANSWERED), today=None)
    assert "line 2: it writes the date of today, and the spec has none: set data.date" in said
    (undated,) = samples(GLM_45, chat(ANSWERED), today=None)
    assert undated.trained_mask.any()


def test_what_a_template_draws_is_the_same_every_time() -> None:
    template = "{{ range(99999) | random }} {{ range(99999) | random }}" + without_marks(LLAMA)
    (first,), (again,) = (samples(template, chat(TWICE)) for _ in range(2))
    assert first.text == again.text
    drawn = first.text.split("\n")[0].split("<s>")[0].split()
    assert drawn[0] != drawn[1]
    assert marked(first) == ["b<|eot_id|>", "d<|eot_id|>"], "prefixes draw the same, too"


@pytest.mark.parametrize(
    "template",
    [
        "{% macro say(text) %}y{% generation %}{{ text }}{% endgeneration %}{% endmacro %}x{{ say('b') }}",
        "x{% set text %}y{% generation %}b{% endgeneration %}{% endset %}{{ text }}",
    ],
)
def test_a_mark_whose_place_is_not_known_is_told(template: str) -> None:
    assert "is inside a macro, set, filter or call block" in reason(template, chat(ANSWERED))


HOSTILE = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "more time than",
    ),
    "a power": ("{{ 9 ** (99999999 * (messages | length)) % 7 }}", "more time than"),
    "a long string": ("{{ ('a' * (messages | length * 3000000000)) | length }}", "more memory than"),
    "strings that grow": (
        "{% set s = namespace(t='a') %}{% for a in range(60) %}{% set s.t = s.t + s.t %}{% endfor %}{{ s.t | length }}",
        "more memory than",
    ),
    "a text without end": (
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ 'text' }}{% endfor %}{% endfor %}",
        "it writes more than 100,000 characters",
    ),
    "an attribute of Python": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "a namespace of Python's": ("{% set n = namespace(__class__=1) %}{{ n.x }}", "line 1: a namespace has no name"),
    "a list that it changes": (
        "{{ messages.append(1) }}",
        "line 1: access to attribute 'append' of 'list' object is unsafe",
    ),
    "a range": ("{% for a in range(10 ** 9) %}{% endfor %}", "line 1: Range too big"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "a file": ("{% include '/etc/passwd' %}", "line 1: no loader for this environment"),
}


@pytest.mark.fault("a template that takes all time, memory or disk", "a message, and the other conversations are read")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_a_message(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    body, said = HOSTILE[name]
    template = f"{{% if messages[0].content == 'bad' %}}{body}{{% endif %}}{MIXTRAL}"
    bad = [{"role": "user", "content": "bad"}, {"role": "assistant", "content": "b"}]
    limits = Limits(cpu_s=1 if "time" in said else 20, bytes=1 << 28, chars=100_000)
    with ChatProcess(recipe(template), limits) as process:
        first, outcome, last = process.samples([chat(ANSWERED), chat(bad), chat(ANSWERED)])
    assert isinstance(outcome, EncodingError)
    assert said in outcome.reason
    for sound in (first, last):
        assert isinstance(sound, list)
        assert marked(sound[0]) == [" b</s>"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.fault("a template whose constants take all time, which Jinja computes as it reads it", "a message")
def test_a_template_that_is_hostile_as_it_is_read_ends_in_a_message() -> None:
    assert reason("{{ 9 ** 99999999 % 7 }}", chat(ANSWERED), Limits(cpu_s=1)) == "it took more time than any text needs"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a\n{% if %}", "its chat template cannot be read: line 2: Expected an expression"),
        ("{% generation %}", "its chat template cannot be read: line 1: Unexpected end of template"),
        ("\n\n{{ raise_exception('no tools here') }}", "line 3: no tools here"),
        ("{{ messages[0].content.none.at_all }}", "line 1: 'str object' has no attribute 'none'"),
        ("{{ 1 / 0 }}", "line 1: division by zero"),
    ],
)
def test_a_template_that_fails_is_told_with_its_line(template: str, said: str) -> None:
    assert said in reason(template, chat(ANSWERED))


def test_a_tokenizer_that_is_none_is_told() -> None:
    with pytest.raises(EncodingError, match=r"its tokenizer\.json cannot be read: "):
        ChatProcess(evolve(recipe(MIXTRAL), tokenizer=b"{}"))
