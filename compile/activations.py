"""Activations of gated MLPs, by the names of Hugging Face configs; imports no torch."""

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""In the order of the numbers in cpu/decoder_stack.h."""
