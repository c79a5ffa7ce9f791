"""Checkpoint folders with quantized linears: a file per layout."""
