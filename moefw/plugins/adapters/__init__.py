"""Built-in adapters: what trains beside weights that stay as they are."""
