"""What a rank tells of an exception: the sentence, the author's own lines, and the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moefw.testing.error_text import FRAME, error_text


def told_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return error_text(error)
    raise AssertionError("nothing was raised")


def raise_without_a_message() -> None:
    raise ValueError


def multiply_what_does_not_fit() -> None:
    torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3))


def raise_with_a_cause() -> None:
    try:
        multiply_what_does_not_fit()
    except RuntimeError as error:
        raise ValueError("mine") from error


def raise_with_a_note() -> None:
    error = ValueError("mine")
    error.add_note("in region 'experts'")
    raise error


def test_an_exception_without_a_message_is_its_name() -> None:
    lines = told_of(raise_without_a_message).split("\n")
    assert lines[0] == "ValueError"
    assert lines[-2].endswith("in raise_without_a_message")
    assert lines[-1].strip() == "raise ValueError"


def test_frames_of_libraries_are_left_out() -> None:
    text = told_of(multiply_what_does_not_fit)
    assert text.startswith("RuntimeError: ")
    assert text.count(FRAME) == 2, "this test's, and the function's"
    assert "in multiply_what_does_not_fit" in text


def test_the_cause_is_told_too() -> None:
    text = told_of(raise_with_a_cause)
    assert text.startswith("ValueError: mine\n")
    assert "\nThis came of RuntimeError: " in text
    assert "in multiply_what_does_not_fit" in text.partition("This came of")[2]


def test_notes_follow_the_sentence() -> None:
    assert told_of(raise_with_a_note).split("\n")[:2] == ["ValueError: mine", "in region 'experts'"]
