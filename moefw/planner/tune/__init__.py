"""The search for layouts, schedules and policies of a spec on a cluster, which says why others lose. Needs no GPU.

A candidate is a set of settings of the spec (``space``), and what ``moefw check`` refuses is none. Its ledger is
composed (``compose``) from excerpts of its model, a layer of each kind, that are measured once for all candidates with
the same layers (``excerpt``, ``excerpts``): neither pp nor the schedule nor dp changes what a layer computes.
``search`` walks from setting to setting, ``ranking`` groups what the error of a ratio cannot tell apart, and
``reasons`` words what keeps a candidate from being better.
"""
