"""Quantization, packing and offloading of weights, and memory estimates."""
