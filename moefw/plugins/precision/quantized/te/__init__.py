"""``backend: te``: operands of Transformer Engine's quantizers, multiplied by its GEMMs."""
