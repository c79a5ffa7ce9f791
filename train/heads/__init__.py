"""`python -m train eagle`, `eagle3`, `parallel` and `draft`: what drafts learns from the frozen target's hidden states
and choices.
"""
