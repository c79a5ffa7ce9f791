"""N-gram lookup in the text so far."""
