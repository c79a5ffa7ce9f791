"""GLIDE heads, which attend to the target's KV."""
