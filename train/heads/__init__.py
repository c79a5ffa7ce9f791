"""`sharesd train eagle`, `eagle3`, `parallel`, `glide` and `draft`: what drafts learns from the frozen target's
hidden states, keys and values, and choices.
"""
