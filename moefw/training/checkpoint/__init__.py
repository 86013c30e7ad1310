"""Checkpoints: safetensors under canonical names and a sealed JSON manifest, committed by one rename. No pickle.

Names do not depend on the layout, so a checkpoint loads into any layout of the same model. ``manifest`` is the format;
``saving`` writes, each rank what :mod:`moefw.runtime.parallel.holders` says; ``commit`` adds and removes checkpoints by
renames; ``choice`` finds the one to continue from, ``differences`` says what of it a run does not carry on, and
``loading`` checks all of it before it changes anything.
"""

from moefw.training.checkpoint.base import base_of
from moefw.training.checkpoint.choice import Chosen, another, choose, choose_together, way_back
from moefw.training.checkpoint.commit import set_aside_after
from moefw.training.checkpoint.loading import Loaded, load
from moefw.training.checkpoint.manifest import Base, Manifest, Origin
from moefw.training.checkpoint.saving import save

__all__ = [
    "Base",
    "Chosen",
    "Loaded",
    "Manifest",
    "Origin",
    "another",
    "base_of",
    "choose",
    "choose_together",
    "load",
    "save",
    "set_aside_after",
    "way_back",
]
