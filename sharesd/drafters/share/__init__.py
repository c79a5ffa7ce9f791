"""The target drafts with its quantized linears."""
