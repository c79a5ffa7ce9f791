"""Native decoder, checkpoints, GGUF, tokenizer, transformers fallback. Imports speculation and what is below."""
