"""Quantization, packing and offloading of weights, and memory estimates.

Imports engine and lower packages.
"""
