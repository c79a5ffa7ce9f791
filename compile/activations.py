"""Activations of gated MLPs, named as in Hugging Face configs.

Imports no torch.
"""

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""Names, in the order of the numbers in cpu/decoder_stack.h."""
