"""Checkpoints: safetensors under canonical names and a sealed JSON manifest, committed by one rename. No pickle.

Names do not depend on the layout, so a checkpoint loads into any layout of the same model. ``parts`` says which rank
writes what, ``files`` is a file and its index, and ``manifest`` seals them. ``saving`` writes, and ``commit`` adds and
removes checkpoints by renames. ``choice`` finds the one to continue from, ``reading`` reads boxes of its tensors,
``differences`` says what of it a run does not carry on, and ``loading`` fills a model with the rest. ``format2`` is
what older checkpoints are.
"""

from moefw.training.checkpoint.base import base_of
from moefw.training.checkpoint.choice import Chosen, another, choose, choose_together, way_back
from moefw.training.checkpoint.commit import set_aside_after
from moefw.training.checkpoint.loading import Loaded, load
from moefw.training.checkpoint.manifest import Base, Manifest, Origin
from moefw.training.checkpoint.saver import Saved, Saver
from moefw.training.checkpoint.saving import save

__all__ = [
    "Base",
    "Chosen",
    "Loaded",
    "Manifest",
    "Origin",
    "Saved",
    "Saver",
    "another",
    "base_of",
    "choose",
    "choose_together",
    "load",
    "save",
    "set_aside_after",
    "way_back",
]
