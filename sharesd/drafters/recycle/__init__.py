"""A table of likely successors, fed by the target's logits."""
