"""Functions that ranks of a pool run against the fake ``deep_ep``: layers, movements and their leftovers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks, Tree
from moefw.core.contracts import Dispatcher
from moefw.core.errors import MoefwError
from moefw.core.site import Machine
from moefw.plugins.dispatchers.deepep import DeepEP
from moefw.plugins.dispatchers.hybridep import HybridEP
from moefw.runtime.compute.row_keys import with_keys
from moefw.testing.announce import with_plugins
from moefw.testing.layer_case import LayerCase, Outcome, build_layer, routed, solve
from moefw.testing.training import short_run
from operators_seen import Operators


@contextmanager
def library(**options: Any) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Build dispatchers over the fake, for any backend of the spec; yields the calls to the fake."""
    from deep_ep.signatures import CALLS

    from moefw.plugins.dispatchers.deepep import library as deepep
    from moefw.plugins.dispatchers.hybridep import library as hybridep

    before = DeepEP.among, HybridEP.among
    DeepEP.among = lambda self, *given: deepep.build(*given, codec=self.codec(given[-1]), **options)
    HybridEP.among = lambda self, *given: hybridep.build(*given, budget=self.budget, **options)
    torch.utils.deterministic.fill_uninitialized_memory = False
    CALLS.clear()
    try:
        yield CALLS
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        DeepEP.among, HybridEP.among = before


def solved(case: LayerCase, options: dict[str, Any]) -> Outcome:
    """Run the layer of a layer case forward and backward over the fake."""
    with library(**options):
        return solve(case)


def solved_in_any_order(case: LayerCase, options: dict[str, Any]) -> Outcome:
    """Return what :func:`solved` does, without torch's deterministic mode."""
    with library(**options):
        return solve.__wrapped__(case)


def trained(tree: Tree, options: dict[str, Any]) -> list[float]:
    """Return the loss and the norm of the gradient of a step over the fake."""
    with library(**options):
        (result,) = short_run(tree, 1).results
    return [result.loss, result.grad_norm]


@dataclass
class OfArrival:
    """What the host does with rows that arrived. It reads no value of a tensor.

    The operators of the finish, but for those of the wait; whether the experts get the rows that arrived, and combine
    those that the experts return, uncopied.
    """

    operators: list[str]
    same_rows: bool
    combined_as_given: bool


@contextmanager
def unread() -> Iterator[None]:
    """Raise AssertionError where Python reads a value of a tensor."""
    with ExitStack() as patches:
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__"):
            patches.enter_context(mock.patch.object(Tensor, name, side_effect=AssertionError("a value is read")))
        yield


def of_arrival(case: LayerCase, options: dict[str, Any]) -> OfArrival:
    """Return what a dispatch and a combine do here."""
    with library(**options) as calls:
        layer, shared = build_layer(case)
        moves = layer.dispatcher
        x_TD, _, routing = routed(case, layer)
        pending = moves.start_dispatch(x_TD, routing.weights_TK.detach(), moves.plan(routing))
        with Operators() as seen, unread():
            batch, handle = moves.finish_dispatch(pending)
        rows_RD = torch.zeros_like(batch.rows_RD)
        moves.finish_combine(moves.start_combine(rows_RD, handle))
        (given,) = [given["x"] for name, given in calls if name.endswith(".combine")]
        found = OfArrival(
            operators=[name for name in seen.names if name not in ("aten::copy_", "aten::detach")],
            same_rows=batch.rows_RD.data_ptr() == pending.buffers[0].data_ptr(),
            combined_as_given=given.data_ptr() == rows_RD.data_ptr(),
        )
        shared.close()
    return found


def keyed(case: LayerCase, options: dict[str, Any]) -> list[tuple[list[float], int]]:
    """Return each row that arrives, with its key."""
    with library(**options):
        layer, shared = build_layer(case)
        moves = layer.dispatcher
        x_TD, _, routing = routed(case, layer)
        batch, handle = moves.dispatch(x_TD, routing.weights_TK, moves.plan(routing))
        keys_T = case.keys(dist.get_rank())
        found = with_keys(batch, handle, keys_T, routing.weights_TK, moves, first_expert=0)
        shared.close()
    return list(zip(found.rows_RD.float().tolist(), found.keys_R.tolist(), strict=True))


def row_bytes(case: LayerCase, options: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the movements of a layer, forward and backward, with the bytes of a row."""
    with library(**options) as calls:
        solve.__wrapped__(case)
    moves = [(name.rpartition(".")[2], given) for name, given in calls]
    return [(name, given["x"].shape[1] * 2) for name, given in moves if name in ("dispatch", "combine")]


def received_without_a_read(case: LayerCase, options: dict[str, Any]) -> dict[str, Any]:
    """Return what :func:`received` does. Raises AssertionError where the counts of arrived rows are read back."""
    with mock.patch("moefw_kernels.permute.arrival.on_host", side_effect=AssertionError("counts are read back")):
        return received(case, options)


def received(case: LayerCase, options: dict[str, Any] | None) -> dict[str, Any]:
    """Return the rows that arrive, their weights and counts, over the fake or (None) over the torch backend."""
    if options is None:
        return _received(case)
    with library(**options):
        return _received(case)


def _received(case: LayerCase) -> dict[str, Any]:
    layer, shared = build_layer(case)
    x_TD, _, routing = routed(case, layer)
    moves = layer.dispatcher
    batch, handle = moves.dispatch(x_TD, routing.weights_TK, moves.plan(routing))
    end = int(batch.offsets_e[-1])
    out = moves.combine(torch.where(torch.arange(len(batch.rows_RD)).unsqueeze(1) < end, batch.rows_RD, 0), handle)
    shared.close()
    return {
        "rows": batch.rows_RD[:end].detach().float(),
        "weights": batch.row_weights_R[:end].detach(),
        "counts": batch.counts_e.tolist(),
        "offsets": batch.offsets_e.tolist(),
        "sizes": batch.counts_host,
        "total": len(batch.rows_RD),
        "stats": {name: float(value) for name, value in batch.stats.items()},
        "out": out.detach().float(),
    }


@dataclass
class Again:
    """Results of a second movement along a handle, and the calls to the library."""

    same_rows: bool
    same_weights: bool
    grads: dict[str, Tensor]
    calls: list[tuple[str, list[str]]]


def redispatched(case: LayerCase, options: dict[str, Any]) -> Again:
    """Dispatch, then redispatch twice the tokens and weights, and return the gradients of the second."""
    with library(**options) as calls:
        layer, shared = build_layer(case)
        moves = layer.dispatcher
        x_TD, _, routing = routed(case, layer)
        weights_TK = routing.weights_TK.detach()
        batch, handle = moves.dispatch(x_TD, weights_TK, moves.plan(routing))
        calls.clear()
        x2, w2 = (2 * x_TD).requires_grad_(), (2 * weights_TK).requires_grad_()
        again, _ = moves.redispatch(x2, w2, handle)
        end = int(batch.offsets_e[-1])
        (again.rows_RD[:end].float().sum() + (3 * again.row_weights_R[:end]).sum()).backward()
        asked = [(name, sorted(given)) for name, given in calls]
        grads = {"x": x2.grad.float(), "weights": w2.grad, "ids": routing.expert_ids_TK}
        shared.close()
    return Again(
        torch.equal(2 * batch.rows_RD[:end], again.rows_RD[:end]),
        torch.equal(2 * batch.row_weights_R[:end], again.row_weights_R[:end]),
        grads,
        asked,
    )


def in_flight(case: LayerCase, options: dict[str, Any], rtol: float = 0.0) -> bool:
    """Return whether two micro-batches in a row and interleaved give the same outputs and gradients.

    To the bit, or to a share of the largest value where rows come in any order.
    """
    with library(**options):
        layer, shared = build_layer(case)
        results = [_two(case, layer, interleaved) for interleaved in (False, True)]
        shared.close()
    return all(bool(((a - b).abs() <= rtol * b.abs().max()).all()) for a, b in zip(*results) if len(b))


def _two(case: LayerCase, layer: Any, interleaved: bool) -> list[Tensor]:
    moves = layer.dispatcher
    sent = []
    for seed in (1, 2):
        x_TD, _, routing = routed(LayerCase(**{**case.__dict__, "seed": seed}), layer)
        sent.append((x_TD.requires_grad_(), routing))
    if interleaved:
        plans = [moves.plan(routing) for _, routing in sent]
        flying = [moves.start_dispatch(x, r.weights_TK, plan) for (x, r), plan in zip(sent, plans)]
        arrived = [moves.finish_dispatch(pending) for pending in flying]
        back = [moves.start_combine(layer.experts(batch), handle) for batch, handle in arrived]
        outs = [moves.finish_combine(pending) for pending in back]
    else:
        outs = []
        for x_TD, routing in sent:
            batch, handle = moves.dispatch(x_TD, routing.weights_TK, moves.plan(routing))
            outs.append(moves.combine(layer.experts(batch), handle))
    sum((out.float().square().sum() for out in outs), torch.zeros(())).backward()
    return [*(out.detach() for out in outs), *(x.grad for x, _ in sent)]


def left_on_the_dispatcher(case: LayerCase, options: dict[str, Any]) -> list[str]:
    """Return the attributes of the dispatcher, and of its wire, that a forward and backward changed."""
    with library(**options):
        layer, shared = build_layer(case)
        moves = layer.dispatcher
        held = [moves, *(value for value in vars(moves).values() if type(value).__module__.startswith("moefw"))]
        before = [_fields(one) for one in held]
        _two(case, layer, False)
        after = [_fields(one) for one in held]
        shared.close()
    return [
        name for old, new in zip(before, after) for name in old.keys() | new.keys() if old.get(name) != new.get(name)
    ]


def _fields(one: Any) -> dict[str, int]:
    return {name: id(value) for name, value in getattr(one, "__dict__", {}).items()}


def rows_outlive_the_layer(case: LayerCase, options: dict[str, Any]) -> list[bool]:
    """Return whether the moved tensors are still held after a forward and backward, before any garbage collection."""
    gc.collect()
    gc.disable()
    try:
        with library(**options):
            layer, shared = build_layer(case)
            moves = layer.dispatcher
            x_TD, _, routing = routed(case, layer)
            batch, handle = moves.dispatch(x_TD.requires_grad_(), routing.weights_TK, moves.plan(routing))
            out_TD = moves.combine(batch.rows_RD * 2, handle)
            held = [weakref.ref(one) for one in (batch.rows_RD, batch.row_weights_R, out_TD)]
            out_TD.float().sum().backward()
            del batch, out_TD, routing, x_TD
            outlived = [one() is not None for one in held]
            shared.close()
    finally:
        gc.enable()
    return outlived


def refusal(case: LayerCase, options: dict[str, Any], prepare: Callable[[], None] | None = None) -> str:
    """Return the message with which building or running the layer fails; empty if it does not."""
    with library(**options):
        if prepare:
            prepare()
        try:
            layer, _ = build_layer(case)
            x_TD, _, routing = routed(case, layer)
            moves: Dispatcher = layer.dispatcher
            moves.dispatch(x_TD, routing.weights_TK, moves.plan(routing))
        except MoefwError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            torch.use_deterministic_algorithms(False)
            dist.barrier()
    return ""


def refused(layer_case: LayerCase, machine: Machine, **dispatch: Any) -> str:
    """Return the message with which ``machine`` refuses a layer case's spec with other options of its dispatcher."""
    parts = {**layer_case.parts, "dispatch": {**layer_case.parts["dispatch"], "backend": "library", **dispatch}}
    tree = LayerCase(**{**layer_case.__dict__, "parts": parts}).tree()
    tree["run"] = {"device": machine.device}
    try:
        assemble_tree(
            tree,
            Marks("layer case"),
            defaults=defaults(),
            registry=with_plugins(()),
            world=layer_case.world,
            machine=machine,
        )
    except MoefwError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def torch_fills_memory() -> None:
    """Torch's deterministic mode with its default."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def torch_is_deterministic() -> None:
    """Torch's deterministic mode, without what DeepEP refuses anyway."""
    torch.use_deterministic_algorithms(True)
