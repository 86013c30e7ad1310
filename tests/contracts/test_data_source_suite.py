"""The suite of data sources: the built-in ones pass it, and those that are broken on purpose do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import broken_data_sources as broken
from chat_cases import MIXTRAL, write_folder
from megatron_cases import bytes_of, write_pair
from moefw.plugins.data.blend import Blend
from moefw.plugins.data.chat import Chat
from moefw.plugins.data.megatron import Megatron
from moefw.plugins.data.rows import JsonLines, Parquet
from moefw.plugins.data.text import Text
from moefw.testing.suites import data_source
from moefw.testing.suites.data_source import DataSourceSuite

LINES = [f"line {number} of many" for number in range(200)]


def lines(folder: Path) -> Mapping[str, Any]:
    path = folder / "lines.txt"
    path.write_text("\n".join(LINES))
    return {"path": str(path)}


def texts(folder: Path) -> Mapping[str, Any]:
    for number, line in enumerate(LINES):
        (folder / f"{number}.txt").write_text(line)
    return {"path": str(folder)}


def rows(folder: Path) -> Mapping[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return {"path": str(path)}


def table(folder: Path) -> Mapping[str, Any]:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": LINES}), folder / "rows.parquet")
    return {"path": str(folder / "rows.parquet")}


def pair(folder: Path) -> Mapping[str, Any]:
    return {"path": str(write_pair(folder / "pair", bytes_of(*LINES))), "tokenizer": "bytes"}


def chats(folder: Path) -> Mapping[str, Any]:
    path = folder / "chats.jsonl"
    rows = [{"prompt": line, "completion": f"answer to {line}"} for line in LINES]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path), "tokenizer": str(write_folder(folder / "tokenizer", MIXTRAL))}


def two(folder: Path) -> Mapping[str, Any]:
    (folder / "texts").mkdir()
    parts = [{"use": "text", **texts(folder / "texts"), "weight": 2}, {"use": "jsonl", **rows(folder)}]
    return {"parts": parts}


BROKEN: list[tuple[Any, str, str]] = [
    (
        broken.BeginsAtTheFirstRow,
        "a_read_depends",
        "of train is another one if it is read first, by a run that resumes",
    ),
    (broken.DecodesByErrors, "its_methods_take", "is called as decode(ids): missing a required argument: 'errors'"),
    (broken.HoldsOutNothing, "its_methods_take", "_TrainOnly has no attribute heldout, which DataSource says"),
    (broken.ReadsOneToken, "its_methods_take", "is called as read(start, count): too many positional arguments"),
    (broken.MisspellsItsOffer, "its_offers_are_values", "of which no part knows 'raged'"),
    (broken.ReadsInt32, "ids_are", "ids of train returns int32 ("),
    (broken.CountsFromOneThousand, "ids_are", "and the vocabulary has 256."),
    (broken.GoesOnWhereItWas, "a_read_depends", "of train is another one if it is read alone."),
    (broken.DrawsAnOrder, "data_that_are", "prepared again in the same cache, other ids to train on, ids held out."),
    (broken.StartsEverywhere, "documents_start", "document starts of train are no ascending positions"),
    (broken.PredictsNumbers, "tokens_to_predict", "tokens of train to predict is no bool for each."),
    (broken.PredictsTheFirst, "tokens_to_predict", "on, train predicts other tokens."),
    (broken.PredictsAtTimes, "tokens_to_predict", "train tells which tokens to predict of some parts alone."),
    (broken.ForgetsAByte, "text_becomes", "num_heldout_bytes is "),
    (broken.EncodesOutside, "text_becomes", ", 256], and the vocabulary has 256."),
    (broken.WritesAnew, "files_in_the_cache", "prepared again, it writes heldout, train anew."),
    (broken.WritesTheTime, "data_that_are", "prepared again in an empty cache, other ids to train on"),
    (broken.AsksItsRank, "all_ranks", "ranks differ in ids to train on, ids held out."),
    (broken.LetsErrorsThrough, "files_that_are_not", "raise FileNotFoundError"),
]


@pytest.mark.parametrize(("plugin", "check", "says"), BROKEN, ids=[f"{each[0].name}-{each[1]}" for each in BROKEN])
def test_what_is_broken_is_caught_and_named(
    must_catch: Callable[..., None], plugin: Any, check: str, says: str
) -> None:
    must_catch(DataSourceSuite, plugin, check, says, files=staticmethod(lines))


class TestSound(DataSourceSuite):
    plugin = broken.Sound
    files = staticmethod(lines)


class TestText(DataSourceSuite):
    plugin = Text
    files = staticmethod(texts)

    def test_a_stream_may_be_longer_than_what_a_check_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(data_source, "MOST", 16)  # of which the last part that is read alone begins at 14
        self.test_a_read_depends_on_its_position_alone()


class TestTextOfOneFileInABPE(DataSourceSuite):
    plugin = Text
    options = {"tokenizer": "bpe-300"}
    files = staticmethod(lines)


class TestJsonLines(DataSourceSuite):
    plugin = JsonLines
    files = staticmethod(rows)


class TestParquet(DataSourceSuite):
    plugin = Parquet
    files = staticmethod(table)


class TestMegatron(DataSourceSuite):
    plugin = Megatron
    files = staticmethod(pair)


class TestChat(DataSourceSuite):
    plugin = Chat
    files = staticmethod(chats)


class TestChatOfEachAnswer(DataSourceSuite):
    plugin = Chat
    options = {"train_on": "each", "max_tokens": 40, "too_long": "truncate"}
    files = staticmethod(chats)


class TestBlend(DataSourceSuite):
    plugin = Blend
    files = staticmethod(two)
