"""Who holds what: mesh arithmetic, opened groups, experts and parameters that are sharded."""
