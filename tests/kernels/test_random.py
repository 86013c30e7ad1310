"""Draws depend only on their key, are uniform, and are independent of their neighbours."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moefw.training.feed import Windows
from moefw.training.seeds import sequence_seeds
from moefw.training.session import Session
from moefw_kernels.random import mix, operand_keys, token_keys, uniform

SEEDS = torch.tensor([0, 1, 2, -5, 2**62])


def drawn(seeds_B: torch.Tensor = SEEDS, positions: int = 64, salt: int = 3, count: int = 96) -> torch.Tensor:
    return uniform(token_keys(seeds_B, torch.arange(positions), salt=salt), count)


def test_the_hash_is_splitmix64() -> None:
    """The stream of seed 1234567, as published with the reference implementation in C."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    gamma = 0x9E3779B97F4A7C15 - (1 << 64)
    stream = mix(torch.tensor(1234567) + torch.arange(1, 5) * gamma)
    assert [word % (1 << 64) for word in stream.tolist()] == published


def test_draws_are_uniform_in_the_unit_interval() -> None:
    u = drawn().flatten()
    assert u.min() >= 0.0
    assert u.max() < 1.0
    counts = torch.histc(u, bins=20, min=0.0, max=1.0)
    chi_squared = ((counts - len(u) / 20) ** 2 / (len(u) / 20)).sum()
    assert chi_squared < 43.8, "0.999 quantile of chi squared with 19 degrees of freedom"
    assert u.mean().item() == pytest.approx(0.5, abs=0.006)


def test_neighbours_in_every_direction_are_independent() -> None:
    u = drawn().view(len(SEEDS), 64, 96) - 0.5
    other = drawn(salt=4).view_as(u) - 0.5
    pairs = {
        "features": (u[..., 1:], u[..., :-1]),
        "positions": (u[:, 1:], u[:, :-1]),
        "sequences": (u[1:], u[:-1]),
        "diagonal": (u[:, 1:, :-1], u[:, :-1, 1:]),
        "layers": (u, other),
    }
    for name, (one, two) in pairs.items():
        correlation = (one * two).mean() * 12.0
        assert abs(correlation) < 4.0 / one.numel() ** 0.5, name


def test_splitting_a_batch_or_calling_in_another_order_draws_the_same() -> None:
    whole = drawn().view(len(SEEDS), 64, 96)
    for row in reversed(range(len(SEEDS))):
        assert torch.equal(drawn(SEEDS[row : row + 1]), whole[row])
    assert torch.equal(drawn(positions=7).view(len(SEEDS), 7, 96), whole[:, :7])
    assert torch.equal(drawn(count=5), drawn()[:, :5])


def test_no_tokens_no_sequences_and_no_features_draw_nothing() -> None:
    assert drawn(positions=0).shape == (0, 96)
    assert drawn(SEEDS[:0]).shape == (0, 96)
    assert drawn(count=0).shape == (len(SEEDS) * 64, 0)


def test_every_sequence_of_a_run_has_a_seed_of_its_own_whoever_asks() -> None:
    seeds = sequence_seeds(7, np.arange(100_000))
    assert seeds.dtype == np.int64
    assert len(set(seeds.tolist())) == 100_000
    assert np.array_equal(sequence_seeds(7, np.arange(40, 60)), seeds[40:60])
    assert not set(sequence_seeds(8, np.arange(1000)).tolist()) & set(seeds.tolist())


def seeds_of(rank: int, ranks: int, micro_batch: int, step: int) -> torch.Tensor:
    """The seeds of a rank's sequences in a step of 12, over its micro-batches."""
    spec = SimpleNamespace(micro_batch=micro_batch, seq_len=4, masks_documents=False)
    stream = SimpleNamespace(
        name="text", read=lambda start, count: np.arange(start, start + count), trained=lambda start, count: None
    )
    session: Any = SimpleNamespace(
        layout=SimpleNamespace(size=lambda _: ranks, index=lambda _: rank),
        data=SimpleNamespace(vocab_size=1000, train=stream),
        assembly=SimpleNamespace(spec=SimpleNamespace(run=SimpleNamespace(seed=5), train=spec)),
        device=torch.device("cpu"),
    )
    session.batch = lambda *args, **kwargs: Session.batch(session, *args, **kwargs)
    session.read = lambda *args, **kwargs: Session.read(session, *args, **kwargs)
    session._placed = lambda values: Session._placed(session, values)
    order: Any = SimpleNamespace(starts=lambda step: np.arange(12) + 100 * step, first=lambda step: 12 * step)
    batches = list(Windows(session, order).micro_batches(step))
    for batch in batches:
        number = batch.ids_BS[:, 0].numpy() - 100 * step + 12 * step
        assert batch.seeds_B.tolist() == sequence_seeds(5, number).tolist()
    return torch.cat([batch.seeds_B for batch in batches])


def test_the_trainer_gives_a_sequence_the_same_seed_in_every_layout() -> None:
    whole = seeds_of(0, 1, 12, step=3)
    for ranks, micro_batch in ((1, 4), (2, 3), (3, 1)):
        assert torch.equal(torch.cat([seeds_of(rank, ranks, micro_batch, 3) for rank in range(ranks)]), whole)
    assert not set(whole.tolist()) & set(seeds_of(0, 1, 12, step=4).tolist())


SALTS = (5, -7 << 40, (1 << 63) - 1)


@pytest.mark.parametrize("salt", SALTS)
def test_an_operand_has_keys_of_its_own_and_rows_of_several_those_of_the_first(salt: int) -> None:
    keys_R = token_keys(SEEDS, torch.arange(8), salt=3)
    keys = operand_keys(keys_R, salt)
    assert torch.equal(keys, mix(keys_R ^ salt))
    by_hand = [mix(keys[row // 16 * 16] ^ mix(torch.tensor(row % 16 + 1))) for row in range(48)]
    assert torch.equal(operand_keys(keys_R, salt, size=16), torch.stack(by_hand))


def the_kernel_has_the_bits_of_the_reference() -> None:
    from moefw_kernels.random import reference, triton

    for rows in (0, 1, 16, 40, 3000):
        keys_R = token_keys(torch.tensor([7]), torch.arange(rows), salt=1)
        for salt in SALTS:
            for size in (1, 16):
                assert torch.equal(triton.operand_keys(keys_R, salt, size), reference.operand_keys(keys_R, salt, size))


def test_the_kernel_of_keys(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(the_kernel_has_the_bits_of_the_reference).result()
