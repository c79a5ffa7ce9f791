"""The static KV cache. Imports devices alone."""
