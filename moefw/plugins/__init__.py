"""The built-in plugins. They are found through entry points, like third-party plugins."""
