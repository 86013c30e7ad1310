"""Context parallelism: how attention sees whole sequences whose positions are split over the ranks of cp."""
