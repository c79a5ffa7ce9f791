"""A start, in its order: resolve the options, load the target, compile its steps, warm up.

Imports every package but the CLI.
"""
