"""Compiled steps, their widths, batch invariance, and kernel choice.

Imports weights and lower packages.
"""
