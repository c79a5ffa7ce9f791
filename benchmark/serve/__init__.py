"""`sharesd bench serve`: latency and throughput of any server with OpenAI's protocol."""
