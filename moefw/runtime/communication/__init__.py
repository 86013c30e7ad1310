"""Communication of rows and metadata between ranks: movements with their duals, collectives, bytes sent.

A movement (``movement``) is two autograd nodes. The backward of its finish starts the dual movement, and the backward
of its start waits for it. Work that overlaps in forward therefore overlaps in backward.
"""
