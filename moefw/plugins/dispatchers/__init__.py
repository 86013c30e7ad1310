"""Dispatchers: move rows to the ranks of their experts and back."""
