"""What parts say of the memory that they take: the words, and the formulas that several share."""
