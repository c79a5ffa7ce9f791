"""Draft trees, the draft policy, acceptance statistics and costs."""
