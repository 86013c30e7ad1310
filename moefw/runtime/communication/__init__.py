"""Rows and metadata between ranks: movements with their duals, the bytes they take, and what dispatchers share."""
