"""What is decoded, in which order, and why it is exact."""
