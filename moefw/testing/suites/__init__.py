"""One contract suite a hook point."""
