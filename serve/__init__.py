"""An OpenAI-compatible server: HTTP on an event loop, one thread that decodes."""
