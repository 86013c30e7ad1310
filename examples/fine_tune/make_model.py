"""Makes a tiny Qwen3-MoE or gpt-oss with ``transformers``, as a stand-in for a folder of the hub.

``make_model.py FOLDER [qwen3_moe | gpt_oss]``, with ``transformers``, which ``pip install '.[hf]'`` brings.
"""

from __future__ import annotations

import json
import pathlib
import sys
import sysconfig

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

try:
    from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, Qwen3MoeConfig
except ModuleNotFoundError:
    sys.exit("make_model.py needs transformers. Install it with: pip install '.[hf]', in a clone of moefw.")

VOCABULARY = 1024
END = "<|endoftext|>"
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>
{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""ChatML. What stands between the marks of ``generation`` is an answer, which trains."""


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def config_of(family: str) -> PretrainedConfig:
    """Configuration of a model with eight experts a layer."""
    if family == "gpt_oss":
        return GptOssConfig(**SIZES, num_local_experts=8, intermediate_size=64)
    return Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=64, norm_topk_prob=True)


def main(folder: pathlib.Path, family: str = "qwen3_moe") -> None:
    """Write the model, with random weights, a tokenizer of the standard library's sources, and a chat template."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer.train_from_iterator((path.read_text(errors="replace") for path in sources), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
