"""OpenAI-compatible server: HTTP on an event loop, decoding on one thread.

The engine thread alone uses the engine. It takes commands from its inbox, steps, and sends the event loop one message
per round. The event loop does everything else. Prompts are encoded on worker threads.

`Service` admits as many choices as `--max-batch` and `--max-queue` allow. A `Call` holds all choices of one request
from admission to the last token. `Middleware` wraps every request and closes its call however the request ends.
"""
