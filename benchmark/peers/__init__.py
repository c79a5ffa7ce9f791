"""`sharesd bench peers`: ShareSD and other runtimes, with equal prompts and clock."""
