"""Pipelines: where stages lie, what travels between them, and who plays a schedule.

Each rank of pp holds some stages of the model (``placement``). A ``Player`` (``player``) runs the rank's list of the
schedule: a forward keeps the graph of a micro-batch in a stage as one call of phases, a backward takes the gradients
that arrive and runs that graph, a pass of weight gradients runs what products have left
(:mod:`moefw.runtime.compute.wgrads`). A pair runs the phases of a forward and of the backward of another micro-batch
(``in_flight``: a graph for each phase) in the order of ``merging``. ``transfers`` adds to each list where to begin to
receive, and ``link`` sends.
"""
