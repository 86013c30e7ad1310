"""Schedules of pipeline stages."""
