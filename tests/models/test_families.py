"""A model of each family computes what ``transformers`` does: logits, loss and every gradient, of drawn options."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hf_models import OWN, VOCABULARY, Ours, configurations, ours, tensors_of, theirs
from moefw.core.stages import Batch
from moefw.runtime.naming import canonical_parameters

LOGITS, LOSS, GRADIENT, FLOOR = 1e-5, 1e-6, 1e-4, 1e-6
SEQUENCES, POSITIONS = 2, 14


QUICK = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def compare(family: str, values: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (SEQUENCES, POSITIONS + 1), generator=generator)
    oracle = theirs(family, values, seed)
    with tempfile.TemporaryDirectory() as folder:
        oracle.save_pretrained(folder)
        found = ours(Path(folder))
    count = torch.tensor(1.0 / (SEQUENCES * POSITIONS))
    batch = Batch(ids_BS=ids[:, :-1], labels_BS=ids[:, 1:], loss_scale=count)
    wanted = oracle(input_ids=ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    model: Any = found.model
    logits, _ = model.logits(batch)
    output = model(batch)
    (output.loss_sum * count).backward()
    assert (logits - wanted).abs().max() <= LOGITS * wanted.abs().max()
    assert float(output.loss_sum * count) == pytest.approx(loss.item(), rel=LOSS)
    assert_gradients(found, oracle)


def assert_gradients(found: Ours, oracle: Any) -> None:
    """Assert that every gradient is theirs, by the name of the saved tensor."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter in oracle.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        oracle.save_pretrained(folder)
        theirs = tensors_of(Path(folder))
    norm = torch.cat([parameter.flatten() for parameter in oracle.parameters()]).norm()
    for piece in canonical_parameters(found.model):
        origin, grad = found.origins[piece.name], piece.parameter.grad
        wanted = origin.of(theirs[origin.name])
        got = torch.zeros_like(wanted) if grad is None else piece.of(grad)
        assert (got - wanted).norm() <= max(GRADIENT * wanted.norm(), FLOOR * norm), piece.name


@pytest.mark.parametrize("family", OWN)
def test_logits_loss_and_gradients_are_those_of_transformers(family: str) -> None:
    @settings(QUICK)
    @given(configurations(family), st.integers(0, 1000))
    def run(values: dict[str, Any], seed: int) -> None:
        compare(family, values, seed)

    run()
