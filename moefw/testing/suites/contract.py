"""What can be said of a plugin before anything is computed with it: attributes, arguments of methods, and offers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from moefw.core.errors import nearest
from moefw.core.facts import ANY, FACTS, Fact, Offers, Rule

Call = tuple[tuple[str, ...], Mapping[str, str]]
"""Positional and named arguments, each the name of its parameter."""


def misfits(part: object, contract: type) -> list[str]:
    """Sentences about a part, or a declaration, that cannot be read and called as ``contract`` says.

    It lacks an attribute, a property is a method, or a method takes other arguments.
    """
    called = [sentence for name, due in _methods(contract) if (sentence := _misfit(part, name, due)) is not None]
    return [*_unreadable(part, contract), *called]


def _unreadable(part: object, contract: type) -> Iterator[str]:
    """Yield what is wrong with attributes of a part: those that a contract annotates, and those of its properties."""
    owner = type(part).__qualname__
    annotated = {name for base in contract.__mro__ for name in vars(base).get("__annotations__", ())}
    for name in sorted(annotated):
        if not hasattr(contract, name) and not hasattr(part, name):  # what the contract has is its default
            yield f"{owner} has no attribute {name}, which {contract.__name__} says that it has. Set it."
    for name in dir(contract):
        is_read = isinstance(inspect.getattr_static(contract, name), property)
        own = inspect.getattr_static(part, name, None)
        if is_read and inspect.isfunction(own):
            yield f"{owner}.{name}{_place(own)} is a method, and {name} is read, not called. Make it a property."


def _methods(contract: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the methods that a contract names, its bases' among them."""
    names = [name for name in dir(contract) if name == "__call__" or not name.startswith("_")]
    for name in names:
        method = inspect.getattr_static(contract, name)
        if inspect.isfunction(method):  # neither a class method nor data
            yield name, method


def _misfit(part: object, name: str, due: Callable[..., Any]) -> str | None:
    """Sentence about one method of a part; None if it can be called in every way that its contract allows."""
    owner = type(part).__qualname__
    is_called_with = _shown(inspect.signature(due), of_class=True)
    method = _method_of(part, name)
    if not callable(method):
        return f"{owner} has no method {name}: it is called as {name}{is_called_with}. Add it."
    try:
        found = inspect.signature(method)
    except ValueError:  # written in C, which tells no signature
        return None
    for positional, named in _calls(inspect.signature(due)):
        try:
            found.bind(*positional, **named)
        except TypeError as error:
            written = f"{owner}.{getattr(method, '__name__', name)}{_shown(found)}{_place(method)}"
            what = f"{written} is called as {name}({_written(positional, named)})"
            whose = due.__qualname__
            return f"{what}: {error}. Give it the arguments of {whose}{is_called_with}."
    return None


def _method_of(part: object, name: str) -> Any:
    """Method of a part; of a module that is called, its ``forward``, which gets the arguments."""
    if name == "__call__" and isinstance(part, torch.nn.Module):
        name = "forward"
    return getattr(part, name, None)


def _calls(due: inspect.Signature) -> Iterator[Call]:
    """Yield the shortest call of a method with this signature, ``self`` included, and the longest."""
    parameters = [each for each in list(due.parameters.values())[1:] if each.kind is not each.VAR_KEYWORD]
    for chosen in ([each for each in parameters if each.default is each.empty], parameters):
        positional = tuple(each.name for each in chosen if each.kind is not each.KEYWORD_ONLY)
        yield positional, {each.name: "..." for each in chosen if each.kind is each.KEYWORD_ONLY}


def _written(positional: tuple[str, ...], named: Mapping[str, str]) -> str:
    return ", ".join([*positional, *(f"{name}={value}" for name, value in named.items())])


def _shown(signature: inspect.Signature, *, of_class: bool = False) -> str:
    """Parameters in parentheses, without annotations, and without ``self`` of a method ``of_class``."""
    parameters = list(signature.parameters.values())[1 if of_class else 0 :]
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _place(method: Any) -> str:
    """Where a method is written, in parentheses; empty where that is not known."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"


def unknown_offers(offered: Offers) -> list[str]:
    """Sentences about offers that fit no need, as no part knows their values, or as their type is another."""
    return [sentence for name, value in offered.items() for sentence in _unknown(FACTS[name], value)]


def _unknown(fact: Fact, value: Any) -> Iterator[str]:
    """Yield what is wrong with the offer of one fact."""
    form, is_of_form = FORMS[fact.rule]
    if not (is_of_form(value) or (value == ANY and fact.rule != "all")):
        yield f"offers {fact.name}={value!r}, and an offer of {fact.name} is {form}."
        return
    if fact.values is None or value == ANY:
        return
    for item in value:
        if item not in fact.values:
            what = f"offers {fact.name}={value!r}, of which no part knows {item!r}."
            yield f"{what} {nearest(str(item), fact.values)}"


def _is_of(*kinds: type) -> Callable[[Any], bool]:
    """Whether something is a tuple or a list of values of these types."""
    return lambda value: (
        isinstance(value, tuple | list)
        and all(isinstance(item, kinds) and not isinstance(item, bool) for item in value)
    )


FORMS: Final[Mapping[Rule, tuple[str, Callable[[Any], bool]]]] = {
    "multiple": ("a tuple of whole numbers, or moefw.ANY", _is_of(int)),
    "one of": ("a tuple of texts, or moefw.ANY", _is_of(str)),
    "some": ("a tuple of items, or moefw.ANY", _is_of(object)),
    "some at least": ("a tuple of numbers, or moefw.ANY", _is_of(int, float)),
    "some like": ("a tuple of names, or moefw.ANY", _is_of(str)),
    "some dividing": ("a tuple of pairs", _is_of(tuple)),
    "all": ("True or False", lambda value: isinstance(value, bool)),
}
"""By rule: what an offer is, in words, and whether a value is one."""
