"""The order in which a step reads prepared data: windows, blends, packs."""
