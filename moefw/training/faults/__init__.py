"""Faults of a run: a rank hangs, dies, leaves or is asked to stop, a value is not finite.

The main thread stamps its progress (``stamps``). A launcher or the ranks themselves watch the stamps
(:mod:`moefw.training.local_ranks`, ``watch``) and decide who hangs (``blame``). A step that is not finite runs again
with checks (``watched_step``). ``docs/faults.md`` lists what a run survives.
"""
