"""Commands, options and console output.

The package may import every other subpackage of `sharesd`. No other subpackage may import `sharesd.cli`.
"""
