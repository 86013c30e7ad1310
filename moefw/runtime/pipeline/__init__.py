"""Stages of a pipeline: the order of their passes, and how it runs."""
