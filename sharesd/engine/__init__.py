"""The decoding loop: requests, prefill, rounds, outputs, statistics. Imports drafters and what is below."""
