"""Tool calls and reasoning: how a model writes them, parsers of answers, grammars that force them."""
