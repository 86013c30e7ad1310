"""What a spec will take, from the spec alone: memory now, time later."""

from moefw.planner.plans import ledger
from moefw.planner.report import COLUMNS, Ledger, RegionTotals

__all__ = ["COLUMNS", "Ledger", "RegionTotals", "ledger"]
