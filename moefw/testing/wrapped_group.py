"""A process group whose every collective goes through one method: to be counted, to be watched, or to be done here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from attrs import Factory, frozen
from torch import Tensor

_ProcessGroup: Any = dist.ProcessGroup
"""Its methods are overloaded, and named otherwise in each version of torch."""


@frozen(kw_only=True, eq=False)
class Collective:
    """A call of a collective on this rank.

    ``to``: what goes to each rank. ``places``: where that of each rank comes to lie, in ``outputs``; if ``operation``
    is given, the one place where all of it is reduced. ``call`` has the wrapped group do it, into other outputs.
    """

    kind: str
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    to: Mapping[int, Tensor] = Factory(dict)
    places: Mapping[int, Tensor] = Factory(dict)
    operation: Any = None
    call: Callable[[list[Tensor]], Any]


class WrappedGroup(_ProcessGroup):  # type: ignore[misc]
    """A group over ``inner``, if it wraps one.

    Of a group that it did not make, ``torch.distributed`` asks nothing but the method of the collective (by its name
    of 2.11 or of 2.13); a collective that is not here is not there, so nothing passes unseen.
    """

    def __init__(self, rank: int, size: int, inner: Any = None) -> None:
        super().__init__(rank, size)
        self.inner = inner

    def launch(self, collective: Collective) -> Any:
        """Start a collective; return its work."""
        raise NotImplementedError

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Send each split to its rank; no splits: equal ones."""
        return self.launch(
            Collective(
                kind="all-to-all",
                inputs=[input],
                outputs=[output],
                to=_by_rank(input.split(input_splits or self._even(input))),
                places=_by_rank(output.split(output_splits or self._even(output))),
                call=lambda outs: self.inner.alltoall_base(outs[0], input, output_splits, input_splits, *_given(opts)),
            )
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Send each tensor to its rank."""
        return self.launch(
            Collective(
                kind="all-to-all",
                inputs=inputs,
                outputs=outputs,
                to=_by_rank(inputs),
                places=_by_rank(outputs),
                call=lambda outs: self.inner.alltoall(outs, inputs, *_given(opts)),
            )
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Put the input of every rank into each output."""
        return self.launch(
            Collective(
                kind="all-gather",
                inputs=[input],
                outputs=[output],
                to=dict.fromkeys(range(self.size()), input),
                places=_by_rank(output.view(self.size(), *input.shape).unbind()),
                call=lambda outs: self.inner._allgather_base(outs[0], input, *_given(opts)),
            )
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Put the input of every rank into each list of outputs."""
        (places,), (input,) = outputs, inputs
        return self.launch(
            Collective(
                kind="all-gather",
                inputs=inputs,
                outputs=places,
                to=dict.fromkeys(range(self.size()), input),
                places=_by_rank(places),
                call=lambda outs: self.inner.allgather([outs], inputs, *_given(opts)),
            )
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        """Reduce each rank's part of the inputs."""
        return self.launch(
            Collective(
                kind="reduce-scatter",
                inputs=[input],
                outputs=[output],
                to=_by_rank(input.view(self.size(), *output.shape).unbind()),
                places={self.rank(): output},
                operation=opts.reduceOp.op,
                call=lambda outs: self.inner._reduce_scatter_base(outs[0], input, opts),
            )
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Reduce each rank's part of the inputs."""
        (output,), (parts,) = outputs, inputs
        return self.launch(
            Collective(
                kind="reduce-scatter",
                inputs=parts,
                outputs=outputs,
                to=_by_rank(parts),
                places={self.rank(): output},
                operation=opts.reduceOp.op,
                call=lambda outs: self.inner.reduce_scatter(outs, inputs, opts),
            )
        )

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce the tensors of all ranks in place. A rank's own goes to each peer, who reduces for himself."""
        (tensor,) = tensors
        given = tensor.detach().clone()
        return self.launch(
            Collective(
                kind="all-reduce",
                outputs=tensors,
                to=dict.fromkeys(range(self.size()), given),
                places={self.rank(): tensor},
                operation=opts.reduceOp.op,
                call=lambda outs: self.inner.allreduce(_filled(outs, given), opts),
            )
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Put the root's tensor into those of all."""
        (tensor,), root = tensors, opts.rootRank
        given = tensor.detach().clone()
        return self.launch(
            Collective(
                kind="broadcast",
                outputs=tensors,
                to=dict.fromkeys(range(self.size()), given) if root == self.rank() else {},
                places={root: tensor},
                call=lambda outs: self.inner.broadcast(_filled(outs, given), opts),
            )
        )

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Send to one rank."""
        (tensor,) = tensors
        return self.launch(
            Collective(
                kind="send", inputs=tensors, to={peer: tensor}, call=lambda _: self.inner.send(tensors, peer, tag)
            )
        )

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Receive from one rank."""
        (tensor,) = tensors
        return self.launch(
            Collective(
                kind="recv",
                outputs=tensors,
                places={peer: tensor},
                call=lambda outs: self.inner.recv(outs, peer, tag),
            )
        )

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self.launch(Collective(kind="barrier", call=lambda _: self.inner.barrier(*_given(opts))))

    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _even(self, tensor: Tensor) -> list[int]:
        return [len(tensor) // self.size()] * self.size()


def _by_rank(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    return dict(enumerate(tensors))


def _filled(outputs: list[Tensor], given: Tensor) -> list[Tensor]:
    outputs[0].detach().copy_(given)
    return outputs


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)
