"""Quantization formats, quantized linears and cached solutions.

The package imports no other package of the project.
"""
