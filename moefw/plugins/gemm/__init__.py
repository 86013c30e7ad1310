"""Expert computation: the grouped GEMMs and the activation between them."""
