"""The time of a step on a cluster: from the work of a plan, software as data, and figures with sources.

``costs`` turns work into seconds by category and launches, at the shares of peaks in ``figures.yaml``; ``scale`` has
the numbers that were fitted to published runs; ``schedule`` plays the passes; ``step`` puts them together, and
``likeness`` says how wrong predictions of published rows like it were. Needs no torch.
"""
