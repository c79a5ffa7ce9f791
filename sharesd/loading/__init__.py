"""Resolution of options, and loading of models.

Imports every package but the CLI.
"""
