"""Quantizing, packing and offloading of weights, and memory estimates. Imports engine and what is below."""
