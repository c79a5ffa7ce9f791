"""Quantization: formats, quantized linears, and cached solutions. Imports no other package of the project."""
