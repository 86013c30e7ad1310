"""What a run remembers of itself, as files in its folder, which docs/runs.md describes field by field.

``metrics`` writes and reads a line for each step, with ``experts`` the summary of its load. ``expert_load`` keeps the
whole load, averaged over windows of steps, ``events`` what happened, and ``origins`` where the values of the spec came
from. All stand on ``json_lines``. Nothing here imports torch, and files are read one line at a time.
"""
