"""How far attention looks where it does not look at everything."""

CHUNK = 128
"""Slots that the CPU kernel sums up by themselves; where a draft looks back, it looks back to a multiple of this."""
SINKS = 32
"""First slots of a text, which drafts see even where they see only recent ones else: much weight rests on them."""
