"""Evaluation of a model on held-out text."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

from moefw.core.stages import Batch
from moefw.runtime.windows import masks_losses
from moefw.system.stamps import stamp
from moefw.training.data.order import heldout_windows
from moefw.training.engine import evaluate
from moefw.training.session import Session


def evaluation(session: Session) -> dict[str, float]:
    """``eval_loss`` (nats per token) and ``eval_bits_per_byte`` over held-out text. Collective.

    The latter is not told of text of which only some tokens are predicted: their bytes are not counted.
    """
    data = session.data
    loss = evaluate(session.model, list(_batches(session)), session.layout)
    if masks_losses(data.heldout):
        return {"eval_loss": loss}
    tokens_per_byte = len(data.heldout) / max(1, data.num_heldout_bytes)
    return {"eval_loss": loss, "eval_bits_per_byte": loss / math.log(2) * tokens_per_byte}


def evaluation_starts(session: Session) -> list[int]:
    """Start positions of an evaluation's windows. Raises DataError if there is no window."""
    spec = session.assembly.spec.train
    starts = heldout_windows(len(session.data.heldout), seq_len=spec.seq_len, max_tokens=spec.eval_tokens)
    return [int(start) for start in starts]


def zlib_bits_per_byte(text: bytes) -> float:
    """Size of the text compressed by ``zlib -9``, in bits per byte."""
    return 8 * len(zlib.compress(text, 9)) / max(1, len(text))


def _batches(session: Session) -> Iterator[Batch]:
    """Yield this rank's batches. Every rank gets the same number; the last ones are padded."""
    spec = session.assembly.spec.train
    layout = session.layout
    stream = session.data.heldout
    starts = evaluation_starts(session)
    size = spec.micro_batch
    ranks = layout.size("dp")
    for first in range(0, len(starts), size * ranks):
        mine = starts[first + layout.index("dp") * size :][:size]
        padded = mine + [0] * (size - len(mine))
        stamp(f"reading held-out text from window {first} of {len(starts)}")
        yield session.read(stream, padded, valid=len(mine))
