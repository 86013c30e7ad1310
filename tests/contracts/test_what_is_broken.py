"""Every check of every contract suite catches a plugin that is broken on purpose."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import test_adapter_suite
import test_attention_suite
import test_context_parallel_suite
import test_data_source_suite
import test_gemm_suite
import test_layout_suite
import test_memory_policy_suite
import test_optimizer_memory_policy_suite
import test_optimizer_suite
import test_pipeline_suite
import test_precision_suite
import test_router_suite
import test_schedule_suite

import broken_movements  # noqa: F401 - declares dispatchers, too
import unordered_dispatchers  # noqa: F401 - and these
from broken_dispatchers import BROKEN as BROKEN_DISPATCHERS
from moefw import testing
from moefw.testing import (
    AdapterSuite,
    AttentionSuite,
    ContextParallelSuite,
    DataSourceSuite,
    DispatcherSuite,
    GemmSuite,
    LayoutSuite,
    MemoryPolicySuite,
    OptimizerMemoryPolicySuite,
    OptimizerSuite,
    PipelineSuite,
    PrecisionSuite,
    RouterSuite,
    ScheduleSuite,
)
from moefw.testing.suites.base import Suite

OTHER_CASES_OF_AN_ASSERTION = {
    "test_the_layer_equals_the_oracle_where_ranks_are_empty",
    "test_the_layer_equals_the_oracle_where_tokens_are_masked",
    "test_the_layer_equals_the_oracle_with_one_expert_or_all",
    "test_the_layer_equals_the_oracle_where_capacity_drops_choices",
    "test_the_layer_equals_the_oracle_in_bf16",
    "test_the_layer_equals_the_oracle_with_experts_in_parts",
    "test_drawn_movements_are_right",
    "test_drawn_layers_equal_the_oracle",
}
"""Checks that make the assertions of other checks, in cases of their own."""
CHECKS_OF_SEVERAL_SUITES = {"test_steps_that_it_offers_to_replay_have_the_bits_of_eager_ones"}
"""Checks whose code is one for all kinds: broken routers and experts show that this one catches."""
CHECKS: list[tuple[type[Suite], Collection[str]]] = [
    (AdapterSuite, [check for _, check, _ in (*test_adapter_suite.BROKEN, *test_adapter_suite.OF_EXPERTS)]),
    (AttentionSuite, [check for _, check, _ in test_attention_suite.BROKEN]),
    (ContextParallelSuite, [check for _, check, _ in test_context_parallel_suite.BROKEN]),
    (DataSourceSuite, [check for _, check, _ in test_data_source_suite.BROKEN]),
    (DispatcherSuite, [broken.check.removeprefix("test_") for broken in BROKEN_DISPATCHERS.values()]),
    (GemmSuite, [check for _, check, _ in test_gemm_suite.BROKEN]),
    (LayoutSuite, [check for _, check, _ in test_layout_suite.BROKEN]),
    (MemoryPolicySuite, [check for _, check, _ in test_memory_policy_suite.BROKEN]),
    (OptimizerMemoryPolicySuite, [check for _, check, _ in test_optimizer_memory_policy_suite.BROKEN]),
    (OptimizerSuite, [check for _, check, *_ in test_optimizer_suite.BROKEN]),
    (PipelineSuite, [check for _, check, _ in test_pipeline_suite.BROKEN]),
    (PrecisionSuite, [check for _, check, _ in test_precision_suite.BROKEN]),
    (RouterSuite, [check for _, check, _ in test_router_suite.BROKEN] + ["a_token_uses_as_many"]),
    (ScheduleSuite, [check for _, check, _ in test_schedule_suite.BROKEN]),
]


@pytest.mark.parametrize(("suite", "caught"), CHECKS, ids=[suite.__name__ for suite, _ in CHECKS])
def test_every_check_of_a_suite_catches_a_broken_plugin(suite: type[Suite], caught: Collection[str]) -> None:
    checks = {name for name in dir(suite) if name.startswith("test_")}
    checks -= OTHER_CASES_OF_AN_ASSERTION | CHECKS_OF_SEVERAL_SUITES
    assert checks
    assert not [name for name in checks if not any(name.startswith(f"test_{check}") for check in caught)]


def test_no_check_of_a_suite_returns_silently() -> None:
    suites = Path(testing.__file__).parent / "suites"
    checks = [
        node
        for module in suites.glob("*.py")
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(checks) > 100
    assert not [check.name for check in checks if any(isinstance(node, ast.Return) for node in own_statements(check))]


def own_statements(function: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes of a function without those of functions inside it, which check one drawn example."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from own_statements(node)
