"""`sharesd bench peers`: comparison of ShareSD with other runtimes.

All runtimes have the same prompts, token counts and clock.
"""
