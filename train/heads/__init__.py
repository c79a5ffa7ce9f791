"""Training of draft heads and draft decoders on a frozen target.

The teacher's signals are hidden states, keys and values, and the distribution over draft tokens.
"""
