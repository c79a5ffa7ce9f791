"""`sharesd bench peers`: other runtimes beside ShareSD, on the same prompts and token counts, timed by one clock."""
