"""Parallel heads, which draft all tokens in one pass."""
