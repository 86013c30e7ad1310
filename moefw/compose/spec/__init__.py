"""Reading a spec: plain data with the place of each key, its shape, and the sections that every spec has."""
