"""The contract of context parallelism: ``class TestMine(ContextParallelSuite): plugin = Mine``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from moefw.compose.build import Shared, bare_context, open_layout
from moefw.core.contracts import ContextAttention
from moefw.core.errors import PlanError, PluginError
from moefw.runtime.attention.attend import attend
from moefw.runtime.attention.mask import Mask
from moefw.runtime.parallel.cp_blocks import pieces_of
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.contract import misfits
from moefw.testing.suites.part import MethodChecks
from moefw.testing.suites.replay import ReplayChecks
from moefw.testing.suites.watch import same_bits, worst_error

RTOL = 2e-5
"""Largest error as a share of a tensor's largest value."""
NAMES = ("the queries", "the keys", "the values", "the sinks")


@frozen(kw_only=True)
class ContextCase:
    """Whole sequences in heads. Legend: :mod:`moefw.runtime.attention.attend`."""

    heads: int = 8
    groups: int = 4
    length: int = 48
    width: int = 4
    value_width: int = 4
    window: int | None = None
    documents: bool = False
    lengths: tuple[int, ...] | None = None
    sinks: bool = False
    scale: float | None = None
    seed: int = 0

    def drawn(self) -> tuple[list[Tensor], Mask, Tensor]:
        """Queries, keys, values and the sinks if there are any, the mask, and the gradient of the output."""
        draws = torch.Generator().manual_seed(self.seed)
        shapes: list[tuple[int, ...]] = [
            (2, self.heads, self.length, self.width),
            (2, self.groups, self.length, self.width),
            (2, self.groups, self.length, self.value_width),
        ]
        if self.sinks:
            shapes.append((self.heads,))
        tensors = [torch.randn(shape, generator=draws) for shape in shapes]
        begins_BS = torch.rand(2, self.length, generator=draws) < 0.2
        if self.lengths is not None:
            numbers_S = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
            mask = Mask(window=self.window, documents_BS=numbers_S.expand(2, -1), lengths=self.lengths)
        else:
            mask = Mask(window=self.window, documents_BS=begins_BS.cumsum(1) if self.documents else None)
        probe = torch.randn(2, self.heads, self.length, self.value_width, generator=draws)
        return tensors, mask, probe


CASES = (
    ContextCase(),
    ContextCase(groups=1, width=6, value_width=4, scale=0.3),
    ContextCase(groups=8, sinks=True, seed=1),
    ContextCase(window=5, sinks=True, seed=2),
    ContextCase(window=17, groups=2, seed=3),
    ContextCase(documents=True, seed=4),
    ContextCase(documents=True, window=3, sinks=True, groups=8, seed=5),
)
"""Shared and own heads of keys, narrower values, sinks, windows shorter and longer than a piece, documents."""


def packs(world: int) -> tuple[ContextCase, ContextCase, ContextCase]:
    """Packs of two sequences, a long and a short one in either order, and of three, that so many ranks can cut."""
    unit = pieces_of(world)
    whole = ContextCase().length
    lengths = (whole - unit, unit)
    return (
        ContextCase(lengths=lengths, seed=6),
        ContextCase(lengths=lengths[::-1], window=3, sinks=True, seed=8),
        ContextCase(lengths=(unit, whole - 2 * unit, unit), groups=2, seed=9),
    )


def unlike_masks(world: int) -> Sequence[tuple[ContextCase, ContextCase]]:
    """Pairs of calls that differ in what their queries may see."""
    return [(ContextCase(), ContextCase(documents=True, seed=7)), packs(world)[:2]]


class ContextParallelSuite(ReplayChecks, MethodChecks):
    """Tests an algorithm against attention on one rank: outputs, and gradients of queries, keys, values and sinks."""

    _replay_worlds = (2,)

    def _replay_layout(self, world: int) -> Mapping[str, Any]:
        """Layout of so many ranks: they share sequences."""
        return {"dense": {"cp": world}}

    def worlds(self) -> Iterator[tuple[int, LayerCase]]:
        """Yield the numbers of ranks on which the algorithm fits eight heads, with a spec for each."""
        worlds = {2, 3, *self.profile.worlds} - {1}
        for world in sorted(each for each in worlds if each <= self.pool.size):
            attention = {"use": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 4}
            length = ContextCase().length
            train = {"tokens_per_step": length, "micro_batch": 1, "seq_len": length}
            parts = {"parallel": {"dense": {"cp": world}}, "attention": attention, "train": train}
            layer_case = self.layer_case(tokens=(1,) * world, parts=parts)
            try:
                layer_case.resolve()
            except PlanError:
                if world == 2:
                    raise
                continue
            yield world, layer_case

    def _misfits_of_built(self) -> list[str]:
        world, layer_case = next(self.worlds())
        return list(self.pool.run(misfits_of_opened, world, layer_case)[0])

    def test_equals_attention_on_one_rank(self) -> None:
        """Output and gradients, for shared heads, narrow values, sinks, windows and documents, on 2 ranks and more."""
        for world, layer_case in self.worlds():
            cases = (*CASES, *packs(world))
            ranks = self.pool.run(shared, world, layer_case, cases)
            for case, results in zip(cases, ranks[0], strict=True):
                expected_out, *expected_grads = alone(case)
                out, *grads = results
                says = f"{self.plugin.name} on {world} ranks, {case}:"
                error = worst_error(out, expected_out, floor=1e-30)
                assert error <= RTOL, f"{says} the output is off by {error:.1e} of its largest value."
                for name, grad, expected in zip(NAMES, grads, expected_grads, strict=False):
                    error = worst_error(grad, expected, floor=1e-30)
                    assert error <= RTOL, f"{says} the gradient of {name} is off by {error:.1e} of its largest value."

    def test_keeps_nothing_between_calls(self) -> None:
        """Two calls with unlike masks in flight, whose backwards run in either order, give the bits of each alone."""
        self.must_repeat()
        for world, layer_case in self.worlds():
            for cases in unlike_masks(world):
                for wrong in self.pool.run(interleaved, world, layer_case, cases):
                    says = f"{self.plugin.name} on {world} ranks: with two calls with unlike masks in flight,"
                    assert not wrong, f"{says} {wrong} changes. Keep nothing of a call on the part."

    def test_saves_its_own_positions_alone(self) -> None:
        """The bytes saved for backward fall with the number of ranks: keys of other ranks are exchanged again."""
        for world, layer_case in self.worlds():
            whole, *_ = self.pool.run(saved_alone, 1, ContextCase())
            for saved in self.pool.run(saved_bytes, world, layer_case, ContextCase()):
                share = saved * world / whole
                says = f"{self.plugin.name} on {world} ranks saves {saved:,} bytes"
                assert share <= 1.5, f"{says}; {whole:,} of one rank are {whole // world:,} for each."


def opened(layer_case: LayerCase) -> tuple[ContextAttention, SequenceCut]:
    """Part of this rank, and the cut of sequences."""
    assembly = layer_case.resolve()
    layout = open_layout(assembly, "cpu")
    context = bare_context(assembly, layout, torch.device("cpu"), Shared())
    return assembly.registry.built(assembly.parts.context_parallel, context), SequenceCut(layout)


def misfits_of_opened(layer_case: LayerCase) -> list[str]:
    """Sentences about what is built on this rank."""
    try:
        part, _ = opened(layer_case)
    except PluginError as error:
        return [str(error)]
    return misfits(part, ContextAttention)


def own(cut: SequenceCut, case: ContextCase) -> tuple[list[Tensor], Mask, Tensor]:
    """This rank's positions of all tensors but the sinks, with gradients."""
    tensors, mask, probe = case.drawn()
    mine = [cut.own(tensor, 2, mask.lengths) if tensor.dim() > 1 else tensor for tensor in tensors]
    return [tensor.clone().requires_grad_() for tensor in mine], mask, cut.own(probe, 2, mask.lengths)


def begun(part: ContextAttention, tensors: list[Tensor], mask: Mask, case: ContextCase) -> Tensor:
    """Output of this rank's queries."""
    q, k, v, *sinks = tensors
    return part(q, k, v, mask, attend=attend, sinks_H=sinks[0] if sinks else None, scale=case.scale)


def shared(layer_case: LayerCase, cases: tuple[ContextCase, ...]) -> list[list[Tensor]]:
    """Output and gradients of whole sequences, for each case, computed by all ranks."""
    part, cut = opened(layer_case)
    results = []
    for case in cases:
        tensors, mask, probe = own(cut, case)
        out = begun(part, tensors, mask, case)
        (out * probe).sum().backward()
        own_results = [out.detach(), *(_grad(tensor) for tensor in tensors)]
        # Sinks alone have one dimension. Every rank has all of them, and a share of their gradient.
        results.append([_whole(cut, result, case) if result.dim() > 1 else _sum(cut, result) for result in own_results])
    return results


def alone(case: ContextCase) -> list[Tensor]:
    """Output and gradients in fp64 on one rank."""
    tensors, mask, probe = case.drawn()
    tensors = [tensor.double().requires_grad_() for tensor in tensors]
    q, k, v, *sinks = tensors
    out, _ = attend(q, k, v, mask, sinks_H=sinks[0] if sinks else None, scale=case.scale)
    (out * probe).sum().backward()
    return [out.detach(), *(_grad(tensor) for tensor in tensors)]


def interleaved(layer_case: LayerCase, cases: tuple[ContextCase, ...]) -> str:
    """First tensor that differs between two calls in flight together and each alone; empty if none does."""
    part, cut = opened(layer_case)

    def run(together: bool) -> list[list[Tensor]]:
        inputs = [own(cut, case) for case in cases]
        outs: list[Tensor] = []
        for case, (tensors, mask, probe) in zip(cases, inputs, strict=True):
            outs.append(begun(part, tensors, mask, case))
            if not together:
                (outs[-1] * probe).sum().backward()
        if together:
            for out, (_, _, probe) in zip(outs, inputs, strict=True):
                (out * probe).sum().backward()
        return [[out.detach(), *map(_grad, tensors)] for out, (tensors, _, _) in zip(outs, inputs, strict=True)]

    for alone_results, together_results in zip(run(together=False), run(together=True), strict=True):
        for name, first, second in zip(("the output", *NAMES), alone_results, together_results, strict=False):
            if not same_bits(first, second):
                return name if name == "the output" else f"the gradient of {name}"
    return ""


def saved_bytes(layer_case: LayerCase, case: ContextCase) -> int:
    """Bytes that a call saves for backward."""
    part, cut = opened(layer_case)
    tensors, mask, _ = own(cut, case)
    return _saved(lambda: begun(part, tensors, mask, case))


def saved_alone(case: ContextCase) -> int:
    """Bytes that attention on one rank saves for backward."""
    tensors, mask, _ = case.drawn()
    q, k, v = (tensor.requires_grad_() for tensor in tensors)
    return _saved(lambda: attend(q, k, v, mask)[0])


def _saved(run: Callable[[], Any]) -> int:
    """Bytes of the storages that a function saves for backward."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run()
    total = sum(held.values())
    del out
    return total


def _whole(cut: SequenceCut, own_BHSd: Tensor, case: ContextCase) -> Tensor:
    """Tensor of all positions. The cut gathers ``(B, S, ...)``, in the order of positions. Collective."""
    whole_BSD = cut.gather(own_BHSd.transpose(1, 2).flatten(2), case.lengths)
    return whole_BSD.view(*whole_BSD.shape[:2], own_BHSd.shape[1], -1).transpose(1, 2)


def _sum(cut: SequenceCut, part: Tensor) -> Tensor:
    total = part.clone()
    torch.distributed.all_reduce(total, group=cut.group)
    return total


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()
