"""Parallel layouts: how ranks are arranged into meshes."""
