"""Native decoder, checkpoints, GGUF, tokenizer, transformers fallback.

Imports speculation and the rooms below it.
"""
