"""The best of several drafters in each round."""
