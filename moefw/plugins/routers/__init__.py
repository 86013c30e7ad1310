"""Routers: choose the experts of each token."""
