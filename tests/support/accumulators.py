"""Accumulators of kernels to which a loop adds more than one ``tl.dot``.

Triton 3.6 to 3.8 compile these for Blackwell into code that gives wrong values (triton#10821). Neither the interpreter
nor the compiler shows it, so the rule is read off the code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

DOTS = ("dot", "dot_scaled")
ACCUMULATOR = {"dot": 2, "dot_scaled": 6}
"""Place of the accumulator among the arguments; as a keyword it is called ``acc``."""
TWICE = 2
"""Dots of a loop that is unrolled: as many as show the fault."""


def shared_accumulators(source: str) -> list[str]:
    """Return ``function: accumulator`` for each accumulator to which one loop adds several dots."""
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    found = []
    for name, function in functions.items():
        for loop in ast.walk(function):
            if isinstance(loop, (ast.For, ast.While)):
                found += [f"{name}: {shared}" for shared in _Loop(functions).shared_in(loop)]
    return sorted({*found})


class _Loop:
    """The dots whose results each name of a loop holds. Those of a loop inside are not of this loop, unless unrolled."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self._functions = functions
        self._number = count()
        self._dots: dict[str, set[int]] = {}
        self._carried: set[str] = set()

    def shared_in(self, loop: ast.For | ast.While) -> Iterator[str]:
        times = TWICE if _is_unrolled(loop) else 1
        for _ in range(times):
            self._read(loop.body)
        yield from (name for name in self._carried if len(self._dots.get(name, ())) > 1)

    def _read(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.If):
                self._read(statement.body)
                self._read(statement.orelse)
            elif isinstance(statement, ast.For) and _is_unrolled(statement):
                self._read(statement.body * TWICE)
            elif isinstance(statement, ast.AugAssign):
                self._assign(statement.target, statement.value, carries=True)
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    self._assign(target, statement.value, carries=False)

    def _assign(self, target: ast.expr, value: ast.expr, *, carries: bool) -> None:
        dots = self._dots_of(value)
        read = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        for name in [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]:
            if carries or name in read:
                self._carried.add(name)
            self._dots[name] = dots | (self._dots.get(name, set()) if carries else set())

    def _dots_of(self, value: ast.AST) -> set[int]:
        """Return the dots whose results an expression adds up. A dot's factors are none of them."""
        if isinstance(value, ast.Name):
            return self._dots.get(value.id, set())
        name = _called(value)
        if isinstance(value, ast.Call) and name in DOTS:
            given = value.args[ACCUMULATOR[name] : ACCUMULATOR[name] + 1]
            given += [keyword.value for keyword in value.keywords if keyword.arg == "acc"]
            return {next(self._number)}.union(*map(self._dots_of, given))
        inside = set().union(*map(self._dots_of, ast.iter_child_nodes(value)))
        if name in self._functions:
            inside |= {next(self._number) for node in ast.walk(self._functions[name]) if _called(node) in DOTS}
        return inside


def _called(node: ast.AST) -> str:
    """Return the name of what is called: ``f`` of ``f(x)``, ``dot`` of ``tl.dot(x)``; empty if nothing is."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Name):
        return node.func.id
    is_of_triton = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    return node.func.attr if is_of_triton and node.func.value.id == "tl" else ""


def _is_unrolled(loop: ast.AST) -> bool:
    return isinstance(loop, ast.For) and _called(loop.iter) == "static_range"
