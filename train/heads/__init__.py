"""`python -m train eagle`, `eagle3` and `glide`: heads that learn from the frozen target's hidden states and logits."""
