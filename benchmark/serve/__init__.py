"""`sharesd bench serve`: latency and throughput of a server under load.

The server may be any with OpenAI's protocol.
"""
