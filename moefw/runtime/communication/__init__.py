"""Communication of rows and metadata between ranks: movements with their duals, collectives, bytes sent."""
