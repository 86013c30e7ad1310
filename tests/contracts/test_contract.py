"""What is said of methods that cannot be called as their contract is, and of offers that no part knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefw.commands.facts import MEANINGS
from moefw.core.contracts import Dispatcher, Router
from moefw.core.facts import ANY, FACTS
from moefw.core.plugin import PipelinePlugin, RouterPlugin
from moefw.plugins.pipelines.merged import Merged
from moefw.plugins.routers.topk import TopK
from moefw.testing.suites.contract import misfits, unknown_offers


class Part:
    """Has every method of a dispatcher, with the arguments of the contract."""

    key_columns = 8

    def plan(self, routing: Any, *, counts: Any = None, dropless: bool = False) -> Any: ...
    def start_dispatch(self, x_TD: Any, weights_TK: Any, plan: Any) -> Any: ...
    def finish_dispatch(self, pending: Any) -> Any: ...
    def start_redispatch(self, x_TD: Any, weights_TK: Any, handle: Any) -> Any: ...
    def start_combine(self, rows_RD: Any, handle: Any) -> Any: ...
    def finish_combine(self, pending: Any) -> Any: ...
    def dispatch(self, x_TD: Any, weights_TK: Any, plan: Any) -> Any: ...
    def redispatch(self, x_TD: Any, weights_TK: Any, handle: Any) -> Any: ...
    def combine(self, rows_RD: Any, handle: Any) -> Any: ...
    def close(self) -> None: ...


class WithoutDropless(Part):
    def plan(self, routing: Any, *, counts: Any = None) -> Any: ...  # type: ignore[override]


class AsksForMore(Part):
    def start_combine(self, rows_RD: Any, handle: Any, out_TD: Any) -> Any: ...  # type: ignore[override]


class OtherNames(Part):
    def start_combine(self, rows: Any, receipt: Any, stream: Any = None) -> Any: ...
    def plan(self, *routings: Any, **options: Any) -> Any: ...


class Module(torch.nn.Module):
    """Router that is called through ``forward``."""

    def forward(self, x_TD: Any) -> Any: ...
    def state_spec(self) -> Any: ...
    def update(self, reduced: Any) -> Any: ...
    def over_layers(self, pooled: Any) -> Any: ...


class Chunked(PipelinePlugin):
    """Has a method in the place of a property, and no name."""

    def chunks(self) -> int: ...  # type: ignore[override]


def test_a_part_with_the_arguments_of_its_contract_is_fine_under_other_names_too() -> None:
    assert misfits(Part(), Dispatcher) == []
    assert misfits(OtherNames(), Dispatcher) == []


def test_a_method_is_told_with_its_place_its_call_and_what_was_found() -> None:
    (sentence,) = misfits(WithoutDropless(), Dispatcher)
    line = WithoutDropless.plan.__code__.co_firstlineno
    assert sentence == (
        f"WithoutDropless.plan(routing, *, counts=None) ({__file__}, line {line}) is called as "
        "plan(routing, counts=..., dropless=...): got an unexpected keyword argument 'dropless'. "
        "Give it the arguments of Dispatcher.plan(routing, *, counts=None, dropless=False)."
    )


def test_an_argument_too_many_and_a_missing_method_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "close", None)
    closing, combining = misfits(AsksForMore(), Dispatcher)
    assert closing == "AsksForMore has no method close: it is called as close(). Add it."
    assert "is called as start_combine(rows_RD, handle): missing a required argument: 'out_TD'" in combining


def test_a_module_is_called_through_forward_and_a_declaration_is_looked_at_too() -> None:
    (sentence,) = misfits(Module(), Router)
    assert sentence.startswith("Module.forward(x_TD)")
    assert "is called as __call__(x_TD, batch): too many positional arguments" in sentence
    assert misfits(TopK(), RouterPlugin) == []


def test_an_attribute_that_is_missing_and_a_property_that_is_a_method_are_told() -> None:
    sentences = misfits(Chunked(), PipelinePlugin)
    line = Chunked.chunks.__code__.co_firstlineno
    assert sentences == [
        "Chunked has no attribute name, which PipelinePlugin says that it has. Set it.",
        f"Chunked.chunks ({__file__}, line {line}) is a method, and chunks is read, not called. Make it a property.",
    ]
    assert misfits(Merged(), PipelinePlugin) == []


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        ({"rows": ("raged", "padded")}, "of which no part knows 'raged'. Did you mean 'ragged'?"),
        ({"counts": ("hosts",)}, "Did you mean 'host'?"),
        ({"repeats": "no"}, "offers repeats='no', and an offer of repeats is True or False."),
        ({"repeats": ANY}, "is True or False"),
        ({"row_alignment": ("128",)}, "is a tuple of whole numbers, or moefw.ANY"),
        ({"row_alignment": 128}, "is a tuple of whole numbers, or moefw.ANY"),
        ({"budget": 1.5}, "is a tuple of numbers"),
    ],
    ids=str,
)
def test_an_offer_that_fits_no_need_is_told(offered: dict[str, Any], words: str) -> None:
    (sentence,) = unknown_offers(offered)
    assert words in sentence


def test_offers_of_known_values_are_fine() -> None:
    offered = {"rows": ("ragged", "padded"), "counts": ANY, "repeats": False, "row_alignment": (1, 128)}
    assert unknown_offers({**offered, "budget": (1.5,), "operand": ("of its own",)}) == []


def test_the_page_of_facts_has_every_value_that_a_part_may_write() -> None:
    closed = {name: fact for name, fact in FACTS.items() if fact.values is not None}
    assert closed
    for name, fact in closed.items():
        written = set(fact.values) - set(fact.silence or ())
        assert [value for value in written if f"`{value}`" not in MEANINGS[name]] == []
