"""Imported last by a process of which others are copies: it has the code of every part, and none of them collects it.

A collection writes to every object that it looks at, so that each copy would get pages of its own for all of torch.
"""

from __future__ import annotations

import gc
import pkgutil
from importlib import import_module

import moefw.models
import moefw.plugins

for _package in (moefw.models, moefw.plugins):
    for _module in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
        import_module(_module.name)
gc.collect()
gc.freeze()
