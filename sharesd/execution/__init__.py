"""Compiled steps, their widths, batch invariance, kernel choice. Imports weights and what is below."""
