"""Prompt files, chat messages and grammars as text.

Imports no other package of ShareSD.
"""
