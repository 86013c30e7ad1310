"""A corpus, a cache that does not exist yet, and a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_cases import EOT, write


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    files = {f"part{i % 3}/doc{i:02}.txt": f"Text {i}: Grüße, 你好 🙂\n" * 3 for i in range(30)}
    return write(tmp_path / "corpus", files)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "new" / "cache"


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the text of the text: Grüße"] * 5, trainer)
    tokenizer.enable_truncation(4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
