"""A byte-level BPE vocabulary (arXiv 1508.07909 over bytes, as in GPT-2), made from the training text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moefw.plugins.data.tokenizers import END_OF_TEXT

SAMPLE_BYTES = 1 << 26
"""64 MiB: the part of a longer text that is used."""
LONGEST_RUN = 256
"""Characters without a space that are counted together: counting pairs takes quadratic time in their number."""


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> bytes:
    """``tokenizer.json`` of at most ``vocab_size`` ids over UTF-8 texts; the same texts give the same bytes.

    The most frequent adjacent pair of ids becomes a new id, until there are enough ids or no pair repeats.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(texts), trainer)
    return str(tokenizer.to_str()).encode()


def _sample(texts: Iterable[bytes]) -> Iterable[str]:
    room = SAMPLE_BYTES
    for text in texts:
        yield re.sub(rf"\S{{{LONGEST_RUN}}}", "\\g<0>\n", text.decode())
        room -= len(text)
        if room <= 0:
            return
