"""Prepares conversations once, in a folder of the cache: ids, which of them train, and where samples start."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from moefw.core.errors import DataError, Problem
from moefw.plugins.data.chat.folder import read_files
from moefw.plugins.data.chat.options import ChatOptions
from moefw.plugins.data.chat.problems import Problems
from moefw.plugins.data.chat.process import ChatProcess, Encoded, Recipe
from moefw.plugins.data.chat.rows import ENDINGS, read_chats
from moefw.plugins.data.chat.source import ChatSource
from moefw.plugins.data.child import EncodingError
from moefw.plugins.data.corpus import Corpus, find_corpus
from moefw.plugins.data.numbers import NumberFile
from moefw.plugins.data.prepared import HELDOUT, HELDOUT_TEXT, TRAIN, Prepared, describe, kept_in, prepare_folder
from moefw.plugins.data.progress import EncodingProgress
from moefw.plugins.data.row_sides import split_rows
from moefw.plugins.data.source import PreparedSource
from moefw.plugins.data.split import TextDocument
from moefw.plugins.data.tokenizers import fingerprint, load_tokenizer
from moefw.plugins.data.tokens import STARTS, TRAINED, TokenFile, TokenWriter, starts_file, token_dtype, trained_file

FORMAT: Final = 2
"""Increased when the prepared files of the same conversations would change."""
BATCH_BYTES: Final = 1 << 20
BATCH_ROWS: Final = 64
"""Few enough that a template that fails slowly with every row is told after some of them."""

Placed = tuple[str, Encoded]
"""A sample and the place of its row."""


def prepare_chats(options: ChatOptions, cache_dir: Path) -> ChatSource:
    """Conversations, tokenized in this call unless an earlier one did it. Raises DataError."""
    files = read_files(options.tokenizer, options.template)
    corpus = find_corpus(options.path, ENDINGS)
    recipe = Recipe(
        tokenizer=files.tokenizer,
        template=files.template,
        variables={**files.variables, **options.variables},
        today=options.date,
        train_on=options.train_on,
    )
    identity = (_identity(options, recipe, corpus), *((file.name, file.stop, file.mtime_ns) for file in corpus.files))
    with kept_in(cache_dir):
        prepared = prepare_folder(cache_dir, identity, lambda folder: _fill(folder, options, recipe, corpus))
        tokenizer = load_tokenizer(options.tokenizer, files.tokenizer)
        train, heldout = (_stream(prepared, Path(name), tokenizer.vocab_size) for name in (TRAIN, HELDOUT))
        source = PreparedSource(prepared, tokenizer, train=train, heldout=heldout)
        return ChatSource(source, beside=files.beside, meta=prepared.meta, recipe=recipe, ends=files.ends)


def _identity(options: ChatOptions, recipe: Recipe, corpus: Corpus) -> list[Any]:
    """All that decides what the prepared files hold, but for the rows."""
    template = hashlib.sha256(recipe.template.encode()).hexdigest()
    how = [fingerprint(recipe.tokenizer), template, dict(recipe.variables), recipe.today, recipe.train_on]
    return ["chat", FORMAT, str(corpus.root), *how, options.heldout, options.max_tokens, options.too_long]


def _stream(prepared: Prepared, path: Path, vocab_size: int) -> TokenFile:
    return TokenFile(
        NumberFile(prepared.open(path.name), token_dtype(vocab_size)),
        NumberFile(prepared.open(starts_file(path).name), STARTS),
        trained=NumberFile(prepared.open(trained_file(path).name), TRAINED),
    )


def _fill(folder: Path, options: ChatOptions, recipe: Recipe, corpus: Corpus) -> None:
    split = split_rows(lambda: read_chats(corpus), options.heldout, corpus.root)
    try:
        process = ChatProcess(recipe)
    except EncodingError as error:
        what = f"data.tokenizer: {options.tokenizer}: {error.reason}."
        raise DataError(what, "Use the files of another model, or another data.template.") from error
    tokenizer = load_tokenizer(options.tokenizer, recipe.tokenizer)
    problems = Problems()
    with process, EncodingProgress(split.num_bytes) as progress, (folder / HELDOUT_TEXT).open("wb") as raw:

        def encoded(rows: Iterable[TextDocument]) -> Iterator[Placed]:
            for batch in _batches(rows):
                yield from _encoded(batch, process, problems)
                progress.advance(sum(len(content) for _, content in batch))

        writing = partial(
            _write,
            options=options,
            vocab_size=tokenizer.vocab_size,
            special_ids=_special_ids(recipe.tokenizer),
            problems=problems,
        )
        counts = {
            "train": writing(folder / TRAIN, encoded(split.train)),
            "heldout": writing(folder / HELDOUT, _copied(encoded(split.heldout), raw)),
        }
        problems.raise_any()
        roles = _roles(split.train, process)
    _require_both(counts, options)
    meta = {
        "format": FORMAT,
        "source": str(corpus.root),
        "tokenizer": tokenizer.fingerprint,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "documents": dict(split.counts),
        "train_on": options.train_on,
        "date": options.date,
        "samples": counts,
        "roles": roles,
    }
    describe(folder, meta)


def _roles(rows: Iterable[TextDocument], process: ChatProcess) -> Mapping[str, Sequence[int]]:
    """Numbers of tokens by role of the first batch: each takes a rendering of every prefix. Empty: it took too long."""
    first = next(_batches(rows))
    try:
        return process.roles([content for _, content in first])
    except EncodingError:
        return {}


def _batches(rows: Iterable[TextDocument]) -> Iterator[list[tuple[str, bytes]]]:
    """Yield batches of places and conversations."""
    batch: list[tuple[str, bytes]] = []
    room = BATCH_BYTES
    for row in rows:
        content = b"".join(row.pieces())
        batch.append((row.place, content))
        room -= len(content)
        if room <= 0 or len(batch) == BATCH_ROWS:
            yield batch
            batch = []
            room = BATCH_BYTES
    yield batch


def _encoded(batch: Sequence[tuple[str, bytes]], process: ChatProcess, problems: Problems) -> Iterator[Placed]:
    """Yield the samples of a batch; a conversation that gives none is a problem."""
    outcomes = process.samples([content for _, content in batch])
    for (place, _), outcome in zip(batch, outcomes, strict=True):
        if isinstance(outcome, EncodingError):
            problems.add(Problem(f"this conversation cannot be rendered: {outcome.reason}.", "", place))
        else:
            yield from ((place, sample) for sample in outcome)


def _copied(samples: Iterable[Placed], raw: IO[bytes]) -> Iterator[Placed]:
    """Yield samples whose texts are written to a file as they go by."""
    for place, sample in samples:
        raw.write(sample.text.encode())
        yield place, sample


def _write(
    path: Path,
    samples: Iterable[Placed],
    *,
    options: ChatOptions,
    vocab_size: int,
    special_ids: Sequence[int],
    problems: Problems,
) -> Mapping[str, int]:
    """Numbers of samples and tokens of a side, whose ids, starts and masks are written to files at ``path``."""
    counts = dict.fromkeys(("samples", "tokens", "trained", "special", "truncated", "dropped", "untrained"), 0)
    most = options.max_tokens
    with TokenWriter(path, vocab_size=vocab_size) as tokens, trained_file(path).open("wb") as trained:
        for place, sample in samples:
            ids, trained_mask = sample.ids, sample.trained_mask
            if most is not None and len(ids) > most:
                if options.too_long == "error":
                    problems.add(_too_long(place, len(ids), most))
                    continue
                if options.too_long == "drop":
                    counts["dropped"] += 1
                    continue
                counts["truncated"] += 1
                ids, trained_mask = ids[:most], trained_mask[:most]
            tokens.start_document()
            tokens.write(ids)
            trained.write(trained_mask.astype(TRAINED).tobytes())
            num_trained = int(trained_mask.sum())
            counts["samples"] += 1
            counts["tokens"] += len(ids)
            counts["trained"] += num_trained
            counts["special"] += int(np.isin(ids[trained_mask], special_ids).sum())
            counts["untrained"] += num_trained == 0
        trained.flush()
        os.fsync(trained.fileno())
    return counts


def _special_ids(tokenizer: bytes) -> list[int]:
    """Ids of the special tokens of a ``tokenizer.json``, such as those that end a turn."""
    return [token["id"] for token in json.loads(tokenizer)["added_tokens"] if token["special"]]


def _too_long(place: str, count: int, most: int) -> Problem:
    what = f"this conversation has {count:,} tokens, and data.max_tokens is {most:,}."
    return Problem(what, "Raise it, or choose too_long: truncate or drop.", place)


def _require_both(counts: Mapping[str, Mapping[str, int]], options: ChatOptions) -> None:
    """Raise DataError unless each side has tokens that train, and tokens that do not if only answers do."""
    problems = []
    for side, numbers in counts.items():
        if not numbers["trained"]:
            what = (
                f"none of the {numbers['tokens']:,} tokens of the {side} side trains ({numbers['dropped']:,} dropped)."
            )
            fix = "Check what the template marks with {% generation %}, the roles of the messages, and data.max_tokens."
            problems.append(Problem(what, fix, "data.train_on"))
        elif options.train_on != "all" and numbers["trained"] == numbers["tokens"]:
            what = f"all {numbers['tokens']:,} tokens of the {side} side train, those of prompts, too."
            fix = "Mark answers alone with {% generation %} in the template, or choose train_on: all."
            problems.append(Problem(what, fix, "data.train_on"))
    if problems:
        raise DataError(problems)
