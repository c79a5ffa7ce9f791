"""Prompt files, chat messages and grammars as text."""
