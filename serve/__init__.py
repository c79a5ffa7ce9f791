"""OpenAI-compatible server: HTTP on an event loop, one thread that decodes.

The engine thread loads the engine and alone touches it. It takes requests from its inbox, steps, and sends the event
loop one message per round. The event loop does everything else; prompts are encoded on other threads.

`Service` hands out places, as many as `--max-batch` and `--max-queue` allow. A `Call` carries all choices of one HTTP
request from its place to its last token. `Gate` wraps every request and closes its call however the request ends, so
that no handler leaves a row behind.
"""
