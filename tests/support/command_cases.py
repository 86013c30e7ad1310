"""A third-party plugin, and the output of commands."""

import json
import textwrap

from click.testing import CliRunner

from moefw.commands.plugins import plugins
from moefw.commands.schema import schema
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import MoefwError
from moefw.core.site import Machine

HEAD = "from __future__ import annotations\nfrom typing import *\nfrom attrs import field, frozen\nimport moefw\n"


def dispatcher(name, body):
    """Return the source of a module that declares one dispatcher."""
    body = textwrap.indent(textwrap.dedent(body), "    ")
    return (
        f'{HEAD}@frozen(kw_only=True)\nclass Part(moefw.DispatcherPlugin):\n    """A dispatcher of somebody else."""\n'
        f"    name = {name!r}\n{body}\n@moefw.hookimpl\ndef moefw_dispatchers():\n    return [Part]\n"
    )


def listing():
    result = CliRunner().invoke(plugins, ["--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def listed(name):
    (entry,) = (entry for entry in listing()["plugins"] if entry["name"] == name)
    return entry


def written_schema():
    result = CliRunner().invoke(schema, catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def refusal(tree):
    """Return the error of the reader for a spec, or nothing."""
    try:
        assemble_tree(tree, Marks("spec"), defaults=defaults(), machine=Machine())
    except MoefwError as error:
        return str(error)
    return ""


def dispatch_branches(found):
    return found["properties"]["dispatch"]["oneOf"]
