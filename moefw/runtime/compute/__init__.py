"""Computation around GEMMs: products under a recipe, casts, keys of random draws, auxiliary losses."""
