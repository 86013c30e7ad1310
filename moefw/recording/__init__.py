"""Records what code does, on ranks that need not exist: collectives, and every storage from allocation to end."""
