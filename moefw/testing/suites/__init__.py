"""One contract suite for each kind of plugin."""
