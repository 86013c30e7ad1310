"""The page of kinds, which ``moefw plugins --kinds`` prints: hooks, sections and guides of each kind of plugin."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from moefw.core.hooks import moefw_after_step, moefw_before_step, moefw_check, moefw_probes
from moefw.core.kinds import KINDS, Kind

HEAD: Final = """# Kinds of plugin

Written by `moefw plugins --kinds`; a test compares.

A plugin is a module that implements hooks with `@moefw.hookimpl`. A kind has one name: `moefw new NAME` writes a
package, `pytest --moefw-NAME` certifies one that is installed (with hyphens for underscores); [Suites](suites.md) says
what a test class may set, and what certifying costs. A hook returns a list of classes that extend the base; `build` of
such a class returns what is in the last column, or else the class does the work itself.
"""

OBSERVERS: Final = """
An observer implements `moefw_check`, `moefw_before_step` or `moefw_after_step`. A spec names it in
`run.observers: [progress]`, if its package declares the module:

```toml
[project.entry-points.moefw]
progress = "moefw_progress"
```
"""

COMMANDS: Final = """## Commands

A package may also add commands to `moefw`. They are entry points of the group `moefw.commands`, each a `click.Command`:

```toml
[project.entry-points."moefw.commands"]
routes-plot = "moefw_mine.commands:routes_plot"
```

This is `moefw routes-plot`. `moefw --help` lists it with its distribution, and imports nothing. A command cannot have
the name of a built-in one, and `MOEFW_ALLOWED_DISTRIBUTIONS` applies. An error of `moefw`, such as `moefw.RunError`,
is printed as a message.

[Upgrade a plugin](upgrade.md) says what changed with each version of the hook interface.
"""


def page() -> Iterator[str]:
    """Yield docs/guides/kinds.md in pieces, which newlines join."""
    yield HEAD
    yield "| kind | section | hook | base | what it decides | `build` returns |\n|---|---|---|---|---|---|"
    for kind in KINDS.values():
        section = f"`{kind.section}:`{', a list' if kind.many else ''}"
        built = f"`{kind.contract.partition(':')[2]}`" if kind.contract else ""
        yield f"| {_name(kind)} | {section} | `{kind.hook}` | `{kind.base.__name__}` | {kind.summary} | {built} |"
    yield "\nA kind without a link has no suite, template and guide:\n"
    yield from (f"- `{kind.name}`: {kind.why_not}" for kind in KINDS.values() if kind.why_not)
    yield "\n## Other hooks\n\n| hook | what it does |\n|---|---|"
    for hook in (moefw_check, moefw_probes, moefw_before_step, moefw_after_step):
        text = inspect.cleandoc(hook.__doc__ or "").replace("``", "`").partition("\n")[0]
        yield f"| `{hook.__name__}({', '.join(inspect.signature(hook).parameters)})` | {text} |"
    yield OBSERVERS
    yield COMMANDS.rstrip()


def _name(kind: Kind) -> str:
    return f"[`{kind.name}`]({PurePosixPath(kind.guide).name})" if kind.guide else f"`{kind.name}`"
