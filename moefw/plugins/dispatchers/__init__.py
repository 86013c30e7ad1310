"""Dispatchers: how rows reach the ranks of their experts, and come back."""
