"""The contract of routers: ``class TestMine(RouterSuite): plugin = Mine``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st
from torch import Tensor, nn

from moefw.core.errors import PlanError
from moefw.core.stages import Batch, Routing
from moefw.runtime.naming import initialise
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.part import StatelessPartChecks
from moefw.testing.suites.replay import ReplayChecks
from moefw.testing.suites.routing_case import (
    SEQUENCES,
    TOKENS,
    Pack,
    Tokens,
    compared,
    miscounted,
    misshapen,
    of_sequences,
    shared_out,
    summed,
    ungrouped,
)
from moefw.testing.suites.runs import Trained, open_context, train, whole_model
from moefw.testing.suites.slopes import slopes
from moefw.testing.suites.watch import changed, held, same_bits

UPDATES = 300
"""Number of updates of a router's state on the same tokens."""
_CHOICES = ("expert_ids_TK", "weights_TK")
"""The tensors of a routing that say where tokens go."""
NEAR_TIES = 0.05
"""Largest difference of an expert's load, 1 = fair share: a few choices between nearly equal scores."""


class RouterSuite(ReplayChecks, StatelessPartChecks):
    """Tests a router against its contract."""

    dims: ClassVar[Mapping[str, int]] = {"num_experts": 8, "top_k": 2, "dim": 16, "expert_dim": 16}
    """Sizes of its layer, which the router must accept."""
    choices: ClassVar[Sequence[tuple[int, int]]] = ((8, 1), (8, 2), (16, 4), (60, 6), (64, 8))
    """Pairs of a number of experts and of choices of a token: those that the router accepts are tried."""

    groups: ClassVar[tuple[int, int] | None] = None
    """Numbers of equal groups of experts, and of those that a token may use, if ``options`` limit it."""

    def router(self, *, seed: int = 0, layer: int = 0, dims: Mapping[str, int] | None = None) -> Any:
        """Router of a layer with random parameters, in training mode; ``dims`` in place of those of the suite."""
        context, assembly = open_context(self.layer_case(**dims) if dims else self._sized())
        with torch.random.fork_rng():
            router: Any = assembly.parts.routing.build(evolve(context, site=evolve(context.site, layer=layer)))
        initialise(router, seed=seed, std=lambda _: 0.3)
        return router

    @property
    def _replay_sizes(self) -> Mapping[str, int]:
        """Those of the suite."""
        return self.dims

    def _smallest_case(self) -> LayerCase:
        return self._sized()

    def _user(self) -> Callable[[int], object]:
        router = self.router()

        def use(seed: int) -> None:
            tokens = Tokens(sequences=2, positions=5, seed=seed)
            weights_TK = router(tokens.x(self.dims["dim"]), tokens.batch(loss_scale=torch.tensor(1.0))).weights_TK
            if weights_TK.requires_grad:
                torch.autograd.grad(weights_TK.sum(), [*router.parameters()], allow_unused=True)

        return use

    def _sized(self) -> LayerCase:
        """Layer case of the sizes of the suite, which the plugin must accept."""
        layer_case = self.layer_case(**self.dims)
        try:
            layer_case.assemble()
        except PlanError as error:
            what = f"{self.plugin.name} is refused with the sizes of the suite, {dict(self.dims)}: {error}"
            raise AssertionError(f"{what} Set `dims` of the suite to sizes that fit.") from error
        return layer_case

    def learned_router(self) -> Any:
        """Router with state that was updated once."""
        router = self.router()
        tokens = Tokens(sequences=4, positions=8, seed=7)
        router.update(summed([router(tokens.x(self.dims["dim"]), tokens.batch())]))
        return router

    def test_routings_have_the_shapes_and_types_of_the_contract(self) -> None:
        """Ids, weights and statistics are valid for dispatchers and the engine; T may be 0."""
        router = self.router()

        def check(tokens: Tokens) -> None:
            routing = router(tokens.x(self.dims["dim"]), tokens.batch(loss_scale=torch.tensor(0.1)))
            self._complain(misshapen(routing, tokens, self.dims))

        self.for_all(check, TOKENS)

    def test_routings_of_many_choices_are_right_too(self) -> None:
        """With each of ``choices``: valid routings, counts, replays, and gradients that are slopes."""
        for dims in self._dims_of_choices():
            router = self.router(dims=dims)
            for tokens in (Tokens(sequences=4, positions=75, masked=1, seed=1), Tokens(sequences=2, positions=3)):
                routing = router(tokens.x(dims["dim"]), tokens.batch(loss_scale=torch.tensor(0.1)))
                self._complain(misshapen(routing, tokens, dims))
                self._complain(miscounted(routing, tokens, dims))
                self._check_replay(router, self.router(seed=1, dims=dims), 0, tokens, dims)
            # Replayed: of many experts, some nearly tie, and where choices change there is no slope.
            few = Tokens(sequences=1, positions=5, seed=3)
            x_TD = few.x(dims["dim"])
            self._slopes_of_weights(router, x_TD, few.batch(routes={0: router(x_TD, few.batch()).expert_ids_TK}))

    def test_a_token_uses_as_many_groups_of_experts_as_it_may(self) -> None:
        """No more than ``groups`` says, also after an update; so many for some tokens, and each group for some."""
        if self.groups is None:
            pytest.skip(f"{self.plugin.name} is not said to limit tokens to groups of experts; set groups")
        for router in (self.router(), self.learned_router()):
            tokens = Tokens(sequences=4, positions=75, seed=1)
            ids_TK = router(tokens.x(self.dims["dim"]), tokens.batch()).expert_ids_TK
            self._complain(ungrouped(ids_TK, self.dims["num_experts"], *self.groups))

    def _dims_of_choices(self) -> Sequence[Mapping[str, int]]:
        """Sizes for each of ``choices`` that the router accepts; skip the check if there are none."""
        accepted: list[Mapping[str, int]] = []
        for num_experts, top_k in self.choices:
            dims = {**self.dims, "num_experts": num_experts, "top_k": top_k}
            try:
                self.layer_case(**dims).assemble()
            except PlanError:
                continue
            accepted.append(dims)
        if not accepted:
            tried = ", ".join(f"{top_k} of {num_experts}" for num_experts, top_k in self.choices)
            pytest.skip(f"{self.plugin.name} takes none of these choices of experts: {tried}; set choices")
        return accepted

    def test_statistics_count_every_choice_once_before_any_is_dropped(self) -> None:
        """Balancing uses ``tokens_per_expert``, so it also counts choices that a capacity drops."""
        router = self.router()

        def check(tokens: Tokens) -> None:
            routing = router(tokens.x(self.dims["dim"]), tokens.batch())
            self._complain(miscounted(routing, tokens, self.dims))

        self.for_all(check, TOKENS)

    def test_masked_tokens_go_nowhere_and_count_nowhere(self) -> None:
        """The values of padding change no choice, weight, statistic or loss, and get no gradient."""
        router = self.router()

        def check(tokens: Tokens) -> None:
            mask_T = tokens.batch().mask_T
            assert mask_T is not None
            x_TD = tokens.x(self.dims["dim"])
            other_TD = torch.where(mask_T.unsqueeze(1), x_TD, 3.0 - x_TD).detach()
            batch = tokens.batch(loss_scale=torch.tensor(0.1))
            routing = router(x_TD, batch)
            other = router(other_TD, batch)
            name = self.plugin.name
            assert (routing.expert_ids_TK[~mask_T] == -1).all(), f"{name} sends masked tokens to experts."
            assert not routing.weights_TK[~mask_T].any(), f"{name} gives weights to masked tokens."
            for what, value, other_value in compared(routing, other):
                are_close = torch.allclose(value.double(), other_value.double(), rtol=1e-5, atol=1e-6)
                assert are_close, f"{name}: {what} changes with what masked tokens hold. They are padding."
            (grad_TD,) = torch.autograd.grad(routing.weights_TK.sum() * 1.7, x_TD, allow_unused=True)
            if grad_TD is not None:
                assert not grad_TD[~mask_T].any(), f"{name} gives gradients to masked tokens."

        masked = st.builds(evolve, TOKENS, masked=st.integers(1, 3), dtype=st.just("float32"))
        self.for_all(check, masked)

    def test_no_tokens_and_one_token_train(self) -> None:
        """Ranks may have no tokens; backward still works there, and all gradients are finite."""
        router = self.router()
        for positions in (0, 1):
            tokens = Tokens(sequences=1, positions=positions)
            routing = router(tokens.x(self.dims["dim"]), tokens.batch(loss_scale=torch.tensor(1.0)))
            self._complain(misshapen(routing, tokens, self.dims))
            self._complain(miscounted(routing, tokens, self.dims))
            if routing.weights_TK.requires_grad:
                grads = torch.autograd.grad(routing.weights_TK.sum(), list(router.parameters()), allow_unused=True)
                finite = all(grad.isfinite().all() for grad in grads if grad is not None)
                assert finite, f"{self.plugin.name} has gradients that are not finite with {positions} tokens."

    def test_gradients_are_the_slopes_of_the_weights(self) -> None:
        """Gradients of the tokens and of the router's parameters are compared with finite differences."""
        router = self.learned_router()
        tokens = Tokens(sequences=2, positions=5, seed=3)
        steepest = self._slopes_of_weights(router, tokens.x(self.dims["dim"]), tokens.batch())
        name = self.plugin.name
        assert steepest.pop("the tokens") > 1e-6, f"{name}: no gradient reaches the tokens."
        assert max(steepest.values(), default=0.0) > 1e-6, f"{name}: no gradient reaches its parameters."

    def _slopes_of_weights(self, router: nn.Module, x_TD: Tensor, batch: Batch) -> dict[str, float]:
        """Largest slope of the weights by what they depend on. Asserts that gradients are slopes."""
        name = self.plugin.name
        probe_TK = torch.randn(router(x_TD, batch).weights_TK.shape, generator=torch.Generator().manual_seed(1))

        def value() -> tuple[Tensor, Tensor]:
            routing = router(x_TD, batch)
            return (routing.weights_TK * probe_TK).sum(dtype=torch.float64), routing.expert_ids_TK

        assert value()[0].requires_grad, f"{name}: weights_TK carry no gradient, so the router cannot learn."
        steepest = {}
        for what, variable in {"the tokens": x_TD, **dict(router.named_parameters())}.items():
            (grad,) = torch.autograd.grad(value()[0], variable, allow_unused=True)
            measured = slopes(value, variable, torch.zeros_like(variable) if grad is None else grad)
            steepest[what] = measured.steepest
            says = f"{name}: the gradient of {what} is not the slope of the weights ({measured})."
            assert measured.agree(3e-2), says
        return steepest

    def test_auxiliary_losses_are_attached_once_and_scaled(self) -> None:
        """The backward of the weights adds ``aux_scale`` times the gradient of each auxiliary loss.

        Here a quarter of the tokens has a loss: ``loss_scale`` is another one.
        """
        router = self.learned_router()
        tokens = Tokens(sequences=2, positions=8, seed=5)
        x_TD = tokens.x(self.dims["dim"])

        def value() -> tuple[Tensor, Tensor]:
            routing = router(x_TD, tokens.batch())
            losses = [loss.double() for loss in routing.aux_losses.values()]
            return sum(losses, torch.zeros((), dtype=torch.float64)), routing.expert_ids_TK

        for what, variable in {"the tokens": x_TD, **dict(router.named_parameters())}.items():
            for scale in (0.5, 2.0):
                batch = tokens.batch(loss_scale=torch.tensor(4 * scale), trained_share=torch.tensor(0.25))
                grad = self._attached(router, x_TD, batch, variable)
                measured = slopes(value, variable, grad / scale)
                says = (
                    f"{self.plugin.name}: with aux_scale {scale}, the gradient that auxiliary losses give to {what} "
                    f"is {measured.ratio:.3g} times aux_scale times their slope; once is right."
                )
                assert measured.agree(3e-2, noise=2e-4 * abs(value()[0].item())), says

    def test_auxiliary_losses_are_attached_in_training_only(self) -> None:
        """They change no gradient in evaluation or without a scale."""
        router = self.learned_router()
        tokens = Tokens(sequences=2, positions=8, seed=5)
        x_TD = tokens.x(self.dims["dim"])
        for training, scale in ((False, torch.tensor(1.0)), (True, None)):
            router.train(training)
            for variable in (x_TD, *router.parameters()):
                grad = self._attached(router, x_TD, tokens.batch(loss_scale=scale), variable)
                when = "without aux_scale" if training else "in evaluation"
                assert not grad.any(), f"{self.plugin.name} attaches auxiliary losses {when}."

    def test_forward_and_backward_write_nothing(self) -> None:
        """A router is constant between updates: micro-batches may be in flight, and forwards may be repeated."""
        router = self.learned_router()
        tokens = Tokens(sequences=2, positions=5, seed=1)
        for training in (True, False):
            router.train(training)
            before = held(router)
            routing = router(tokens.x(self.dims["dim"]), tokens.batch(loss_scale=torch.tensor(1.0)))
            if routing.weights_TK.requires_grad:
                routing.weights_TK.sum().backward()
            router.zero_grad(set_to_none=True)
            wrote = ", ".join(changed(before, held(router)))
            says = f"{self.plugin.name} writes {wrote} in forward. Return it in stats, and write state in update()."
            assert not wrote, says

    def test_declared_state_is_fp32_buffers(self) -> None:
        """``state_spec`` names existing buffers, in fp32 and of the declared shape."""
        router = self.router()
        name = self.plugin.name
        buffers = dict(router.named_buffers())
        for state in router.state_spec():
            assert state.name in buffers, f"{name} declares the state {state.name!r} and has no buffer of that name."
            buffer = buffers[state.name]
            form = f"{tuple(buffer.shape)} {buffer.dtype}"
            declared = f"{state.shape} torch.float32"
            fits = tuple(buffer.shape) == state.shape and buffer.dtype == torch.float32
            assert fits, f"{name}: the buffer {state.name!r} is {form}; state_spec says {declared}."

    def test_update_depends_on_the_reduced_statistics_alone(self) -> None:
        """Equal sums lead to equal state, for any earlier forwards and any order of micro-batches."""
        name = self.plugin.name
        fresh = self.router()
        used = self.router()
        reordered = self.router()
        batches = [Tokens(sequences=2, positions=5, seed=seed) for seed in range(3)]
        routings = [fresh(tokens.x(self.dims["dim"]), tokens.batch()) for tokens in batches]
        other = Tokens(sequences=3, positions=7, seed=9)
        used(other.x(self.dims["dim"]), other.batch())
        reduced = summed(routings)
        copies = {key: value.clone() for key, value in reduced.items()}
        before = held(fresh)
        fresh.update(reduced)
        is_unchanged = all(same_bits(reduced[key], copy) for key, copy in copies.items())
        assert is_unchanged, f"{name}: update() changes what it is given."
        states = [state.name for state in fresh.state_spec()]
        wrote = [path for path in changed(before, held(fresh)) if path not in states]
        assert not wrote, f"{name}: update() writes {', '.join(wrote)}, which state_spec() does not declare."
        used.update(copies)
        reordered.update(summed(routings[::-1]))
        for state in states:
            tensor = getattr(fresh, state)
            assert tensor.dtype == torch.float32, f"{name}: update() turns {state!r} into {tensor.dtype}."
            says = f"{name}: update() of {state!r} depends on more than the reduced statistics."
            assert same_bits(tensor, getattr(used, state)), says
            says = f"{name}: {state!r} depends on the order of micro-batches."
            assert torch.allclose(tensor, getattr(reordered, state), rtol=1e-5), says
        fresh.update({key: torch.zeros_like(value) for key, value in copies.items()})
        finite = all(getattr(fresh, state).isfinite().all() for state in states)
        assert finite, f"{name}: update() after a step without tokens leaves state that is not finite."

    def test_updates_do_not_make_the_load_less_even(self) -> None:
        """Tokens that prefer the same experts are routed again and again: the largest load does not grow."""
        router = self._with_state()
        tokens = Tokens(sequences=4, positions=16, seed=11)
        x_TD = tokens.x(self.dims["dim"]).detach() + 1.0  # what tokens share makes them prefer the same experts
        largest_loads = []
        for _ in range(UPDATES):
            routing = router(x_TD, tokens.batch())
            largest_loads.append(int(routing.expert_ids_TK.flatten().add(1).bincount()[1:].max()))
            router.update(summed([routing]))
        first = largest_loads[0]
        last = sum(largest_loads[-10:]) / 10
        says = f"{self.plugin.name}: after {UPDATES} updates on the same tokens, an expert has up to {last:g} choices"
        assert last <= first, f"{says} instead of {first}. Is the sign of the update right?"

    def test_state_changes_no_weight_of_the_same_choices(self) -> None:
        """State decides which experts are chosen. With recorded routes it has no effect."""
        fresh = self._with_state()
        learned = self.learned_router()
        tokens = Tokens(sequences=4, positions=8, seed=7)
        x_TD = tokens.x(self.dims["dim"])
        batch = tokens.batch(routes={0: fresh(x_TD, tokens.batch()).expert_ids_TK})
        same = same_bits(fresh(x_TD, batch).weights_TK, learned(x_TD, batch).weights_TK)
        names = ", ".join(state.name for state in fresh.state_spec())
        assert same, f"{self.plugin.name}: the weights of the same choices depend on {names}."

    def _with_state(self) -> Any:
        """Router; skip the check if it has no state."""
        router = self.router()
        if not router.state_spec():
            pytest.skip(f"{self.plugin.name} has no state")
        return router

    def test_routing_looks_at_no_more_than_the_partition_says(self) -> None:
        """token: each token is routed independently; sequence: each sequence is, losses included."""
        partition = self._partition()
        router = self.learned_router()
        self.for_all(lambda tokens: self._check_sequences(router, tokens, partition), SEQUENCES)
        if partition == "token":
            self.for_all(lambda tokens: self._check_tokens(router, tokens), SEQUENCES)

    def test_a_pack_is_routed_as_its_sequences(self) -> None:
        """Sequences one behind another in one row (``Batch.lengths``) get what each gets alone, losses included."""
        partition = self._partition()
        router = self.learned_router()
        for lengths in ((4, 4), (5, 1, 9)):
            pack = Pack(lengths=lengths, seed=len(lengths))
            x_TD = pack.x(self.dims["dim"])
            whole = router(x_TD, pack.batch())
            routings = [router(*alone) for alone in pack.alone(x_TD)]
            says = f"{self.plugin.name} offers to look at one {partition} at a time, but in a pack"
            fix = "Tell sequences apart by Batch.sequence_T, and places in them by Batch.places."
            self._same_as_apart(whole, routings, f"{says} of sequences of {lengths} tokens", fix)

    def _same_as_apart(self, whole: Routing, routings: Sequence[Routing], says: str, fix: str = "") -> None:
        """Assert that the routing of sequences together is that of each by itself."""
        joined = {key: torch.cat([getattr(routing, key) for routing in routings]) for key in _CHOICES}
        self._same_choices(whole, joined, f"{says} the routing of a sequence depends on the other sequences. {fix}")
        for kind in ("stats", "aux_losses"):
            total = summed(routings, kind)
            for key, value in getattr(whole, kind).items():
                same = torch.allclose(value.double(), total[key], rtol=1e-4, atol=1e-5)
                assert same, f"{says} {kind}[{key!r}] depends on how sequences are split over micro-batches. {fix}"

    def test_ranks_that_share_a_micro_batch_route_it_as_one_rank_does(self) -> None:
        """Ranks of cp or tp each have a part of its tokens; no choice, weight, statistic, loss or gradient changes."""
        partition = self._partition(required=False)
        if partition in (None, "rank"):
            pytest.skip(f"{self.plugin.name} promises nothing of ranks that share a micro-batch")
        for masked in (0, 1):
            tokens = Tokens(sequences=2, positions=20, masked=masked, seed=3)
            ((of_one_rank, whole),) = self.pool.run(shared_out, 1, self.layer_case(**self.dims), tokens)
            for axis in ("cp", "tp"):
                parts = {"parallel": {"dense": {axis: 2}}}
                ranks = self.pool.run(shared_out, 2, self.layer_case(tokens=(1, 1), **self.dims, parts=parts), tokens)
                pairs = [(name, value, ranks[0][0][name]) for name, value in of_one_rank.items()]
                for kind in ("stats", "aux_losses"):
                    total = summed([routing for _, routing in ranks], kind)
                    pairs += [(f"{kind}[{name!r}]", value, total[name]) for name, value in getattr(whole, kind).items()]
                differ = [
                    name
                    for name, expected, actual in pairs
                    if not torch.allclose(expected.double(), actual.double(), rtol=1e-4, atol=1e-5)
                ]
                assert not differ, (
                    f"{self.plugin.name} offers to look at one {partition}, but ranks of {axis} that share a "
                    f"micro-batch change {', '.join(differ)}. Gather what it looks at over them: "
                    "moefw/runtime/parallel/shared_tokens.py."
                )

    def test_the_same_call_again_gives_the_same_bits(self) -> None:
        """Recompute runs a router twice: random draws depend on the batch's seeds, never on the order of calls."""
        router = self.learned_router()

        def check(tokens: Tokens) -> None:
            x_TD = tokens.x(self.dims["dim"])
            batch = tokens.batch(loss_scale=torch.tensor(0.3))
            first = router(x_TD, batch)
            for what, value, value_again in compared(first, router(x_TD, batch)):
                says = f"{self.plugin.name}: {what} differs when the same micro-batch is routed again."
                assert same_bits(value, value_again), f"{says} Draw by Batch.seeds_B and position, not by call."

        self.for_all(check, TOKENS)

    def test_two_routers_compute_the_same_bits(self) -> None:
        """Routers that are built under different random states, as in different processes, are the same."""
        self.must_repeat()
        name = self.plugin.name
        tokens = Tokens(sequences=3, positions=5, seed=4)
        routings: list[Routing] = []
        grads_of_runs: list[list[Tensor]] = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            router = self.router()
            x_TD = tokens.x(self.dims["dim"])
            routing = router(x_TD, tokens.batch(loss_scale=torch.tensor(0.3)))
            grads: Sequence[Tensor | None] = ()
            if routing.weights_TK.requires_grad:
                probe = torch.linspace(-1, 1, routing.weights_TK.numel()).view_as(routing.weights_TK)
                variables = [x_TD, *router.parameters()]
                grads = torch.autograd.grad((routing.weights_TK * probe).sum(), variables, allow_unused=True)
            routings.append(routing)
            grads_of_runs.append([grad for grad in grads if grad is not None])
        for what, first, second in compared(*routings):
            assert same_bits(first, second), f"{name}: {what} differs between two equal routers."
        for first, second in zip(*grads_of_runs, strict=True):
            assert same_bits(first, second), f"{name}: gradients differ between two equal routers."

    def test_recorded_routes_are_replayed(self) -> None:
        """``Batch.routes`` from an earlier forward decides, for any current parameters, each layer by its own."""
        for layer in (0, 3):
            router = self.router(seed=0, layer=layer)
            earlier = self.router(seed=1, layer=layer)
            self.for_all(partial(self._check_replay, router, earlier, layer, dims=self.dims), TOKENS)

    def _check_replay(
        self, router: nn.Module, earlier: nn.Module, layer: int, tokens: Tokens, dims: Mapping[str, int]
    ) -> None:
        """Assert that a router of a layer replays the routes of that layer."""
        x_TD = tokens.x(dims["dim"])
        recorded_TK = earlier(x_TD, tokens.batch()).expert_ids_TK
        of_others = {other: recorded_TK.roll(1, 0) for other in (0, 2, 4)}
        routing = router(x_TD, tokens.batch(routes={**of_others, layer: recorded_TK}))
        says = f"{self.plugin.name} does not replay Batch.routes in layer {layer}."
        fix = "Take the ids that Batch.route() returns for site.layer."
        assert torch.equal(routing.expert_ids_TK, recorded_TK), f"{says} {fix}"
        self._complain(misshapen(routing, tokens, dims))

    def test_equal_scores_are_told_apart_without_chance(self) -> None:
        """Tokens and experts that are alike get the same choices whatever PyTorch's generator says."""
        router = self.learned_router()
        tokens = Tokens(sequences=2, positions=8, seed=2)
        x_TD = torch.zeros_like(tokens.x(self.dims["dim"]))  # every expert has the same score, but for a bias
        routings = []
        for seed in (1, 2):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                routings.append(router(x_TD, tokens.batch()))
                drawn = not same_bits(torch.get_rng_state(), _state_after(seed))
            what = f"{self.plugin.name} draws from PyTorch's generator, so a run that resumes is another one."
            assert not drawn, f"{what} Draw by Batch.seeds_B and position."
        for what, first, second in compared(*routings):
            says = f"{self.plugin.name}: {what} of tokens with equal scores differs from run to run."
            assert same_bits(first, second), f"{says} Break ties by the number of the expert."

    def test_metrics_do_not_depend_on_the_loss_scale(self) -> None:
        """``stats`` and ``aux_losses`` are sums over tokens; only what is attached to the weights is scaled."""
        router = self.learned_router()
        tokens = Tokens(sequences=2, positions=8, seed=5)
        x_TD = tokens.x(self.dims["dim"])
        first, second = (router(x_TD, tokens.batch(loss_scale=torch.tensor(scale))) for scale in (0.5, 2.0))
        for what, value, other in compared(first, second):
            says = f"{self.plugin.name}: {what} changes with Batch.loss_scale."
            assert same_bits(value, other), f"{says} It scales the gradients of auxiliary losses, and nothing else."

    def test_a_model_trains_on_two_ranks_like_on_one(self) -> None:
        """With a partition of tokens or sequences, the layout changes nothing; otherwise, ranks agree."""
        name = self.plugin.name
        (alone,) = self._train(world=1, micro_batch=8)
        first, second = self._train(world=2, micro_batch=2)
        finite = all(torch.tensor(result.loss).isfinite() for result in first.results)
        assert finite, f"{name}: the loss of a model on two ranks is not finite."
        assert first.results == second.results, f"{name}: two ranks disagree on the results of a step."
        for state, tensor in first.state.items():
            assert same_bits(tensor, second.state[state]), f"{name}: the state {state!r} differs between two ranks."
        if self._partition(required=False) in ("token", "sequence"):
            self._trains_alike(alone, first)

    def _trains_alike(self, alone: Trained, first: Trained) -> None:
        """Assert that the first of two ranks had the results of one rank."""
        looks_at = f"although routing looks at one {self._partition()}"
        says = f"{self.plugin.name}: two ranks do not train like one, {looks_at}"
        for on_one, on_two in zip(alone.results, first.results, strict=True):
            same = on_two.loss == pytest.approx(on_one.loss, rel=1e-5)
            assert same, f"{says} (losses {on_one.loss:.7f} and {on_two.loss:.7f})."
            difference = (torch.tensor(on_two.load_LE) - torch.tensor(on_one.load_LE)).abs().max().item()
            assert difference <= NEAR_TIES, f"{says}: an expert's load differs by {difference:.3f} of a share."
            same = on_two.aux_losses == pytest.approx(on_one.aux_losses, rel=1e-4)
            assert same, f"{says}: {on_one.aux_losses} and {on_two.aux_losses}."

    def _train(self, world: int, micro_batch: int) -> list[Trained]:
        sizes = {"num_experts": self.dims["num_experts"], "top_k": self.dims["top_k"]}
        parts = {"parallel": {"experts": {"ep": world}}, **self.parts, "routing": self.chosen}
        layer_case = whole_model(world, parts=parts, plugins=(self.plugin,), micro_batch=micro_batch, sizes=sizes)
        return list(self.pool.run(train, world, layer_case, 3))

    def _complain(self, faults: Iterator[str]) -> None:
        for fault in faults:
            raise AssertionError(f"{self.plugin.name}: {fault}")

    def _partition(self, *, required: bool = True) -> Any:
        """Set of tokens that the router looks at; if ``required``, skip sets larger than a sequence."""
        partition = self._sized().assemble().layers[0].facts.get("partition")
        if required and partition not in ("token", "sequence"):
            pytest.skip(f"{self.plugin.name} looks at one {partition}: what it computes depends on the split")
        return partition

    def _attached(self, router: nn.Module, x_TD: Tensor, batch: Batch, variable: Tensor) -> Tensor:
        """Gradient of ``variable`` from a backward whose gradient of the weights is zero."""
        weights_TK = router(x_TD, batch).weights_TK
        if not weights_TK.requires_grad:
            return torch.zeros_like(variable)
        (grad,) = torch.autograd.grad(weights_TK, variable, torch.zeros_like(weights_TK), allow_unused=True)
        return torch.zeros_like(variable) if grad is None else grad

    def _check_sequences(self, router: nn.Module, tokens: Tokens, partition: str) -> None:
        """Assert that sequences routed one by one, the last first, get what they get together."""
        x_TD = tokens.x(self.dims["dim"])
        batch = tokens.batch(loss_scale=torch.tensor(0.3))
        whole = router(x_TD, batch)
        routings = [router(*of_sequences(batch, x_TD, [number])) for number in reversed(range(tokens.sequences))]
        routings.reverse()
        self._same_as_apart(whole, routings, f"{self.plugin.name} offers to look at one {partition} at a time, but")

    def _check_tokens(self, router: nn.Module, tokens: Tokens) -> None:
        """Assert that tokens get the same choices without half of the others, and in another order."""
        says = f"{self.plugin.name} offers to look at one token at a time, but"
        x_TD = tokens.x(self.dims["dim"])
        whole = router(x_TD, tokens.batch())
        mask_BS = torch.rand(tokens.sequences, tokens.positions, generator=torch.Generator().manual_seed(1)) < 0.5
        without_others = router(x_TD, tokens.batch(mask_BS=mask_BS))
        mask_T = mask_BS.flatten()
        expected = {key: getattr(whole, key)[mask_T] for key in _CHOICES}
        alone = {key: getattr(without_others, key)[mask_T] for key in _CHOICES}
        self._same_choices(Routing(**expected), alone, f"{says} the routing of a token depends on the others.")
        # In evaluation, where nothing is drawn: a draw depends on a token's place.
        router.eval()
        batch = Tokens(sequences=1, positions=tokens.num_tokens).batch(seeds_B=None)
        in_order = router(x_TD, batch)
        order = torch.randperm(tokens.num_tokens, generator=torch.Generator().manual_seed(tokens.seed))
        permuted = router(x_TD[order], batch)
        router.train()
        restored = {key: getattr(permuted, key)[order.argsort()] for key in _CHOICES}
        self._same_choices(in_order, restored, f"{says} the routing of a token depends on its place among the others.")

    def _same_choices(self, whole: Routing, other: Mapping[str, Tensor], says: str) -> None:
        same_ids = torch.equal(whole.expert_ids_TK, other["expert_ids_TK"])
        same = same_ids and torch.allclose(whole.weights_TK, other["weights_TK"], rtol=1e-4, atol=1e-6)
        assert same, says


def _state_after(seed: int) -> Tensor:
    """State of PyTorch's generator that was seeded, and has drawn nothing."""
    return torch.Generator().manual_seed(seed).get_state()
