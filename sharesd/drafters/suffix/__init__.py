"""Suffix lookup in the texts so far and in a corpus."""
