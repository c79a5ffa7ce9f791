"""Compiled steps, their widths, batch invariance, and kernel choice."""
