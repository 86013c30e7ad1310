"""The files of a tokenizer's folder: the tokenizer, its chat template, and what is handed on with a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from moefw.core.data import TOKENIZER
from moefw.core.errors import MOST_LISTED, DataError, os_reason
from moefw.plugins.data.options import absolute
from moefw.plugins.data.tokenizers import read_json

TEMPLATE: Final = "chat_template.jinja"
CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
GENERATION: Final = "generation_config.json"
HANDED_ON: Final = (CONFIG, SPECIAL_TOKENS, GENERATION)
_DOWNLOAD: Final = "Download it again."


@frozen(kw_only=True)
class TokenizerFiles:
    """Content of the files, and the variables of the template: the names of special tokens, such as ``eos_token``.

    ``beside`` are those that a run hands on besides ``tokenizer.json``, the template among them. ``ends`` are the ids
    with which generated texts end: ``eos_token``, and those of ``generation_config.json``.
    """

    tokenizer: bytes
    template: str
    variables: Mapping[str, str]
    beside: Mapping[str, bytes]
    ends: frozenset[int] = frozenset()


def tokenizer_path(name: str) -> Path:
    """The ``tokenizer.json`` that ``data.tokenizer`` names, itself or its folder."""
    path = Path(absolute(name))
    return path / TOKENIZER if path.is_dir() else path


def read_files(tokenizer: str, template: str | None) -> TokenizerFiles:
    """Files of the folder of a tokenizer, with the template of a file, or the folder's own. Raises DataError."""
    path = tokenizer_path(tokenizer)
    content = _read("data.tokenizer", path)
    beside = {name: _read("data.tokenizer", path.with_name(name)) for name in HANDED_ON if _is_there(path, name)}
    configs = [_object(path.with_name(name), beside[name]) for name in (SPECIAL_TOKENS, CONFIG) if name in beside]
    config = configs[-1] if CONFIG in beside else {}
    _require_tokens(path, content, config)
    source = _template(path, config, template)
    variables = {name: text for each in configs for name, text in _special_tokens(each)}
    return TokenizerFiles(
        tokenizer=content,
        template=source,
        variables=variables,
        beside={**beside, TEMPLATE: source.encode()},
        ends=frozenset(_ends(path, content, variables.get("eos_token"), beside)),
    )


def _ends(path: Path, tokenizer: bytes, eos: str | None, beside: Mapping[str, bytes]) -> Iterator[int]:
    """Yield ids with which generated texts end."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):  # the process that reads it says why
        yield from (token["id"] for token in json.loads(tokenizer)["added_tokens"] if token["content"] == eos)
    if GENERATION in beside:
        told = _object(path.with_name(GENERATION), beside[GENERATION]).get("eos_token_id")
        yield from (end for end in (told if isinstance(told, list) else [told]) if type(end) is int)


def _require_tokens(path: Path, tokenizer: bytes, config: Mapping[str, Any]) -> None:
    """Raise DataError if a configuration adds tokens that ``tokenizer.json`` lacks: ``transformers`` has them then."""
    added = config.get("added_tokens_decoder")
    if not isinstance(added, Mapping):
        return
    try:
        known = {token["content"] for token in json.loads(tokenizer)["added_tokens"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # the process that reads it says why
    names = [token.get("content") for token in added.values() if isinstance(token, Mapping)]
    lacking = [repr(name) for name in names if name not in known]
    if lacking:
        what = f"data.tokenizer: {path} lacks tokens that {CONFIG} adds: {', '.join(lacking[:MOST_LISTED])}."
        raise DataError(what, "Load the folder with transformers and save it again: that writes them into both.")


def _template(path: Path, config: Mapping[str, Any], template: str | None) -> str:
    if template is not None:
        return _text("data.template", Path(absolute(template)))
    if _is_there(path, TEMPLATE):
        return _text("data.template", path.with_name(TEMPLATE))
    source = config.get("chat_template")
    if isinstance(source, str):
        return source
    fix = "Name the file of a template in data.template."
    if source:
        names = ", ".join(str(each.get("name")) for each in source if isinstance(each, Mapping))
        what = f"data.template: {path.with_name(CONFIG)} has several chat templates: {names}."
        raise DataError(what, f"Write one of them to a file. {fix}")
    raise DataError(f"data.template: {path.parent} has neither {TEMPLATE} nor a chat_template in {CONFIG}.", fix)


def _special_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of special tokens; some are objects that have the text as content."""
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            yield name, text


def _is_there(path: Path, name: str) -> bool:
    return os.path.lexists(path.with_name(name))


def _object(path: Path, content: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"data.tokenizer: {path} is not JSON: {error}.", _DOWNLOAD) from error
    if not isinstance(value, dict):
        raise DataError(f"data.tokenizer: {path} holds no JSON object.", _DOWNLOAD)
    return value


def _text(option: str, path: Path) -> str:
    try:
        return _read(option, path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{option}: {path} is not UTF-8 text: {error.reason}.", "Name a file of text.") from error


def _read(option: str, path: Path) -> bytes:
    try:
        return read_json(path)
    except OSError as error:
        raise DataError(f"{option}: {path} cannot be read: {os_reason(error)}.", "Correct the path.") from error
