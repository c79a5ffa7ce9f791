"""`python -m train eagle` and `eagle3`: heads that learn from the frozen target's hidden states and logits."""
