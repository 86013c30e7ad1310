"""Routers: which experts each token goes to."""
