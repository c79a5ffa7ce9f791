"""The static KV cache. Imports only devices."""
