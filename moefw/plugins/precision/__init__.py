"""Precision recipes: the formats in which GEMMs get their operands."""
