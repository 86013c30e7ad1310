"""From a spec file to a model: spec, registry, resolve, assembly, build (the only place that constructs parts)."""
