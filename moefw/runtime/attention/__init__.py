"""The core of attention, and the positions and masks that it computes with."""
