"""Measured memory of a whole training step of one rank: with values, or without memory and without other ranks."""

from moefw.recording.places import OUTSIDE, Place
from moefw.training.measured.report import Measured, Saved
from moefw.training.measured.step import measure, measure_here

__all__ = ["OUTSIDE", "Measured", "Place", "Saved", "measure", "measure_here"]
