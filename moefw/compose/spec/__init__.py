"""Reading of specs: plain data with the place of each key, its conversion to classes, and the sections of a spec."""
