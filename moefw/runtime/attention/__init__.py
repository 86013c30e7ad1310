"""The core of attention, and the positions and masks that it computes with.

An attention plugin is projections around this core (``attend``). The positions of a batch become a table once, for all
layers. Ranks of cp exchange keys or heads around the core, each by its plugin.
"""
