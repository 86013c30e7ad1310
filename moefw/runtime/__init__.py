"""What runs in a step: the layer, movements of rows, products, what is dropped, who holds what."""
