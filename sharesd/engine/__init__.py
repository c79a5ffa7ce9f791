"""Decoding loop: requests, prefill, rounds, outputs and statistics.

Imports drafters and lower packages.
"""
