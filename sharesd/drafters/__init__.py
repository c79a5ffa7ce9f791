"""Drafters, a folder each, and shared parts of heads and tables."""
