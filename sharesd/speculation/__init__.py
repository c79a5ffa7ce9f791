"""Draft trees, the draft policy, acceptance statistics and costs.

Imports kvcache and lower packages.
"""
