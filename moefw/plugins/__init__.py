"""The built-in plugins. They are found through entry points, as anybody's are."""
