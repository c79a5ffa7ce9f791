"""Drafters, a folder each, and the shared parts of heads and tables. Imports sampling and what is below."""
