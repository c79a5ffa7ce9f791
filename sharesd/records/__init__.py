"""What a run writes about itself: traces of rounds, and KV of prompts for later starts."""
