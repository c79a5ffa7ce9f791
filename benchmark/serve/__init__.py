"""`sharesd bench serve`: load for any server that speaks OpenAI's protocol; latency and throughput of its answers."""
