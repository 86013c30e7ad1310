"""Which sequences a step has, and which ranks compute them: the same on every rank, nothing lost, nothing twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from moefw import DataError, Dims, TokenStream
from moefw.plugins.data.blend.source import BlendSource
from moefw.training.data.packing.schedule import Room, schedule, token_work
from moefw.training.data.packing.sequences import SequenceOrder, document_parts, sequence_order
from packed_text import MIXED, Documents


def room(dp: int, cp: int, tokens: int, *, tp: int = 1, static: bool = False, token_work: float = 8.0) -> Room:
    sizes = (cp,) if static else tuple(size for size in (1, 2, 4, 8) if cp % size == 0)
    return Room(dp=dp, cp=cp, tp=tp, tokens=tokens, sizes=sizes, token_work=token_work)


@given(
    lengths=st.lists(st.integers(1, 64), max_size=40),
    dp=st.integers(1, 3),
    cp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    static=st.booleans(),
)
def test_each_sequence_is_in_one_pack_that_its_ranks_can_hold(
    lengths: list[int], dp: int, cp: int, tp: int, static: bool
) -> None:
    ranks = room(dp, cp, 64 // cp, tp=tp, static=static)
    found = list[int]()
    for micro_batch in schedule(lengths, ranks):
        for row in micro_batch:
            at = 0
            while at < cp:
                pack = row[at]
                assert at % pack.size == 0
                assert row[at : at + pack.size] == [pack] * pack.size
                assert pack.size in ranks.sizes or not pack.sequences
                held = ranks.held([lengths[number] for number in pack.sequences], pack.size)
                assert sum(held) <= ranks.tokens * pack.size
                assert all(tokens % (2 * pack.size) == 0 for tokens in held) or pack.size == 1
                assert sum(held) % (tp * pack.size) == 0
                found += pack.sequences
                at += pack.size
    assert sorted(found) == list(range(len(lengths)))


def test_a_step_without_sequences_has_a_micro_batch_of_empty_packs() -> None:
    ((row,),) = schedule([], room(1, 4, 8))
    assert [pack.sequences for pack in row] == [()] * 4


def test_a_long_sequence_gets_the_ranks_that_it_needs_and_short_ones_one_each() -> None:
    """Else they would get keys of each other for nothing."""
    ((row,),) = schedule([32, 8, 8, 7, 5], room(1, 8, 8, token_work=1000.0))
    assert [pack.sequences for pack in row] == [(0,)] * 4 + [(1,), (2,), (3,), (4,)]


def test_a_short_sequence_fills_the_room_of_those_that_share_a_long_one() -> None:
    ((row,),) = schedule([24, 8, 8, 8, 8, 8], room(1, 8, 8, token_work=1000.0))
    assert [pack.sequences for pack in row[:4]] == [(0, 5)] * 4


def test_a_sequence_that_one_rank_could_hold_is_shared_if_all_would_wait_for_it() -> None:
    ((row,),) = schedule([64, 16, 16], room(1, 4, 64, token_work=0.0))
    assert [pack.sequences for pack in row] == [(0, 1, 2)] * 4


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=30), cp=st.sampled_from([2, 4]))
def test_the_busiest_ranks_have_never_more_work_than_if_all_shared_all(lengths: list[int], cp: int) -> None:
    ranks, alike = (room(2, cp, 64 // cp, static=static) for static in (False, True))

    def busiest(ranks: Room) -> float:
        packs = [{pack for row in rows for pack in row} for rows in schedule(lengths, ranks)]
        each = [
            [(ranks.work([lengths[one] for one in pack.sequences], pack.size)) for pack in batch] for batch in packs
        ]
        return sum(map(max, each))

    assert busiest(ranks) <= busiest(alike) * (1 + 1e-9)


def test_the_work_of_a_token_is_that_of_its_products_in_scores() -> None:
    assert token_work(Dims(model_dim=64, expert_dim=32, num_experts=8, top_k=2)) == 2 * 64 + 1.5 * 2 * 32


def test_documents_are_cut_into_parts_and_predict_only_tokens_of_their_own() -> None:
    stream = Documents(50)
    starts, lengths = document_parts(stream, 32)
    seen = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    last = np.append(stream.starts[1:], len(stream)) - 1
    assert np.array_equal(seen, np.setdiff1d(np.arange(len(stream)), last))
    assert lengths.max() == 32
    assert lengths.min() == 1


def order(**more: Any) -> SequenceOrder:
    data: Any = SimpleNamespace(train=Documents(50))
    return sequence_order(data, **{"seq_len": 32, "sequences_per_step": 3, "seed": 0, **more})


def test_an_epoch_shows_each_sequence_once_and_steps_have_their_tokens_on_average() -> None:
    whole, total = order(), sum(length - 1 for length in MIXED)
    steps = -(-2 * total // 96)
    parts = [whole.sequences(step) for step in range(steps)]
    numbers = np.concatenate([part.numbers_N for part in parts])
    assert np.array_equal(numbers, np.arange(len(numbers)))
    starts = np.concatenate([part.starts_N for part in parts])
    each = len(document_parts(Documents(50), 32)[0])
    first, second = starts[:each], starts[each : 2 * each]
    assert sorted(first) == sorted(second) != list(first)
    assert list(first) != list(second)
    tokens = [int(part.lengths_N.sum()) for part in parts]
    assert min(tokens) > 0
    assert sum(tokens) == pytest.approx(96 * steps, abs=32)


def test_a_run_that_begins_later_goes_on_where_the_steps_before_ended() -> None:
    wide = order(sequences_per_step=6)
    shifted = evolve(wide, begin=3 * 4 - wide.first(2))
    assert shifted.first(2) == order().first(4)
    narrow = [order().sequences(step).starts_N for step in (4, 5)]
    assert np.array_equal(shifted.sequences(2).starts_N, np.concatenate(narrow))


class Source:
    def __init__(self, vocab_size: int) -> None:
        self.train: TokenStream = Documents(vocab_size)
        self.heldout, self.heldout_bytes, self.vocab_size = Documents(vocab_size), b"", vocab_size
        self.fingerprint, self.digest, self.num_heldout_bytes = "a", "", 0


def test_a_blend_gives_tokens_in_proportion() -> None:
    sources: Any = [Source(50), Source(50)]
    blend = BlendSource(sources, (3, 1))
    made = sequence_order(blend, seq_len=32, sequences_per_step=8, seed=0)
    parts = [made.sequences(step) for step in range(20)]
    starts, lengths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("starts_N", "lengths_N"))
    second = starts >= len(sources[0].train)
    assert lengths[second].sum() == pytest.approx(lengths.sum() / 4, abs=32)
    numbers = np.concatenate([part.numbers_N for part in parts])
    assert len(np.unique(numbers)) == len(numbers)


class Single(Documents):
    def __init__(self) -> None:
        super().__init__(5, [1] * 5)


def test_a_text_of_single_tokens_is_refused() -> None:
    data: Any = SimpleNamespace(train=Single())
    with pytest.raises(DataError, match=r"the training text has no document of two tokens\. Use more text\."):
        sequence_order(data, seq_len=4, sequences_per_step=1, seed=0)
