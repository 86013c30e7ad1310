"""Texts of options and of suites' attributes: the string literals under the fields of a class, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import attrs


def option_texts(cls: type[Any]) -> Mapping[str, str]:
    """Text of each option of an attrs class that has one, on one line.

    An option that a subclass declares again without a text keeps that of the base class.
    """
    bases = [base for base in reversed(cls.__mro__) if attrs.has(base) and _declares_options(base)]
    texts = {name: text for base in bases for name, text in field_texts(base).items()}
    return {field.name: texts[field.name] for field in attrs.fields(cls) if field.init and field.name in texts}


def _declares_options(cls: type[Any]) -> bool:
    return not all(field.inherited for field in attrs.fields(cls))


@cache
def field_texts(cls: type[Any]) -> Mapping[str, str]:
    """Text of each annotated name that a class itself declares with one, on one line.

    Empty without its source, as in a package of compiled files.
    """
    try:
        module = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    return {name: text for node in module.body for name, text in _texts_under_fields(node)}


def _texts_under_fields(definition: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the name of each field that a string literal follows, and the literal on one line."""
    if not isinstance(definition, ast.ClassDef):
        return
    for statement, next_statement in zip(definition.body, definition.body[1:]):
        match statement, next_statement:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())
