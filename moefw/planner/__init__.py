"""What a spec will take, from the spec alone: memory now, time later. Imports no torch."""

from moefw.planner.ledger import Ledger, ledger
from moefw.planner.regions import RegionTotals

__all__ = ["Ledger", "RegionTotals", "ledger"]
