"""A movement of tensors between ranks as two autograd nodes, so that work placed between them overlaps with it.

``start`` launches, ``finish`` waits. In backward, finish launches the dual movement and start waits for it, so work
between them in forward also runs between them in backward. A codec packs rows in forward; gradients are not packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from moefw.core.contracts import Codec
from moefw.core.errors import ContractError
from moefw.core.stages import Pending


class Work(Protocol):
    """Handle of an asynchronous collective."""

    def wait(self) -> Any:
        """Block, or make the current stream wait, until the result is available."""


class Permutation(Protocol):
    """Mapping of tokens ``(T, D)`` to rows ``(N, D)``."""

    def gather(self, x_TD: Tensor) -> Tensor:
        """Rows. Differentiable."""

    def gather_sum(self, rows_ND: Tensor) -> Tensor:
        """Sum of each token's rows. Differentiable."""


@runtime_checkable
class PermutingCodec(Codec, Protocol):
    """A codec that packs a token once for all of its rows."""

    def pack_permuted(self, x_TD: Tensor, rows: Permutation) -> Tensor:
        """``pack(rows.gather(x_TD))``, bit for bit."""


D = TypeVar("D")
"""Detail of a movement: what the dispatcher that starts it needs to finish it."""
Launch = Callable[[Sequence[Tensor]], tuple[list[Tensor], list[Work]]]
"""Starts a movement of the given tensors; returns the buffers it fills and the works to wait for."""


class Flight:
    """A launched movement."""

    def __init__(self, launch: Launch, sent: Sequence[Tensor]) -> None:
        self.sent = [tensor.contiguous() for tensor in sent]
        self.buffers, self.works = launch(self.sent)

    def wait(self) -> list[Tensor]:
        """Wait, and return the buffers."""
        for work in self.works:
            work.wait()
        return self.buffers


class _Movement:
    """A movement and its dual. ``out`` and ``back`` are their flights, from the launch to the wait.

    ``codec`` packs the first tensor: rows in ``dtype`` or, with ``rows``, the tokens from which they are gathered.
    """

    def __init__(
        self, forward: Launch, dual: Launch, codec: Codec | None, rows: Permutation | None, dtype: torch.dtype
    ) -> None:
        self.forward = forward
        self.dual = dual
        self.codec = codec
        self.rows = rows
        self.dtype = dtype
        self.out: Flight | None = None
        self.back: Flight | None = None

    def pack(self, first: Tensor) -> Tensor:
        """Rows that travel, from the first tensor: rows, or tokens with a codec that permutes."""
        if self.codec is None:
            return first
        if self.rows is None:
            return self.codec.pack(first)
        assert isinstance(self.codec, PermutingCodec)
        return self.codec.pack_permuted(first, self.rows)

    def arrived(self) -> list[Tensor]:
        """Wait for the movement, and free what was sent. Return its buffers. Raises ContractError at a second call."""
        if self.out is None:
            raise ContractError(
                "a movement is finished twice.", "Start another one: a pending movement is for one use."
            )
        flight = self.out
        self.out = None
        return flight.wait()

    def returned(self) -> list[Tensor]:
        """Wait for the dual movement, and free what was sent. Return its buffers, the gradients of what was sent."""
        assert self.back is not None, "the backward of finish comes before that of start"
        flight = self.back
        self.back = None
        return flight.wait()


class _Start(torch.autograd.Function):
    """Launches the movement; in backward, waits for the dual one."""

    @staticmethod
    def forward(ctx: Any, movement: _Movement, *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.movement = movement
        movement.out = Flight(movement.forward, (movement.pack(sent[0]), *sent[1:]))
        return tuple(movement.out.buffers)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        grad_of_rows, *others = ctx.movement.returned()
        rows: Permutation | None = ctx.movement.rows
        grad_of_first = grad_of_rows if rows is None else rows.gather_sum(grad_of_rows)
        return (None, grad_of_first, *others)


class _Finish(torch.autograd.Function):
    """Waits for the movement; in backward, launches the dual one."""

    @staticmethod
    def forward(ctx: Any, movement: _Movement, *buffers: Tensor) -> tuple[Tensor, ...]:
        ctx.movement = movement
        movement.arrived()
        first, *others = (buffer.detach() for buffer in buffers)
        if movement.codec is not None:
            ctx.packed_shape = first.shape
            first = movement.codec.unpack(first, movement.dtype)
        return (first, *others)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        movement = ctx.movement
        movement.back = Flight(movement.dual, grads)
        # Placeholders of the right shapes: the backward of start returns the gradients that were received.
        if movement.codec is None:
            return (None, *grads)
        zero = torch.zeros((), dtype=torch.bfloat16, device=grads[0].device)
        return (None, zero.expand(ctx.packed_shape), *grads[1:])


class _Rounded(torch.autograd.Function):
    """Packs and unpacks rows with a codec. Gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, codec: Codec) -> Tensor:
        return codec.unpack(codec.pack(rows_ND), rows_ND.dtype)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return grad_ND, None


def stay(
    tensors: Sequence[Tensor],
    *,
    codec: Codec | None = None,
    rows: Permutation | None = None,
    detail: D = None,  # type: ignore[assignment]
) -> Pending[D]:
    """Movement of a rank that is alone in its group. It sends nothing, but a codec still rounds."""
    tensors, rows = _gathered(tensors, codec, rows)
    if codec is not None:
        tensors = (_Rounded.apply(tensors[0], codec), *tensors[1:])  # type: ignore[no-untyped-call]
    if rows is not None:
        tensors = (rows.gather(tensors[0]), *tensors[1:])
    return Pending(buffers=tuple(tensors), detail=detail)


def start(
    sent: Sequence[Tensor],
    *,
    forward: Launch,
    dual: Launch,
    codec: Codec | None = None,
    rows: Permutation | None = None,
    detail: D = None,  # type: ignore[assignment]
) -> Pending[D]:
    """Launch a movement of ``sent``; ``dual`` moves gradients of the received buffers back to those of ``sent``.

    ``codec`` packs the first tensor, rows ``(N, D)``, in forward. With ``rows``, the first tensor is tokens ``(T, D)``
    instead, from which the rows are gathered.
    """
    sent, rows = _gathered(sent, codec, rows)
    movement = _Movement(forward=forward, dual=dual, codec=codec, rows=rows, dtype=sent[0].dtype)
    buffers = _Start.apply(movement, *sent)  # type: ignore[no-untyped-call]
    return Pending(buffers=buffers, detail=detail, flight=movement)


def _gathered(
    tensors: Sequence[Tensor], codec: Codec | None, rows: Permutation | None
) -> tuple[Sequence[Tensor], Permutation | None]:
    """Tensors with tokens replaced by rows, unless the codec packs tokens."""
    if rows is None:
        return tensors, None
    if codec is not None and isinstance(codec, PermutingCodec):
        return tensors, rows
    return [rows.gather(tensors[0]), *tensors[1:]], None


def finish(pending: Pending[Any]) -> tuple[Tensor, ...]:
    """Wait for a movement and return the received tensors. Its buffers may be detached from the graph of the start.

    Raises ContractError if it is finished twice.
    """
    if pending.flight is None:
        return pending.buffers
    received: tuple[Tensor, ...] = _Finish.apply(pending.flight, *pending.buffers)  # type: ignore[no-untyped-call]
    return received
