"""Training prompts, answers of the target, and datasets of them."""
