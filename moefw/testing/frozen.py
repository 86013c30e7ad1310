"""Imported last by a process of which others are copies: what it holds is never collected in any of them.

A collection writes to every object that it looks at, so that each copy would get pages of its own for all of torch.
"""

import gc

gc.collect()
gc.freeze()
