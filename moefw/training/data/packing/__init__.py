"""Packs: sequences of mixed length, one behind another, and how many ranks of cp share each pack."""
