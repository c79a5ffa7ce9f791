"""Drafters that are prepared before they are used."""
