"""What is computed around a GEMM: products under a recipe, casts, keys of random draws, auxiliary losses."""
