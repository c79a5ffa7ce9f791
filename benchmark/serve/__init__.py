"""`sharesd bench serve`: load for any server that speaks OpenAI's protocol, and the times of its answers.

`workload.py` says what is asked, `arrivals.py` when, `client.py` reads one answer, `load.py` asks all, and `figures.py`
makes numbers of them, in vLLM's definitions. `spawn.py` starts our own server, mode after mode, to be compared.
"""

from benchmark.serve.command import add_parser, run

__all__ = ["add_parser", "run"]
