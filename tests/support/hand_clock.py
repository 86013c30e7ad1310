"""A clock for tests."""

from __future__ import annotations


class Time:
    """A clock that the test moves."""

    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s
