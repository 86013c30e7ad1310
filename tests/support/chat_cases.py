"""Small chat templates, each in the style of a family; conversations for them; and a tokenizer that has their tokens."""

# ruff: noqa: RUF001 - DeepSeek's tokens have vertical lines of full width
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TODAY = "2026-01-31"

# ChatML. Reasoning is written for answers behind the last question only; results of tools share a turn of the user.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Functions:' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set turn = namespace(asked=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set turn.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > turn.asked and (loop.last or message.reasoning_content) %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>' + message.content + '</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Channels; the date; reasoning of the last answer only; the last message ends otherwise than the ones before it.
HARMONY = """
{{- '<|start|>system<|message|>Today: ' + strftime_now('%Y-%m-%d') }}
{%- if tools %}{{ '\\nnamespace ' + (tools | map(attribute='function') | map(attribute='name') | join(',')) }}{% endif %}
{{- '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<|start|>developer<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant' }}
        {%- generation %}
        {%- if message.thinking and loop.last %}
            {{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- ' to=' + call.name + '<|channel|>commentary<|message|>' }}{{ call.arguments | tojson }}{{ '<|call|>' }}
        {%- else %}
            {{- '<|channel|>final<|message|>' + message.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
        {%- endif %}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>' + message.name + ' to=assistant<|message|>' }}{{ message.content | tojson }}{{ '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

# No line breaks between turns; what is before </think> is cut off an answer.
DEEPSEEK_V3 = """
{%- set head = namespace(text='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set head.text = head.text + message.content %}{% endif %}
{%- endfor %}
{{- bos_token }}{{ head.text }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' }}
        {%- generation %}
        {%- if message.content %}{{ message.content.split('</think>')[-1] }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '\\n' }}{{ call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}
"""

# No header before answers; roles have to alternate.
MIXTRAL = """
{{- bos_token }}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ ' ' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
        {{- eos_token }}{% endgeneration %}
    {%- elif message.role in ('user', 'tool') %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

# The end of a turn is the beginning of the next one; an answer has its reasoning, which may be empty.
GLM_45 = """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>\\n' }}{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- generation %}
        {{- '\\n<think>' + (message.reasoning_content or '') + '</think>' }}
        {%- if message.content %}{{ '\\n' + message.content.strip() }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '\\n<arg>' + name + '=' }}{{ value if value is string else value | tojson }}
            {%- endfor %}
        {%- endfor %}
        {%- endgeneration %}
    {%- else %}
        {{- '<|' + {'tool': 'observation'}.get(message.role, message.role) + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

# Headers, the date in the system's turn, tools as indented JSON in the first question, loop controls.
LLAMA = """
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date + '\\n<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + {'tool': 'ipython'}.get(message.role, message.role) + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
        {%- else %}{{ message.content | trim }}{% endif %}
        {{- '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

STYLES = {
    "Qwen3": QWEN3,
    "harmony": HARMONY,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Mixtral": MIXTRAL,
    "GLM-4.5": GLM_45,
    "Llama": LLAMA,
}
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
    *("<|call|>", "<｜User｜>", "<｜Assistant｜>", "[gMASK]", "<sop>", "<|assistant|>", "<|user|>", "<|system|>"),
    *("<|observation|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[INST]", "[/INST]")
"""Tokens of a name that are not special."""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a town <now> & later, in °C",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "I need the tool.",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"town": "Köln 🙂"}}}],
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {
        "messages": [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": " Hello 🙂 "}],
    },
    "three turns": {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Grüße, 你好", "reasoning_content": "a greeting"},
            {"role": "user", "content": "Two <|im_end|>?"},
            {"role": "assistant", "content": "2", "reasoning_content": "a number"},
            {"role": "user", "content": "Three?"},
            {"role": "assistant", "content": "3\n"},
        ],
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Is it warm in Köln?"},
            CALL,
            {"role": "tool", "name": "weather", "content": "21 °C"},
            {"role": "assistant", "content": "Yes, it is.", "thinking": "21 is warm."},
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "content": "Any time."},
        ],
        "tools": [WEATHER],
    },
}


def without_marks(template: str) -> str:
    return re.sub(r"\{%-? (end)?generation %\}", "{%- set unused = 0 %}", template)


def tokenizer() -> Tokenizer:
    """A byte-level BPE of 400 ids, which has the tokens of all styles."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["Hello there, is it warm in Köln? Yes. user assistant system"] * 3, trainer)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.add_tokens([AddedToken(name, normalized=False) for name in ADDED])
    return made


def write_folder(folder: Path, template: str | None) -> Path:
    """Files of a model's tokenizer, its template in a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "</s>", "special": True}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
