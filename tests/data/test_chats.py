"""Conversations in rows become samples of which answers train; a row that is none is told with its place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from chat_cases import CONVERSATIONS, LLAMA, MIXTRAL, QWEN3, TODAY, WEATHER, tokenizer, without_marks, write_folder
from data_cases import all_of, examples, prepared_folders
from moefw import DataError
from moefw.plugins.data.blend import Blend
from moefw.plugins.data.chat import Chat
from moefw.plugins.data.chat.rows import RowError, conversation
from moefw.plugins.data.chat.template import Template
from resolved_specs import problems_of

ASKED = {"role": "user", "content": "Hello?"}


def answered(number: int, words: int = 1) -> dict[str, Any]:
    answer = " ".join(["answer"] * words)
    return {"messages": [ASKED, {"role": "assistant", "content": f"{answer} {number}"}]}


ROWS = [answered(number) for number in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tokenizer", LLAMA)


@pytest.fixture
def chats(tmp_path: Path, folder: Path) -> Callable[..., Chat]:
    """A source of rows, written as JSON lines."""

    def of_rows(rows: list[Any] | str | bytes = ROWS, **options: Any) -> Chat:
        path = tmp_path / "rows.jsonl"
        content = "".join(json.dumps(row) + "\n" for row in rows) if isinstance(rows, list) else rows
        content = content if isinstance(content, bytes) else content.encode()
        if not (path.exists() and path.read_bytes() == content):
            path.write_bytes(content)
        return Chat(**{"path": str(path), "tokenizer": str(folder), "date": TODAY, "heldout": 0.3} | options)

    return of_rows


def documents(source: Any, side: str = "train") -> list[tuple[str, str]]:
    """The text of each sample, and of its tokens that train."""
    stream = getattr(source, side)
    ids = np.array(all_of(stream))
    trained = stream.trained(0, len(stream))
    bounds = [*stream.document_starts(0, len(stream)).tolist(), len(stream)]
    return [
        (source.decode(ids[begin:end].tolist()), source.decode(ids[begin:end][trained[begin:end]].tolist()))
        for begin, end in pairwise(bounds)
    ]


def message(chat: Chat, cache: Path) -> list[str]:
    with pytest.raises(DataError) as caught:
        chat.prepare(cache)
    assert not cache.exists() or prepared_folders(cache) == [], "nothing half is left"
    return [str(problem) for problem in caught.value.problems]


def meta(cache: Path) -> Mapping[str, Any]:
    (prepared,) = prepared_folders(cache)
    return json.loads((prepared / "meta.json").read_text())


def test_every_conversation_is_a_sample_of_one_side_and_its_answer_trains(chats: Any, cache: Path) -> None:
    source = chats().prepare(cache)
    train, heldout = documents(source), documents(source, "heldout")
    assert sorted(answer for _, answer in train + heldout) == sorted(f"answer {n}<|eot_id|>" for n in range(40))
    assert all(text.endswith(answer) and text.startswith("<s>") for text, answer in train + heldout)
    assert 5 < len(heldout) < 20
    assert source.heldout_bytes.decode() == "".join(text for text, _ in heldout)
    assert source.train.trained(3, 5).tolist() == source.train.trained(0, 8)[3:].tolist()


def test_prepared_conversations_are_used_again_and_made_anew_for_other_options(
    chats: Any, cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = chats().prepare(cache)
    options = [
        {"date": "2026-02-01"},
        {"variables": {"enable_thinking": False}},
        {"train_on": "all"},
        {"max_tokens": 999},
        {"heldout": 0.4},
    ]
    assert len({chats(**option).prepare(cache).digest for option in options} | {first.digest}) >= 4
    assert len(prepared_folders(cache)) == 6
    (folder / "chat_template.jinja").write_text(LLAMA + "{# another one #}")
    chats().prepare(cache)
    assert len(prepared_folders(cache)) == 7
    monkeypatch.setattr("moefw.plugins.data.chat.prepare.read_chats", lambda *_: pytest.fail("read again"))
    assert chats().prepare(cache).digest == first.digest


FORMS = {
    "messages": ({"messages": [ASKED, {"role": "assistant", "content": "Yes"}]}, 0),
    "conversations": ({"conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Yes"}]}, 0),
    "conversations with roles": ({"conversations": [ASKED, {"role": "assistant", "content": "Yes"}]}, 0),
    "texts": ({"prompt": "Hello?", "completion": "Yes"}, 1),
    "prompt and completion": ({"prompt": [ASKED], "completion": [{"role": "assistant", "content": "Yes"}]}, 1),
    "with null": ({"messages": None, "prompt": "Hello?", "completion": "Yes", "id": 3}, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_three_forms_of_rows_are_one_conversation(form: str) -> None:
    row, first = FORMS[form]
    messages = [ASKED, {"role": "assistant", "content": "Yes"}]
    assert conversation(row) == {"messages": messages, "tools": None, "first": first}


# As the tokenizers of Qwen2.5, and of DeepSeek-V3, have it: of an answer with tool calls, without marks.
QWEN25_CALLS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for tool_call in message.tool_calls or [] %}
        {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
        {{- '\\n<tool_call>\\n{"name": "' }}{{ tool_call.name }}{{ '", "arguments": ' }}
        {{- tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
JOINED = {
    "tojson": QWEN25_CALLS,
    "+": QWEN25_CALLS.replace("tool_call.arguments | tojson", "'' + tool_call.arguments + ''"),
    "~": QWEN25_CALLS.replace("tool_call.arguments | tojson", "tool_call.arguments ~ ''"),
    "alone": QWEN25_CALLS.replace("tool_call.arguments | tojson", "tool_call.arguments"),
}


def rendered_call(arguments: object, template: str) -> str:
    """What a template shows of the arguments of a tool call."""
    answer = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "weather"}}]}
    answer["tool_calls"][0]["function"]["arguments"] = arguments  # type: ignore[index]
    text = Template(template, {}, today=None, most_chars=1000).render([ASKED, answer], None).text
    return text.partition('"arguments": ')[2].partition("}\n</tool_call>")[0]


def test_arguments_in_a_text_are_encoded_once_and_joined_as_they_are_written() -> None:
    written = '{"town":"Oslo"}'
    assert rendered_call({"town": "Oslo"}, JOINED["tojson"]) == '{"town": "Oslo"}'
    assert rendered_call(written, JOINED["tojson"]) == '{"town": "Oslo"}'
    assert rendered_call("", JOINED["tojson"]) == "{}"
    for joined in ("+", "~", "alone"):
        assert rendered_call(written, JOINED[joined]) == written


@pytest.mark.parametrize("text", ["Oslo", "[1]", '[["town", "Oslo"]]', "null", '{"town": '])
def test_arguments_that_are_no_object_stay_text(text: str) -> None:
    assert rendered_call(text, JOINED["+"]) == text
    assert rendered_call(text, JOINED["tojson"]) == json.dumps(text)


def test_a_row_keeps_its_tools_reasoning_and_system() -> None:
    row = {**CONVERSATIONS["tools"], "tools": json.dumps([WEATHER])}
    assert conversation(row) == {**CONVERSATIONS["tools"], "tools": [WEATHER], "first": 0}
    turns = [{"from": "human", "value": "a"}, {"from": "observation", "value": "b"}, {"from": "gpt", "value": "c"}]
    messages = conversation({"system": "Be kind.", "conversations": turns})["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "tool", "assistant"]


def test_a_prompt_with_answers_does_not_train(chats: Any, cache: Path) -> None:
    history = [ASKED, {"role": "assistant", "content": "earlier"}, ASKED]
    rows = [{"prompt": history, "completion": f"now {number}"} for number in range(9)]
    for text, answer in documents(chats(rows).prepare(cache)):
        assert "earlier" in text
        assert answer.startswith("now ")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([], "the row is an empty list and no object"),
        (
            {"text": "a"},
            "the row has none of messages, conversations, prompt. Write messages, conversations, or prompt",
        ),
        ({"messages": [ASKED], "prompt": "a"}, "the row has messages and prompt, and one says all"),
        ({"prompt": "a"}, "the row has no completion"),
        ({"messages": []}, "messages is an empty list and no list of messages"),
        ({"messages": [ASKED, "b"]}, "messages[1] is a text and no object"),
        ({"messages": [ASKED, {"content": "b"}]}, "messages[1].role is null and no text"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content is a number, and neither text nor a list",
        ),
        (
            {"conversations": [{"from": "humn", "value": "a"}]},
            "conversations[0].from: 'humn' is no role. Did you mean 'hum",
        ),
        ({"conversations": [{"from": [], "value": "a"}]}, "conversations[0].from: [] is no role."),
        ({"conversations": [{"from": "gpt", "text": "a"}]}, "conversations[0] has no value: write it, as an empty"),
        (
            {"messages": [ASKED, {"role": "assistant", "text": "b"}]},
            "messages[1] has no content: write it, as an empty",
        ),
        ({"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": []}]}, "messages[1] has no content"),
        ({"messages": [ASKED], "tools": "{"}, "tools is text that is not JSON: "),
        ({"messages": [ASKED], "tools": [3]}, "tools is a list and no list of objects"),
    ],
)
def test_a_row_that_is_no_conversation_is_told(row: Any, told: str) -> None:
    with pytest.raises(RowError) as caught:
        conversation(row)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("said", [{"content": ""}, {"tool_calls": [{}]}, {"reasoning_content": "hm"}])
def test_a_message_may_say_nothing_or_something_else_than_content(said: dict[str, Any]) -> None:
    messages = [ASKED, {"role": "assistant", **said}]
    assert conversation({"messages": messages})["messages"] == messages


keys = st.sampled_from(["messages", "conversations", "prompt", "completion", "tools", "system", "role", "from"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["user", "human", "gpt", "assistant", "[]", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@examples
@given(st.dictionaries(keys, values, max_size=4) | values)
def test_any_row_is_a_conversation_or_told(row: Any) -> None:
    try:
        chat = conversation(row)
    except RowError:
        return
    assert chat["messages"]
    assert all(isinstance(each["role"], str) for each in chat["messages"])
    assert 0 <= chat["first"] <= len(chat["messages"])


@pytest.mark.fault(
    "bad lines among many of a file of chats", "file, line and column of all of them, and nothing is lost"
)
def test_all_bad_lines_are_told_at_once_with_file_line_and_column(chats: Any, cache: Path) -> None:
    good = json.dumps(answered(1))
    lines = [good, '{"messages": }', "", '{"id": 3}', good, '{"messages": [{"role": "user", "content": "\\ud800"}]}']
    chat = chats("\n".join([*lines, '{"a": Infinity, "messages": [{"role": "user", "content": "b", "x": NaN}]}']))
    told = message(chat, cache)
    assert (
        told[0]
        == f"{chat.path}:2:14: this is not JSON: Expecting value. Write an object a line, or leave the line out."
    )
    assert told[1].startswith(f"{chat.path}:4: the row has none of messages, conversations, prompt.")
    assert told[2].startswith(f"{chat.path}:6: it holds half a character")
    assert told[3].startswith(f"{chat.path}:7: it holds what JSON cannot say")
    assert len(told) == 4


def test_a_line_that_is_not_utf8_is_told_and_of_many_as_many_as_an_error_lists(chats: Any, cache: Path) -> None:
    chat = chats(b'{"a": "\xff"}\n' + b"[\n" * 99)
    told = message(chat, cache)
    assert told[0].startswith(f"{chat.path}:1:8: this is not JSON: the byte there is not UTF-8.")
    assert len(told) == 16


def test_what_a_template_refuses_is_told_with_the_place_of_the_row(chats: Any, cache: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(MIXTRAL)
    strange = [{"messages": [{"role": "critic", "content": str(number)}, *ROWS[0]["messages"]]} for number in range(3)]
    chat = chats([*strange, *ROWS])
    told = message(chat, cache)
    assert len(told) == 3
    assert f"{chat.path}:1: this conversation cannot be rendered: line 11: no role critic." in told


def test_a_template_that_drops_reasoning_names_each_and_each_trains_all_answers(
    chats: Any, cache: Path, folder: Path
) -> None:
    (folder / "chat_template.jinja").write_text(without_marks(QWEN3))
    rows = [
        {"messages": [*CONVERSATIONS["three turns"]["messages"], {"role": "user", "content": str(n)}]} for n in range(9)
    ]
    assert all("use train_on: each" in problem for problem in message(chats(rows), cache))
    source = chats(rows, train_on="each").prepare(cache)
    samples = documents(source) + documents(source, "heldout")
    assert len(samples) == 27
    assert all("<think>" in answer for _, answer in samples)


def test_long_samples_are_cut_dropped_or_an_error_and_counted(chats: Any, cache: Path, tmp_path: Path) -> None:
    rows = [answered(number, words=1 + 40 * (number % 2)) for number in range(40)]
    whole = documents(chats(rows).prepare(tmp_path / "whole"))
    cut = chats(rows, max_tokens=60, too_long="truncate").prepare(cache / "cut")
    for (text, answer), (whole_text, whole_answer) in zip(documents(cut), whole, strict=True):
        assert whole_text.startswith(text)
        assert whole_answer.startswith(answer)
    counts = meta(cache / "cut")["samples"]
    assert counts["train"]["samples"] == len(whole)
    assert sum(side["truncated"] for side in counts.values()) == 20
    starts = cut.train.document_starts(0, len(cut.train)).tolist()
    assert max(end - begin for begin, end in pairwise([*starts, len(cut.train)])) == 60
    assert any("cut at max_tokens: " in line for line in cut.preview())
    dropped = chats(rows, max_tokens=60, too_long="drop").prepare(cache / "drop")
    assert documents(dropped) == [pair for pair in whole if "answer answer" not in pair[0]]
    assert sum(side["dropped"] for side in meta(cache / "drop")["samples"].values()) == 20
    told = message(chats(rows, max_tokens=60), cache / "error")
    assert len(told) == 16, "20 are too long, and an error lists 16"
    assert "tokens, and data.max_tokens is 60. Raise it, or choose too_long: truncate or drop." in told[0]


@pytest.mark.fault("a template whose marks hold nothing: a mask of zeros", "an error, not a run that learns nothing")
def test_nothing_that_trains_is_an_error(chats: Any, cache: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}{% generation %}{% endgeneration %}")
    told = message(chats(), cache)
    assert [problem.split(" tokens of the ")[1] for problem in told] == [
        f"{side} side trains (0 dropped). Check what the template marks with {{% generation %}}, the roles of the "
        "messages, and data.max_tokens."
        for side in ("train", "heldout")
    ]


@pytest.mark.fault("a mask that is all ones (Megatron-Bridge#3359)", "an error, unless all is what the user chose")
def test_everything_that_trains_is_an_error_unless_it_is_asked_for(chats: Any, cache: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% generation %}{{ messages | tojson }}{% endgeneration %}")
    told = message(chats(), cache)
    assert "tokens of the train side train, those of prompts, too. Mark answers alone with" in told[0]
    source = chats(train_on="all").prepare(cache)
    assert source.train.trained(0, len(source.train)).all()


def test_the_preview_shows_shares_and_marks_what_trains(chats: Any, cache: Path) -> None:
    lines = chats().prepare(cache).preview()
    share = meta(cache)["samples"]["train"]
    told = f"{share['samples']:,} samples to train on; {share['trained'] / share['tokens']:.1%} of their tokens train"
    assert lines[0] == f"{told} (train_on: assistant)"
    roles = meta(cache)["roles"]
    assert list(roles) == ["user", "assistant"]
    assert roles["user"][1] == 0
    assert roles["assistant"][0] > roles["assistant"][1] == share["trained"], "the header of the role does not train"
    assert sum(tokens for tokens, _ in roles.values()) == share["tokens"]
    assert f"({share['trained']:,} train)" in lines[1]
    assert "⟦answer 0<|eot_id|>⟧" in "\n".join(lines)
    assert "\n".join(lines).count("⟦") == 1 + 2, "the line that explains, and two samples"


@pytest.mark.fault("a template whose marks leave out the end of a turn (trl#5988)", "the preview says so")
def test_the_preview_tells_if_no_end_of_a_turn_trains(chats: Any, cache: Path, folder: Path) -> None:
    told = "no special token trains"
    assert not any(told in line for line in chats().prepare(cache).preview())
    ended = "{{- '<|eot_id|>' }}\n        {%- endgeneration %}"
    assert ended in LLAMA
    open_end = LLAMA.replace(ended, "{%- endgeneration %}\n        {{- '<|eot_id|>' }}")
    (folder / "chat_template.jinja").write_text(open_end)
    assert any(told in line for line in chats().prepare(cache).preview())


def test_the_preview_of_a_long_sample_shows_where_it_begins_to_train(chats: Any, cache: Path) -> None:
    asked = {"role": "user", "content": "word " * 900}
    rows = [{"messages": [asked, {"role": "assistant", "content": f"yes {n} " * 400}]} for n in range(9)]
    *_, shown, last = chats(rows).prepare(cache).preview()
    assert "<|start_header_id|>assistant" in "\n".join(chats(rows).prepare(cache).preview())
    assert "⟦yes " in last
    assert last.endswith(" tokens")
    assert shown == ""


@pytest.mark.parametrize("train_on", ["each", "all"])
def test_roles_whose_messages_prefixes_do_not_part_count_as_one(
    chats: Any, cache: Path, folder: Path, train_on: str
) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% if messages[-1].role == 'system' %}{{ raise_exception('who asks?') }}{% endif %}" + without_marks(QWEN3)
    )
    rows = [{"messages": [{"role": "system", "content": "Be kind."}, *row["messages"]]} for row in ROWS]
    chats(rows, train_on=train_on).prepare(cache)
    roles = meta(cache)["roles"]
    assert list(roles) == ["system+user", "assistant"]
    assert sum(tokens for tokens, _ in roles.values()) == meta(cache)["samples"]["train"]["tokens"]
    assert sum(trained for _, trained in roles.values()) == meta(cache)["samples"]["train"]["trained"]


def test_tables_hold_the_same_conversations(chats: Any, cache: Path, tmp_path: Path) -> None:
    rows = [{**CONVERSATIONS["tools"], "tools": json.dumps([WEATHER])}, *ROWS]
    chat = chats(rows)
    path = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"id": 3, **row} for row in rows]), path)
    table = Chat(path=str(path), tokenizer=chat.tokenizer, date=TODAY, heldout=0.3)
    assert table.prepare(cache).digest == chat.prepare(cache).digest


def test_a_folder_is_read_in_the_order_of_names(chats: Any, cache: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:20]), both / "a.parquet")
    shutil.copy(chats(ROWS[20:]).path, both / "b.jsonl")
    (both / "notes.txt").write_text("no rows")
    chat = chats()
    train = documents(chat.prepare(cache))
    assert documents(Chat(path=str(both), tokenizer=chat.tokenizer, date=TODAY, heldout=0.3).prepare(cache)) == train


@pytest.mark.parametrize(
    ("config", "template", "told"),
    [
        ({"chat_template": LLAMA}, None, None),
        ({"chat_template": "{{ other }}"}, LLAMA, None),
        ({}, None, "has neither chat_template.jinja nor a chat_template in tokenizer_config.json. Name the file of a"),
        (
            {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
            None,
            "tokenizer_config.json has several chat templates: default, tool_use. Write one of them to a file.",
        ),
        ([], None, "tokenizer_config.json holds no JSON object. Download it again."),
    ],
)
def test_the_template_is_the_folders_own(
    chats: Any, cache: Path, folder: Path, config: Any, template: str | None, told: str | None
) -> None:
    (folder / "chat_template.jinja").unlink()
    if isinstance(config, dict):
        config = {"bos_token": "<s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if told is None:
        assert "⟦answer 0<|eot_id|>⟧" in "\n".join(chats().prepare(cache).preview())
    else:
        (problem,) = message(chats(), cache)
        assert told in problem


def test_a_folder_that_transformers_saves_has_its_ids(chats: Any, cache: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=MIXTRAL, **special)
    made.save_pretrained(tmp_path / "saved")
    source = chats(tokenizer=str(tmp_path / "saved"), heldout=0.001).prepare(cache)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    due = [theirs.apply_chat_template(row["messages"], tokenize=False) for row in ROWS]
    assert sorted(text for side in ("train", "heldout") for text, _ in documents(source, side)) == sorted(due)
    ids = [theirs.apply_chat_template(row["messages"], return_dict=True)["input_ids"] for row in ROWS]
    first = source.train.document_starts(0, len(source.train))[1]
    assert source.train.read(0, int(first)).tolist() in ids


def test_a_question_is_asked_as_transformers_asks_it_and_answers_end_as_the_folder_says(
    chats: Any, cache: Path, folder: Path
) -> None:
    from transformers import AutoTokenizer

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 11]}))
    source = chats(date=date.today().isoformat()).prepare(cache)
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "is it warm?"}]
    assert source.ask("is it warm?") == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert source.ends == {7, 11, theirs.eos_token_id}


def test_a_question_that_a_template_refuses_is_told(chats: Any, cache: Path, folder: Path) -> None:
    source = chats().prepare(cache)
    refuses = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        "{{ raise_exception('no question') if add_generation_prompt }}" + refuses
    )
    source = chats().prepare(cache)
    with pytest.raises(DataError, match=r"the question cannot be rendered: .*no question"):
        source.ask("is it warm?")


@pytest.mark.fault("a token that only tokenizer_config.json has: ids of another model", "an error that names it")
def test_a_token_that_the_tokenizer_lacks_is_told(chats: Any, cache: Path, folder: Path) -> None:
    names = {"1": {"content": "<s>"}, "2": {"content": "<|eom_id|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "added_tokens_decoder": names}))
    (told,) = message(chats(), cache)
    assert "tokenizer.json lacks tokens that tokenizer_config.json adds: '<|eom_id|>'. Load the folder with" in told
    del names["2"]
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "added_tokens_decoder": names}))
    assert chats().prepare(cache).preview()


def test_a_template_in_a_file_comes_before_the_folders_own(chats: Any, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(MIXTRAL)
    source = chats(template=str(path)).prepare(cache)
    assert documents(source)[0][0].startswith("<s>[INST] Hello? [/INST] answer")
    source.save_tokenizer(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == MIXTRAL


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"tokenizer": "/nowhere/tokenizer.json"},
            "data.tokenizer: /nowhere/tokenizer.json cannot be read: no such file",
        ),
        ({"template": "/nowhere/x.jinja"}, "data.template: /nowhere/x.jinja cannot be read: no such file"),
        ({"date": None}, "line 3: it writes the date of today, and the spec has none: set data.date: '2026-01-31'."),
        ({"path": "/nowhere"}, "data.path: /nowhere does not exist."),
    ],
)
def test_what_is_missing_is_told(chats: Any, cache: Path, options: dict[str, Any], told: str) -> None:
    assert told in message(chats(**options), cache)[0]


def test_a_tokenizer_or_template_that_is_none_is_told(chats: Any, cache: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("\n{% if %}")
    assert "its chat template cannot be read: line 2: " in message(chats(), cache)[0]
    (folder / "tokenizer.json").write_text("{}")
    assert "its tokenizer.json cannot be read: " in message(chats(), cache)[0]


def test_check_tells_of_options_without_opening_data() -> None:
    def told(**options: Any) -> list[str]:
        return problems_of(json.dumps({"data": {"use": "chat", "path": "x", "tokenizer": "y", **options}}))

    assert told() == []
    assert any("data.date: 'soon' is no date. Write for example 2026-01-31." in each for each in told(date="soon"))
    (problem,) = told(variables={"tools": 3, "enable_thinking": False})
    assert "data.variables.tools: tools is what each conversation sets." in problem
    assert any("data.train_on" in each and "'answer'" in each for each in told(train_on="answer"))
    assert problems_of("data: {use: chat, path: x, tokenizer: y, date: 2026-01-31}") == []


def test_a_blend_keeps_what_trains_and_hands_on_the_template(chats: Any, cache: Path, tmp_path: Path) -> None:
    chat = chats()
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"some text {n}"}) + "\n" for n in range(30)))
    from moefw.plugins.data.rows import JsonLines

    plain = JsonLines(path=str(text), tokenizer=f"{chat.tokenizer}/tokenizer.json")
    blend = Blend(parts=(plain, chat)).prepare(cache)
    alone = plain.prepare(cache).train
    trained = blend.train.trained(0, len(blend.train))
    assert trained[: len(alone)].all()
    assert 0 < trained[len(alone) :].mean() < 1
    blend.save_tokenizer(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == LLAMA
    assert any("train_on: assistant" in line for line in blend.preview())
