"""Interception of collectives at PyTorch's operators: on every process group of any origin, in forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import Factory, frozen
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._pytree import tree_map_only

from moefw.core.errors import ContractError
from moefw.recording.patches import Mode


@frozen(kw_only=True, eq=False)
class Collective:
    """One call of a collective on this rank. Ranks are numbered within ``group``.

    ``to``: the tensors sent to each rank. ``places``: the parts of ``outputs`` that receive the tensors of each rank.
    With an ``operation``, the only place is this rank's, which receives the reduction over all ranks. ``call`` runs the
    operator with other outputs in place of its own. ``answer`` makes the operator's result from a work handle. A
    functional collective has no ``outputs`` and no ``places``: it returns a tensor, in which ``places_in`` finds the
    places.
    """

    kind: str
    group: ProcessGroup
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    to: Mapping[int, Sequence[Tensor]] = Factory(dict)
    places: Mapping[int, Sequence[Tensor]] = Factory(dict)
    operation: Any = None
    call: Callable[[Sequence[Tensor]], Any]
    answer: Callable[[dist.Work], Any]
    places_in: Callable[[Tensor], Mapping[int, Sequence[Tensor]]] | None = None


class Collectives(Mode):
    """Dispatch mode that intercepts every collective of this thread while it is active.

    Raises ContractError for an unknown collective of PyTorch. Communication that does not use PyTorch's operators, such
    as a library's own kernels, is not intercepted.
    """

    def launch(self, collective: Collective) -> Any:
        """Launch a collective and return its operator's result."""
        raise NotImplementedError

    def wait(self, result: Tensor) -> Tensor:
        """Wait for the result of a functional collective."""
        waited: Tensor = WAIT(result)
        return waited

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator: a collective by :meth:`launch`, a wait by :meth:`wait`."""
        if types and any(issubclass(kind, AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # the subclass waits for its tensor first
        if func.namespace not in ("c10d", "_c10d_functional") or func.__name__ in _LOCAL:
            return func(*args, **(kwargs or {}))
        if func is WAIT:
            return self.wait(*args)
        return self.launch(collective_of(func, args, kwargs or {}))


_LOCAL: Final = ("_wrap_tensor_autograd.default",)
WAIT: Final = torch.ops._c10d_functional.wait_tensor.default


def collective_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Collective:
    """Collective of an operator of ``c10d`` or ``_c10d_functional``. Raises ContractError if unknown."""
    name = f"{func.namespace}::{func.__name__.partition('.')[0]}"
    read = _READ.get(name)
    if read is None:
        problem = f"{name} is not among the collectives that are known here."
        raise ContractError(problem, f"Use one of {', '.join(sorted(_READ))}.")
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    # ``c10d`` names the group by a boxed object, ``_c10d_functional`` by a string.
    boxed = arguments.pop("process_group", None)
    group_name = arguments.pop("group_name", None)
    group = _resolve_process_group(group_name) if boxed is None else ProcessGroup.unbox(boxed)
    fields = read(group, *arguments.values())

    def call(outputs: Sequence[Tensor]) -> Any:
        replacements = {id(old): new for old, new in zip(fields.get("outputs", ()), outputs, strict=True)}
        replaced_args = tree_map_only(Tensor, lambda tensor: replacements.get(id(tensor), tensor), args)
        return func(*replaced_args, **kwargs)

    def answer(work: dist.Work) -> Any:
        returns_outputs = len(func._schema.returns) > 1
        return (args[0], work.boxed()) if returns_outputs else work.boxed()

    return Collective(group=group, call=call, answer=answer, **fields)


_Fields = dict[str, Any]


def _all_to_all(group: ProcessGroup, output: Tensor, input: Tensor, received: Any, sent: Any, *_: Any) -> _Fields:
    return {**_sent_apart(group, input, sent), "outputs": [output], "places": _split(output, received, group)}


def _sent_apart(group: ProcessGroup, input: Tensor, sent: Any) -> _Fields:
    return {"kind": "all-to-all", "inputs": [input], "to": _split(input, sent, group)}


def _all_to_all_list(group: ProcessGroup, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> _Fields:
    return {
        "kind": "all-to-all",
        "inputs": inputs,
        "outputs": outputs,
        "to": _each(inputs),
        "places": _each(outputs),
    }


def _all_gather(group: ProcessGroup, output: Tensor, input: Tensor, *_: Any) -> _Fields:
    places = output.view(group.size(), *input.shape).unbind()
    return {**_sent_to_all(group, [input]), "outputs": [output], "places": _each(places)}


def _all_gather_list(group: ProcessGroup, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> _Fields:
    (places,) = outputs
    return {**_sent_to_all(group, inputs), "outputs": places, "places": _each(places)}


def _sent_to_all(group: ProcessGroup, inputs: Sequence[Tensor]) -> _Fields:
    return {"kind": "all-gather", "inputs": inputs, "to": dict.fromkeys(range(group.size()), inputs)}


def _reduce_scatter(group: ProcessGroup, output: Tensor, input: Tensor, operation: Any, *_: Any) -> _Fields:
    return {
        **_reduced_apart(group, input),
        "outputs": [output],
        "places": {group.rank(): [output]},
        "operation": _kind_of(operation),
    }


def _reduced_apart(group: ProcessGroup, input: Tensor) -> _Fields:
    return {"kind": "reduce-scatter", "inputs": [input], "to": _split(input, None, group)}


def _reduce_scatter_list(
    group: ProcessGroup, outputs: list[Tensor], inputs: list[list[Tensor]], operation: Any, *_: Any
) -> _Fields:
    (parts,) = inputs
    return {
        "kind": "reduce-scatter",
        "inputs": parts,
        "outputs": outputs,
        "to": _each(parts),
        "places": {group.rank(): outputs},
        "operation": _kind_of(operation),
    }


def _all_reduce(group: ProcessGroup, tensors: list[Tensor], operation: Any, *_: Any) -> _Fields:
    """All-reduce as a send of this rank's tensors to each peer, which reduces them locally."""
    sent = [tensor.detach().clone() for tensor in tensors]  # it writes its result over what it sends
    return {
        "kind": "all-reduce",
        "outputs": tensors,
        "to": dict.fromkeys(range(group.size()), sent),
        "places": {group.rank(): tensors},
        "operation": _kind_of(operation),
    }


def _broadcast(group: ProcessGroup, tensors: list[Tensor], root: int, *_: Any) -> _Fields:
    sent = [tensor.detach().clone() for tensor in tensors]  # all ranks write into what the root sends
    return {
        "kind": "broadcast",
        "outputs": tensors,
        "to": dict.fromkeys(range(group.size()), sent) if root == group.rank() else {},
        "places": {root: tensors},
    }


def _send(group: ProcessGroup, tensors: list[Tensor], peer: int, *_: Any) -> _Fields:
    return {"kind": "send", "inputs": tensors, "to": {peer: tensors}}


def _receive(group: ProcessGroup, tensors: list[Tensor], peer: int, *_: Any) -> _Fields:
    return {"kind": "recv", "outputs": tensors, "places": {peer: tensors}}


def _barrier(group: ProcessGroup, *_: Any) -> _Fields:
    return {"kind": "barrier"}


_READ: Final[Mapping[str, Callable[..., _Fields]]] = {
    "c10d::alltoall_base_": _all_to_all,
    "c10d::alltoall_": _all_to_all_list,
    "c10d::_allgather_base_": _all_gather,
    "c10d::allgather_": _all_gather_list,
    "c10d::_reduce_scatter_base_": _reduce_scatter,
    "c10d::reduce_scatter_": _reduce_scatter_list,
    "c10d::allreduce_": _all_reduce,
    "c10d::broadcast_": _broadcast,
    "c10d::send": _send,
    "c10d::recv_": _receive,
    "c10d::barrier": _barrier,
    "_c10d_functional::all_to_all_single": lambda group, input, received, sent: {
        **_sent_apart(group, input, sent),
        "places_in": lambda result: _split(result, received, group),
    },
    "_c10d_functional::all_gather_into_tensor": lambda group, input, _: {
        **_sent_to_all(group, [input]),
        "places_in": lambda result: _each(result.view(group.size(), *input.shape).unbind()),
    },
    "_c10d_functional::reduce_scatter_tensor": lambda group, input, operation, _: {
        **_reduced_apart(group, input),
        **_reduced_into_result(group, operation),
    },
    "_c10d_functional::all_reduce": lambda group, input, operation: {
        **_sent_to_all(group, [input]),
        "kind": "all-reduce",
        **_reduced_into_result(group, operation),
    },
}
"""Functions that return the fields of a collective, by operator, from the group and the operator's other arguments."""


def _split(tensor: Tensor, sizes: Sequence[int] | None, group: ProcessGroup) -> dict[int, list[Tensor]]:
    """Rows for each rank; without sizes, equal parts."""
    equal_sizes = [len(tensor) // group.size()] * group.size()
    return _each(tensor.split(list(sizes or equal_sizes)))


def _each(tensors: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """One tensor for each rank, in their order."""
    return {rank: [tensor] for rank, tensor in enumerate(tensors)}


def _reduced_into_result(group: ProcessGroup, operation: str) -> _Fields:
    kind = getattr(dist.ReduceOp.RedOpType, operation.upper())
    return {"operation": kind, "places_in": lambda result: {group.rank(): [result]}}


def _kind_of(operation: Any) -> dist.ReduceOp.RedOpType:
    """Reduce operation of an operator, which holds it as a number."""
    return dist.ReduceOp.RedOpType(operation.op())
