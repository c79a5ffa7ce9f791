"""Decoding loop: requests, prefill, rounds, outputs and statistics."""
