"""Data sources, and the files and tokenizers that they share."""
