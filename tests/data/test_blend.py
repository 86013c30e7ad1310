"""A blend gives each source its share of the sequences, in an order that only seed and step decide."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from data_cases import all_of, examples, write
from megatron_cases import bytes_of, write_pair
from moefw import DataError, PlanError, TokenStream
from moefw.plugins.data.blend import Blend
from moefw.plugins.data.blend.proportions import pattern, whole_weights
from moefw.plugins.data.blend.source import Joined
from moefw.plugins.data.megatron import Megatron
from moefw.plugins.data.text import Text
from moefw.training.data.blend_order import BlendOrder, training_order
from moefw.training.data.order import BatchOrder
from resolved_specs import problems_of, resolved


def megatron_lm(weights: list[float], size: int) -> list[int]:
    """Return what ``build_blending_indices`` of Megatron-LM (helpers.cpp) computes, in its words."""
    weights = [weight / sum(weights) for weight in weights]
    current_samples, found = [0] * len(weights), []
    for sample_idx in range(size):
        sample_idx_double = max(float(sample_idx), 1.0)
        max_error_index, max_error = 0, weights[0] * sample_idx_double - current_samples[0]
        for dataset_idx in range(1, len(weights)):
            error = weights[dataset_idx] * sample_idx_double - current_samples[dataset_idx]
            if error > max_error:
                max_error_index, max_error = dataset_idx, error
        found.append(max_error_index)
        current_samples[max_error_index] += 1
    return found


@pytest.mark.parametrize("weights", [[0.5, 0.25, 0.25], [3.0, 1.0], [5.0, 8.0, 3.0], [1.0], [0.125, 0.625, 0.25]])
def test_a_blend_is_that_of_megatron_lm(weights):
    """The weights are sums of powers of two, whose errors Megatron-LM's floating point holds exactly."""
    whole = whole_weights(weights)
    assert pattern(whole).tolist() == megatron_lm(weights, sum(whole))


@examples
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7))
def test_no_source_is_ahead_by_more_than_a_sequence_and_each_is_exact_at_the_end_of_the_pattern(weights):
    found, total = pattern(tuple(weights)).tolist() * 2, sum(weights)
    assert Counter(found[:total]) == dict(enumerate(weights))
    counts = [0] * len(weights)
    for number, source in enumerate(found, 1):
        counts[source] += 1
        assert all(count * total <= weight * number + total for count, weight in zip(counts, weights, strict=True))


def test_weights_are_taken_as_they_are_written():
    assert whole_weights([0.7, 0.3]) == (7, 3)
    assert whole_weights([1.0, 2.0, 3.5]) == (2, 4, 7)
    assert whole_weights([1e-5, 1.0]) == (1, 100_000)


def blend_order(sequences_per_step: int, *weights: int, sizes: tuple[int, ...] = (500, 90, 300)) -> BlendOrder:
    orders = [
        BatchOrder(num_tokens=size, seq_len=10, sequences_per_step=sequences_per_step, seed=index)
        for index, size in enumerate(sizes[: len(weights)])
    ]
    begins = np.cumsum([0, *sizes])[: len(weights)].tolist()
    return BlendOrder(
        sources=tuple(orders), begins=tuple(begins), weights=weights, sequences_per_step=sequences_per_step
    )


def source_of(order: BlendOrder, starts: list[int]) -> list[int]:
    return (np.searchsorted(order.begins, starts, side="right") - 1).tolist()


def test_each_source_is_read_in_its_own_order_whoever_asks_for_which_step():
    order = blend_order(7, 5, 3, 2)
    whole = np.concatenate([order.starts(step) for step in range(40)]).tolist()
    sources = source_of(order, whole)
    assert sources == (pattern((5, 3, 2)).tolist() * 28)[:280]
    for index, (own, begin) in enumerate(zip(order.sources, order.begins, strict=True)):
        mine = [start - begin for start, source in zip(whole, sources, strict=True) if source == index]
        assert mine == own.windows(0, len(mine)).tolist()
    assert order.starts(29).tolist() == whole[29 * 7 :][:7], "a step alone is the same step"
    assert np.concatenate([blend_order(35, 5, 3, 2).starts(step) for step in range(8)]).tolist() == whole


def test_an_order_that_begins_later_goes_on_there_with_steps_of_another_size():
    order = blend_order(6, 2, 1)
    whole = np.concatenate([order.starts(step) for step in range(20)]).tolist()
    later = evolve(blend_order(4, 2, 1), begin=order.first(10) - 4 * 10)
    assert np.concatenate([later.starts(step) for step in range(10, 15)]).tolist() == whole[60:80]


@pytest.fixture
def parts(tmp_path):
    folder = write(tmp_path / "folder", {f"{number}.txt": f"text number {number}" * 5 for number in range(20)})
    pair = write_pair(tmp_path / "pair", bytes_of(*(f"pair {number} " * 4 for number in range(20))), "uint8")
    return (
        Text(path=str(folder), heldout=0.3, weight=0.75),
        Megatron(path=str(pair), tokenizer="bytes", heldout=0.33, weight=0.25),
    )


def test_the_data_of_a_blend_are_those_of_its_parts_end_to_end(parts, cache):
    whole, (first, second) = Blend(parts=parts).prepare(cache), (part.prepare(cache) for part in parts)
    for name in ("train", "heldout"):
        joined, a, b = (getattr(source, name) for source in (whole, first, second))
        assert all_of(joined) == all_of(a) + all_of(b)
        assert joined.read(len(a) - 3, 7).tolist() == a.read(len(a) - 3, 3).tolist() + b.read(0, 4).tolist()
        starts = [*a.document_starts(0, len(a)), *(b.document_starts(0, len(b)) + len(a))]
        assert joined.document_starts(0, len(joined)).tolist() == sorted({*starts, len(a)})
    assert whole.heldout_bytes == first.heldout_bytes + second.heldout_bytes
    assert whole.num_heldout_bytes == len(whole.heldout_bytes)
    assert whole.weights == (3, 1)
    assert whole.fingerprint == first.fingerprint
    assert whole.digest not in ("", first.digest, second.digest)
    order = training_order(whole, seq_len=8, sequences_per_step=8, seed=3)
    assert source_of(order, order.starts(5).tolist()) == pattern((3, 1)).tolist() * 2


class Numbers(TokenStream):
    name = "numbers"

    def __len__(self) -> int:
        return 5

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count)


def test_a_wrong_id_is_named_where_its_own_stream_has_it():
    with pytest.raises(DataError, match="numbers holds the id 4 at token 4, and the vocabulary has 4 ids"):
        Joined([Numbers(), Numbers()], 4).read(4, 2)


def test_a_stream_begins_with_a_document_where_it_tells_any(monkeypatch):
    assert Joined([Numbers(), Numbers()], 5).document_starts(3, 4) is None
    monkeypatch.setattr(Numbers, "document_starts", lambda *_: np.empty(0, np.int64))
    assert Joined([Numbers(), Numbers()], 5).document_starts(3, 4).tolist() == [5]


def test_parts_with_different_tokenizers_are_refused_together(parts, cache, tokenizer_file):
    third, fourth = (evolve(parts[0], tokenizer=name) for name in (str(tokenizer_file), "bpe-258"))
    with pytest.raises(PlanError) as caught:
        Blend(parts=(*parts, third, fourth)).prepare(cache)
    told = [str(problem) for problem in caught.value.problems]
    assert len(told) == 2
    assert told[0].startswith("data.parts[2]: its tokenizer (tokenizer.json ")
    assert told[0].endswith(" is not that of data.parts[0] (bytes, 256 ids). Name one tokenizer in all parts.")


def test_a_part_that_is_too_short_is_named(parts, cache, tmp_path):
    short = Text(path=str(write(tmp_path / "short", {"a": "abc", "b": "def"})))
    data = Blend(parts=(*parts, short)).prepare(cache)
    with pytest.raises(DataError, match=r"data\.parts\[2\]: the training text has 3 tokens, and a window of"):
        training_order(data, seq_len=8, sequences_per_step=8, seed=0)


def blended(*parts: dict) -> str:
    return json.dumps({"model": {"vocab_size": 257}, "data": {"use": "blend", "parts": parts}})


def test_a_blend_is_resolved_and_spelled_out_and_reads_again():
    text = blended({"use": "text", "weight": 0.7}, {"use": "jsonl", "path": "x", "weight": 3})
    assembly = resolved(text)
    assert [type(part).__name__ for part in assembly.parts.data.sources] == ["Text", "JsonLines"]
    spelled = assembly.resolved()["data"]["parts"]
    assert spelled[1] == {
        "use": "jsonl", "weight": 3.0, "path": "x", "field": "text", "tokenizer": "bytes", "heldout": 0.05
    }  # fmt: skip
    assert resolved(json.dumps(assembly.resolved())).resolved() == assembly.resolved()
    named = {name for hook, name, *_ in assembly.versions() if hook == "moefw_data_sources"}
    assert named == {"blend", "text", "jsonl"}
    assert assembly.parts.data.anchored().sources[1].path.startswith("/")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], ["data.parts"]),
        ([{"use": "txt"}], ["data.parts[0].use: no plugin is called 'txt'"]),
        ([{"use": "gqa"}], ["data.parts[0].use: 'gqa' is none of the data_sources"]),
        ([{"weight": 1}], ["data.parts[0].use: 'use' is missing."]),
        ([{"use": "text", "weight": 0}, {"use": "text", "pth": 1}], ["parts[0].weight", "parts[1].pth"]),
        (
            [{"use": "text", "weight": 0.1234567}, {"use": "text"}],
            ["data.parts: these weights come out even only after"],
        ),
        ([{"use": "text", "tokenizer": "bpe-257"}] * 2, ["parts[0].tokenizer: bpe-257 makes", "parts[1].tokenizer"]),
        ([{"use": "blend", "parts": [{"use": "text"}]}], ["data.parts[0].use: a blend is no part of a blend."]),
    ],
)
def test_check_tells_what_is_wrong_with_a_blend_without_opening_data(parts, expected):
    told = problems_of(blended(*parts))
    assert len(told) == len(expected), told
    for problem, start in zip(told, expected, strict=True):
        assert start in problem
