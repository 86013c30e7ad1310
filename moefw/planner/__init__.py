"""Prediction of the cost of a spec, without a cluster: memory, work, and how long a step takes.

``plans`` gives the ledger of a spec (``report``): from the cache, or measured (``measurement``). ``prediction`` adds
the time of a step (``time``) on a cluster, which ``cluster`` reads, or ``calibration`` measures; ``budget`` turns it
into hours and prices. ``sheets`` puts all of it into words, ``comparison`` two of it beside each other. ``tune``
searches for the best spec.
"""

from moefw.planner.plans import ledger
from moefw.planner.report import COLUMNS, Ledger, RegionTotals

__all__ = ["COLUMNS", "Ledger", "RegionTotals", "ledger"]
