"""Decoding loop: calls, requests, prefill, rounds, outputs and counts."""
