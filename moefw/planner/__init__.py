"""Prediction of the cost of a spec, without a cluster: memory now, time later."""

from moefw.planner.plans import ledger
from moefw.planner.report import COLUMNS, Ledger, RegionTotals

__all__ = ["COLUMNS", "Ledger", "RegionTotals", "ledger"]
