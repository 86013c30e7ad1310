"""The contract of attentions: ``class TestMine(AttentionSuite): plugin = Mine``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moefw.core.contracts import CachedAttention
from moefw.core.errors import ContractError, PlanError
from moefw.runtime.naming import canonical_parameters
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.attention_case import (
    AttentionCase,
    Results,
    attended,
    attention_of,
    begun,
    computed,
    extended,
    finished,
    regions_of,
    sequences,
    weights_of,
)
from moefw.testing.suites.gemm_case import differing
from moefw.testing.suites.gemm_passes import PRODUCTS, Noting
from moefw.testing.suites.logits_case import CLIPPED, MeasuredAttention, largest_on_rank, noted_calls
from moefw.testing.suites.merging import adapted_part, adapters_of, give, problem_on_this_rank
from moefw.testing.suites.part import StatelessPartChecks
from moefw.testing.suites.replay import ReplayChecks
from moefw.testing.suites.watch import changed, held, same_bits, worst_error

RTOL = 2e-5
"""Largest error, as a share of a tensor's largest value."""
FLOOR = 1e-2
"""Gradients below this share of the largest one nearly cancel; their errors are relative to this share."""
FACTOR = 0.25
"""Factor by which rows of a head are scaled."""
UNUSED = 37
"""Length of sequences in one check alone. So is the next larger one."""
Reference = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]


class AttentionSuite(ReplayChecks, StatelessPartChecks):
    """Tests an attention against its contract: what it may see, its formula in fp64, heads split over ranks."""

    dim: ClassVar[int] = 16
    """Width of the model."""
    reference: ClassVar[Reference | None] = None
    """Formula for one document, written densely: ``reference(weights, x_SD, positions_S) -> out_SD``, all in fp64.

    ``weights`` are the parameters by canonical name. None: its check is skipped.
    """
    policies: ClassVar[Mapping[str, str]] = {"keep": "keep", "recompute": "recompute", "offload": "offload"}
    """A memory policy to try for each mechanism of a region."""
    context_parallels: ClassVar[Sequence[str]] = ("allgather_kv", "ring_attention", "ulysses")
    """Algorithms to try: of these, those that take the ``core`` of the attention."""

    def on(self, **settings: Any) -> LayerCase:
        """Layer case with the attention."""
        return self.layer_case(**{"dim": self.dim, **settings})

    def attention(self, **parts: Any) -> Any:
        """Attention of one layer on one rank."""
        attention, *_ = attention_of(self.on(parts=parts))
        return attention

    def _smallest_case(self) -> LayerCase:
        return self.on()

    def _user(self) -> Callable[[int], object]:
        attention = self.attention()
        return lambda seed: computed(attention, AttentionCase(seed=seed), self.dim)

    @property
    def _replay_sizes(self) -> Mapping[str, int]:
        """That of the suite."""
        return {"dim": self.dim}

    def test_returns_a_row_for_each_token(self) -> None:
        """Output and gradients are finite, of many tokens, of one and of none. Each parameter has one name."""
        attention = self.attention()
        names = [piece.name for piece in canonical_parameters(attention)]
        twice = sorted({name for name in names if names.count(name) > 1})
        assert not twice, f"{self.plugin.name} names {', '.join(twice)} twice."
        for case in (AttentionCase(), AttentionCase(documents=((1,),)), AttentionCase(documents=())):
            results = computed(attention, case, self.dim)
            for name, tensor in results.items():
                says = f"{self.plugin.name}: of {case.shape[0]} sequences of {case.shape[1]} tokens"
                thing = name if name == "out" else f"the gradient of {name}"
                assert tensor.isfinite().all(), f"{says}, {thing} is not finite."

    def test_a_token_sees_itself_and_earlier_tokens_of_its_document(self) -> None:
        """No gradient reaches a later token, another document or another sequence."""
        attention = self.attention()
        case = AttentionCase(documents=((3, 5), (4, 4)))
        x_BSD, probe_BSD = case.drawn(self.dim, torch.float32)
        documents_BS = case.batch().documents_BS
        assert documents_BS is not None
        for place in (0, 2, 3, 5, 7):
            x, out = begun(attention, case, x_BSD)
            (out[0, place] * probe_BSD[0, place]).sum().backward()
            assert x.grad is not None
            reached_BS = x.grad.abs().sum(-1) > 0
            says = f"{self.plugin.name}: the output at position {place} depends on"
            assert not reached_BS[1].any(), f"{says} another sequence."
            assert not reached_BS[0, place + 1 :].any(), f"{says} later tokens."
            elsewhere_S = documents_BS[0] != documents_BS[0, place]
            assert not reached_BS[0, elsewhere_S].any(), f"{says} another document. Batch.documents_BS numbers them."

    def test_equals_its_formula(self) -> None:
        """``reference`` in fp64: outputs and the gradients of tokens and parameters, document by document."""
        formula = type(self).reference
        if formula is None:
            pytest.skip(f"{self.plugin.name} has no formula to be compared with: the suite's `reference`")
        attention = self.attention()

        def check(case: AttentionCase) -> None:
            expected = _by_formula(formula, attention, case, self.dim)
            self._compare(computed(attention, case, self.dim), expected, f"is not that of its formula for {case}")

        self.for_all(check, sequences())

    def test_a_batch_of_the_shape_of_an_earlier_one_has_its_own_positions(self) -> None:
        """A table or a mask that is kept by the shape of a batch would be that of the earlier one."""
        self._assert_own_tables(self.attention())

    def test_packed_documents_are_as_if_alone(self) -> None:
        """Each with positions from 0 on, as ``Batch.positions_BS`` says."""
        attention = self.attention()
        lengths = (4, 1, 5)
        packed = AttentionCase(documents=(lengths,), seed=3)
        x_BSD, probe_BSD = packed.drawn(self.dim, torch.float32)
        together = finished(attention, *begun(attention, packed, x_BSD), probe_BSD)
        alone: Results = {}
        for x_1sD, probe_1sD in zip(x_BSD.split(lengths, 1), probe_BSD.split(lengths, 1), strict=True):
            case = AttentionCase(documents=((x_1sD.shape[1],),))
            results = finished(attention, *begun(attention, case, x_1sD), probe_1sD)
            for name, value in results.items():
                if name not in alone:
                    alone[name] = value
                elif name in ("out", "x"):
                    alone[name] = torch.cat([alone[name], value], 1)
                else:  # a parameter gets gradients from every document
                    alone[name] = alone[name] + value
        self._compare(together, alone, "changes if documents are packed into one sequence")

    def test_goes_on_behind_earlier_tokens(self) -> None:
        """Read in pieces, tokens come out as read at once. Only of a :class:`moefw.CachedAttention`."""
        attention = self.attention()
        name = self.plugin.name
        case = AttentionCase(documents=((9,), (9,)))
        if not isinstance(attention, CachedAttention):
            pytest.skip(f"{name} is no moefw.CachedAttention: text is generated without a past")
        # Pieces have one shape and other positions: the past is not to blame for a table of the wrong ones.
        self._assert_own_tables(attention)
        # If forward called extend, the comparison below would be one of extend with itself.
        called = AssertionError(f"{name}: forward calls extend. Let both call a third method.")
        with patch.object(attention, "extend", side_effect=called):
            at_once_BSD = computed(attention, case, self.dim)["out"]
        for pieces in ((1,) * 9, (4, 1, 3, 1)):
            with torch.no_grad():
                outs, past_is_unchanged = zip(*extended(attention, case, self.dim, pieces), strict=True)
            assert all(past_is_unchanged), f"{name}: extend writes into the past that it is given."
            says = f"changes if tokens are read in pieces of {pieces}, with the past within reach={attention.reach}"
            self._compare({"out": torch.cat(outs, 1)}, {"out": at_once_BSD}, says)

    def test_keeps_nothing_and_writes_into_nothing(self) -> None:
        """Two batches in flight give the bits of each alone, and what is given stays as it is."""
        self.must_repeat()
        attention = self.attention()
        cases = [AttentionCase(seed=1), AttentionCase(documents=((2, 3), (4, 1)), seed=2)]
        before = held(attention)
        alone = [computed(attention, case, self.dim) for case in cases]
        wrote = ", ".join(changed(before, held(attention)))
        assert not wrote, f"{self.plugin.name} writes {wrote} in forward or backward. It must keep nothing."
        drawn = [case.drawn(self.dim, torch.float32) for case in cases]
        in_flight = [begun(attention, case, x_BSD) for case, (x_BSD, _) in zip(cases, drawn, strict=True)]
        for results, (x_BSD, out_BSD), (drawn_BSD, probe_BSD) in zip(alone, in_flight, drawn, strict=True):
            probe_before_BSD = probe_BSD.clone()
            wrong = differing(results, finished(attention, x_BSD, out_BSD, probe_BSD))
            assert not wrong, f"{self.plugin.name}: with two batches in flight, {wrong} changes."
            is_unchanged = same_bits(x_BSD, drawn_BSD) and same_bits(probe_BSD, probe_before_BSD)
            assert is_unchanged, f"{self.plugin.name} writes into the tokens or the gradient that it is given."

    def test_promised_regions_change_no_bit(self) -> None:
        """A region under a policy that it allows gives the same bits, and runs inside the attention."""
        self.must_repeat()
        case = AttentionCase(documents=((3, 4), (6, 1)))
        plain = computed(self.attention(), case, self.dim)
        for region, mechanism in self.promised("region", dim=self.dim):
            if mechanism not in self.policies:
                continue
            treated = self.attention(memory=[{"use": self.policies[mechanism], "regions": [region]}])
            wrong = differing(plain, computed(treated, case, self.dim))
            assert not wrong, f"{self.plugin.name}: with the region {region} under {mechanism}, {wrong} changes."
        unused = {region for region, _ in self.promised("region", dim=self.dim)} - regions_of(self.on())
        regions = ", ".join(sorted(unused))
        assert not unused, f"{self.plugin.name} offers the regions {regions}. Is context.region(...) used for them?"

    def test_heads_split_over_ranks_give_the_whole(self) -> None:
        """Each rank of tp has its part of the tokens; its gradients of parameters are shares that sum to the whole."""
        refusals = []
        for world in self.profile.worlds:
            refusal = self._refusal(world, "tp")
            if refusal is None:
                self._split(world, "tp", f"with heads split over {world} ranks of tp")
            elif world > 1:
                refusals.append(refusal)
        if refusals and len(refusals) == len([world for world in self.profile.worlds if world > 1]):
            pytest.skip(f"{self.plugin.name} is refused on more than one rank of tp: {refusals[0]}")

    def test_sequences_shared_by_ranks_give_the_whole(self) -> None:
        """Each rank of cp has its positions; its gradients of parameters are shares that sum to the whole.

        The ranks that share a batch are told with it, as where packs are shared by fewer than all ranks of cp.
        """
        cores = self.promised("core", dim=self.dim)
        refusals = {use: self._refusal(2, "cp", context_parallel={"use": use}) for use in self.context_parallels}
        fitting = [use for use, refusal in refusals.items() if refusal is None]
        if not fitting:
            reasons = "; ".join(str(refusal) for refusal in refusals.values())
            pytest.skip(f"no context parallelism fits {self.plugin.name}, which offers core: {cores}: {reasons}")
        for use in fitting:
            if self._calls_attend(use):
                hint = "Is context.core(...) called, with true positions"
            else:
                hint = (
                    f"{use} computes with PyTorch's kernels and does not call what context.core(...) gets: "
                    'for scores of your own, offer core=("own",). Else, are positions true'
                )
            self._split(
                2, "cp", f"with sequences shared by 2 ranks of cp ({use}). {hint}", context_parallel={"use": use}
            )

    def _calls_attend(self, use: str) -> bool:
        """Whether a context parallelism calls the attention's own function, as one does that takes the core ``own``."""
        assembly = self._on_ranks(2, "cp", context_parallel={"use": use}).resolve()
        needs = assembly.parts.context_parallel.needs(assembly.site.at(0))
        return all("own" in need.value for need in needs if need.fact == "core")

    def _assert_own_tables(self, attention: Any) -> None:
        """Assert that tokens have the same output behind a batch of their shape with other positions, and without.

        Without: at the front of a longer batch, of a shape that no other check uses.
        """
        earlier = AttentionCase(documents=((UNUSED,),))
        case = AttentionCase(documents=((15, UNUSED - 15),), stride=3)
        longer = AttentionCase(documents=((15, UNUSED - 15, 1),), stride=3)
        x_BSD, _ = longer.drawn(self.dim, torch.float32)
        x_BsD = x_BSD[:, :UNUSED]
        with torch.no_grad():
            _, front_BSD = begun(attention, longer, x_BSD)
            begun(attention, earlier, x_BsD)
            _, out_BsD = begun(attention, case, x_BsD)
        error = worst_error(out_BsD, front_BSD[:, :UNUSED])
        says = (
            f"{self.plugin.name}: with the positions and documents of a batch, the output is off by {error:.1e} of its "
            "largest value behind another batch of the same shape"
        )
        assert error <= RTOL, f"{says}. Is a table or a mask kept by the shape? Make it of each batch, in tables()."

    def _on_ranks(self, world: int, axis: str, **parts: Any) -> LayerCase:
        """Layer case with the attention on ``world`` ranks along ``axis``."""
        packs = {"tokens_per_step": 16, "micro_batch": 1, "seq_len": 16, "packing": "dynamic"}
        return self.on(tokens=(1,) * world, parts={"parallel": {"dense": {axis: world}}, "train": packs, **parts})

    def _refusal(self, world: int, axis: str, **parts: Any) -> PlanError | None:
        """Error that refuses the attention on ``world`` ranks along ``axis``; None if it is accepted."""
        try:
            self._on_ranks(world, axis, **parts).resolve()
        except PlanError as error:
            return error
        return None

    def _split(self, world: int, axis: str, says: str, **parts: Any) -> None:
        """Compare the attention on ``world`` ranks along ``axis`` with that on one."""
        layer_case = self._on_ranks(world, axis, **parts)
        attention = self.attention()
        for case in (AttentionCase(documents=((8,), (8,))), AttentionCase(documents=((3, 5), (7, 1)), seed=1)):
            try:
                ranks = self.pool.run(attended, world, layer_case, case)
            except ContractError as error:
                raise AssertionError(f"{self.plugin.name} fails {says}.\n{error}") from error
            expected = computed(attention, case, self.dim)
            joined = {key: ranks[0][key] for key in ("out", "x")}
            joined |= {key: torch.stack([rank[key] for rank in ranks]).sum(0) for key in expected.keys() - joined}
            same_names = joined.keys() == expected.keys()
            assert same_names, f"{self.plugin.name} names other parameters on {world} ranks of {axis}."
            self._compare(joined, expected, f"changes {says}")

    def test_products_with_adapters_are_those_of_merged_weights(self) -> None:
        """An attention that offers adapters asks for them and multiplies with them, also with heads split over ranks.

        Output, and gradients of tokens and of all parameters.
        """
        offered = self.promised("adapter", dim=self.dim)
        adapter = adapters_of(offered)
        name = self.plugin.name
        part = adapted_part(self.on(parts={"adapter": adapter}), "attention")
        problem = part.problem(offered)
        assert not problem, f"{name} {problem}"
        case = AttentionCase(documents=((3, 5), (7, 1)), seed=1)
        results = computed(part.module, case, self.dim)
        merged = part.merged()
        plain = self.attention()
        give(plain, merged.weights)
        of_merged = computed(plain, case, self.dim)
        inputs = {key: of_merged[key] for key in ("out", "x")}
        self._compare(results, inputs | merged.gradients(of_merged), "is not that of weights merged with adapters")
        if self._refusal(2, "tp", adapter=adapter) is None:
            layer_case = self._on_ranks(2, "tp", adapter=adapter)
            for problem in self.pool.run(problem_on_this_rank, 2, layer_case, "attention", offered):
                assert not problem, f"{name}, on two ranks of tp, {problem}"
            ranks = self.pool.run(attended, 2, layer_case, case)
            joined = {key: ranks[0][key] for key in ("out", "x")}
            joined |= {key: torch.stack([rank[key] for rank in ranks]).sum(0) for key in results.keys() - joined}
            self._compare(joined, results, "with adapters changes with heads split over two ranks of tp")

    def test_logits_that_are_told_are_those_of_the_core(self) -> None:
        """Where ``logits`` offers ``weights``: scores are q k times the scale, with heads split over ranks, too."""
        name = self.plugin.name
        case = AttentionCase(documents=((3, 5), (7, 1)))
        with noted_calls() as calls:
            measured = self._measured()
        largest_H = measured.largest(case)
        off = max((call.error for call in calls), default=inf)
        says = f"{name} offers logits that follow weights, but the log-sum-exp of its core is off by {off:.1e} from"
        assert off <= RTOL, f"{says} that of q k times the scale: its scores are others."
        if self._refusal(2, "tp") is None:
            split = self._on_ranks(2, "tp", train=CLIPPED | {"tokens_per_step": 32})
            for rank_H in self.pool.run(largest_on_rank, 2, split, case):
                off = worst_error(rank_H, largest_H)
                says = f"{name}: with heads split over two ranks of tp, largest logits are off by {off:.1e}"
                assert off <= RTOL, f"{says}. Has each rank an equal share of neighbouring heads, in order?"

    def test_logits_shrink_with_the_rows_that_are_named(self) -> None:
        """Where ``logits`` offers ``weights``: a head's are in proportion to its rows, and no other head's are."""
        case = AttentionCase(documents=((3, 5), (7, 1)))
        measured = self._measured()
        largest_H = measured.largest(case)
        weights = {name: value.clone() for name, value in measured.attention.state_dict().items()}
        for group in range(measured.groups):
            measured.clip(group, FACTOR)
            expected_H = largest_H.clone()
            expected_H.view(measured.groups, -1)[group] *= FACTOR
            off = worst_error(measured.largest(case), expected_H)
            says = f"{self.plugin.name}: with the rows of head {group} of keys scaled, logits are off by {off:.1e}"
            assert off <= RTOL, f"{says}. Does logit_rows() name all rows of queries and keys, and their biases?"
            measured.attention.load_state_dict(weights)

    def _measured(self) -> MeasuredAttention:
        """Attention whose logits are measured; skip the check if they do not follow weights."""
        name = self.plugin.name
        if "weights" not in self.promised("logits", dim=self.dim):
            pytest.skip(f"{name} does not offer logits that follow weights")
        try:
            return MeasuredAttention(self.on(parts={"train": CLIPPED}))
        except ContractError as error:
            raise AssertionError(f"{name} offers logits that follow weights.\n{error}") from error

    def test_products_keep_their_promises(self) -> None:
        """Products go through ``moefw.linear`` with recipes of their own and the keys of their rows, where offered."""
        name = self.plugin.name
        offered = self.offers(dim=self.dim)
        promises = [fact for fact in ("by_pass", "named_products", "row_keys") if offered.get(fact)]
        if not promises:
            pytest.skip(f"{name} offers none of by_pass, named_products and row_keys")
        layer_case = self.on()
        attention, *_ = attention_of(
            replace(
                layer_case,
                parts={**layer_case.parts, "precision": {"use": Noting.name}},
                plugins=(*layer_case.plugins, Noting),
            )
        )
        case = AttentionCase(documents=((3, 4), (6, 1)))
        x_BSD, probe_BSD = case.drawn(self.dim, torch.float32)
        x_TD = x_BSD.flatten(0, 1).requires_grad_()
        batch = case.batch(keys_T=torch.arange(1, 15))
        out_TD = attention(x_TD, attention.tables(batch), batch)
        (out_TD * probe_BSD.flatten(0, 1)).sum().backward()
        asked = Noting.recipe.asked
        keyed = Noting.recipe.keyed
        if "by_pass" in promises:
            for during, roles in PRODUCTS.items():
                counts = [asked[role, during] for role in roles]
                assert min(counts) > 0, f"{name} offers by_pass, but quantizes nothing during {during}."
            same_weights = asked["weight", "fprop"] == asked["weight", "dgrad"]
            assert same_weights, f"{name} offers by_pass, but quantizes other weights in dgrad than in fprop."
        if "named_products" in promises:
            several = Noting.recipe.shared(experts=1)
            shared = ", ".join(repr(gemm) if gemm else "the module's recipe" for gemm in several)
            says = f"{name} offers named_products, but {shared} serves several GEMMs."
            assert not several, f"{says} Give each its own recipe, Precision.at(name, groups=1)."
        if "row_keys" in promises:
            for during in ("dgrad", "wgrad"):
                values = asked["grad", during]
                says = f"{name} offers row_keys, but has {keyed['grad', during]} of {values} values of gradients keyed"
                assert keyed["grad", during] == values, f"{says} during {during}. Call moefw.linear(..., rows)."

    def _compare(self, got: Results, expected: Results, says: str) -> None:
        """Assert that output and gradients are close; ``says``: what is wrong with them otherwise."""
        grads = [value.abs().max().item() for key, value in expected.items() if key != "out" and value.numel()]
        floor = FLOOR * max([1e-3, *grads])
        for key, value in expected.items():
            error = worst_error(got[key], value, floor=1e-30 if key == "out" else floor)
            thing = "the output" if key == "out" else f"the gradient of {key}"
            assert error <= RTOL, f"{self.plugin.name}: {thing} {says} (off by {error:.1e} of its largest value)."


def _by_formula(formula: Reference, attention: nn.Module, case: AttentionCase, dim: int) -> Results:
    """Outputs and gradients of the formula in fp64, applied to each document on its own."""
    weights = weights_of(attention)
    x_BSD, probe_BSD = (tensor.double() for tensor in case.drawn(dim, torch.float32))
    x_BSD.requires_grad_()
    rows = []
    for x_SD, lengths in zip(x_BSD, case.documents, strict=True):
        alone = [formula(weights, x_sD, torch.arange(len(x_sD)) * case.stride) for x_sD in x_SD.split(lengths)]
        rows.append(torch.cat(alone))
    out_BSD = torch.stack(rows)
    (out_BSD * probe_BSD).sum().backward()
    grads = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in weights.items()}
    assert x_BSD.grad is not None
    return {"out": out_BSD.detach(), "x": x_BSD.grad, **grads}
