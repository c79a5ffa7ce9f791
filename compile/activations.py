"""Activations of gated MLPs, named as in Hugging Face configs.

Imports no torch.
"""

SWIGLU_OAI = "swiglu_oai"
"""min(gate, 7) * sigmoid(1.702 gate), times 1 + up within -7 and 7; gpt-oss has it under the name of silu."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", SWIGLU_OAI)
"""Names, in the order of the numbers in cpu/decoder_stack.h."""
