"""The small core: hook points, the spec, facts, resolve and build. It knows no plugin by name."""
