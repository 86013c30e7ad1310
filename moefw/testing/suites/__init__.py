"""One contract suite per hook point."""
