"""A movement of tensors between ranks as two autograd nodes, so that work placed between them overlaps with it.

``start`` launches, ``finish`` waits. In backward, finish launches the dual movement and start waits for it, so work
between them in forward also runs between them in backward. A codec packs rows in forward; gradients are not packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from moefw.core.contracts import Codec
from moefw.core.stages import Pending


class Work(Protocol):
    """Handle of an asynchronous collective."""

    def wait(self) -> Any:
        """Block, or make the current stream wait, until the result is available."""


class Permutation(Protocol):
    """Mapping of tokens ``(T, D)`` to rows ``(N, D)``."""

    def gather(self, x_TD: Tensor) -> Tensor:
        """Return the rows. Differentiable."""

    def gather_sum(self, rows_ND: Tensor) -> Tensor:
        """Return the sum of each token's rows. Differentiable."""


@runtime_checkable
class PermutingCodec(Codec, Protocol):
    """A codec that packs a token once for all of its rows."""

    def pack_permuted(self, x_TD: Tensor, rows: Permutation) -> Tensor:
        """Return ``pack(rows.gather(x_TD))``, bit for bit."""


Launch = Callable[[Sequence[Tensor]], tuple[list[Tensor], list[Work]]]
"""Starts a movement of the given tensors; returns the buffers it fills and the works to wait for."""


class _Flight:
    """One movement: its two launches, and the tensors in flight between a start and its finish.

    ``codec`` packs the first tensor: rows in ``dtype`` or, with ``rows``, the tokens from which they are gathered.
    """

    def __init__(
        self, forward: Launch, dual: Launch, codec: Codec | None, rows: Permutation | None, dtype: torch.dtype
    ) -> None:
        self.forward, self.dual, self.codec, self.rows, self.dtype = forward, dual, codec, rows, dtype
        self.under_way: tuple[Sequence[Tensor], list[Tensor], list[Work]] | None = None

    def pack(self, first: Tensor) -> Tensor:
        if self.codec is None:
            return first
        if self.rows is None:
            return self.codec.pack(first)
        assert isinstance(self.codec, PermutingCodec)
        return self.codec.pack_permuted(first, self.rows)

    def launch(self, launch: Launch, sent: Sequence[Tensor]) -> list[Tensor]:
        sent = [tensor.contiguous() for tensor in sent]
        buffers, works = launch(sent)
        self.under_way = (sent, buffers, works)
        return buffers

    def wait(self) -> list[Tensor]:
        assert self.under_way is not None, "a movement is finished twice, or was never started"
        _, buffers, works = self.under_way
        for work in works:
            work.wait()
        self.under_way = None
        return buffers


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return tuple(flight.launch(flight.forward, (flight.pack(sent[0]), *sent[1:])))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        grads, rows = ctx.flight.wait(), ctx.flight.rows
        return (None, *grads) if rows is None else (None, rows.gather_sum(grads[0]), *grads[1:])


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, *buffers: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        flight.wait()
        if flight.codec is None:
            ctx.mark_dirty(*buffers)
            return buffers
        packed, *others = buffers
        ctx.mark_dirty(*others)
        ctx.packed = packed.shape
        return (flight.codec.unpack(packed, flight.dtype), *others)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.flight.launch(ctx.flight.dual, grads)
        if ctx.flight.codec is not None:
            grads = (torch.zeros((), dtype=torch.bfloat16, device=grads[0].device).expand(ctx.packed), *grads[1:])
        return (None, *grads)  # placeholders of the right shape: start's backward returns the received gradients


class _Rounded(torch.autograd.Function):
    """Packs and unpacks rows with a codec. Gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, codec: Codec) -> Tensor:
        return codec.unpack(codec.pack(rows_ND), rows_ND.dtype)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return grad_ND, None


def stay(
    tensors: Sequence[Tensor], *, codec: Codec | None = None, rows: Permutation | None = None, detail: Any = None
) -> Pending:
    """Return the movement of a rank that is alone in its group. It sends nothing, but a codec still rounds."""
    tensors, rows = _gathered(tensors, codec, rows)
    if codec is not None:
        tensors = (_Rounded.apply(tensors[0], codec), *tensors[1:])  # type: ignore[no-untyped-call]
    if rows is not None:
        tensors = (rows.gather(tensors[0]), *tensors[1:])
    return Pending(tuple(tensors), None, detail)


def start(
    sent: Sequence[Tensor],
    *,
    forward: Launch,
    dual: Launch,
    codec: Codec | None = None,
    rows: Permutation | None = None,
    detail: Any = None,
) -> Pending:
    """Launch a movement of ``sent``; ``dual`` moves gradients of the received buffers back to those of ``sent``.

    ``codec`` packs the first tensor, rows ``(N, D)``, in forward. With ``rows``, the first tensor is tokens ``(T, D)``
    instead, from which the rows are gathered.
    """
    sent, rows = _gathered(sent, codec, rows)
    flight = _Flight(forward, dual, codec, rows, sent[0].dtype)
    return Pending(_Start.apply(flight, *sent), flight, detail)  # type: ignore[no-untyped-call]


def _gathered(
    tensors: Sequence[Tensor], codec: Codec | None, rows: Permutation | None
) -> tuple[Sequence[Tensor], Permutation | None]:
    """Return the tensors with tokens replaced by rows, unless the codec packs tokens."""
    if rows is None or (codec is not None and isinstance(codec, PermutingCodec)):
        return tensors, rows
    return [rows.gather(tensors[0]), *tensors[1:]], None


def finish(pending: Pending) -> tuple[Tensor, ...]:
    """Wait for a movement and return the received tensors."""
    if pending.flight is None:
        return pending.buffers
    received: tuple[Tensor, ...] = _Finish.apply(pending.flight, *pending.buffers)  # type: ignore[no-untyped-call]
    return received
