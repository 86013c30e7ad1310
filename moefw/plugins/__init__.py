"""The built-in plugins. The first line of a module, or of a package, names its parts, and makes them known."""
