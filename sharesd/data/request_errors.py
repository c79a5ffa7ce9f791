"""Errors that end a single request, without imports that take time."""

from __future__ import annotations


class RequestError(Exception):
    """Error that ends one request in the middle of its answer; others continue."""

    code = "request_failed"
    """Code of the error in answers of the server and of batch files."""


class GrammarTooComplex(RequestError, ValueError):
    """Raised for a grammar beyond the limits of the grammar engine, at its start or after the text so far."""

    code = "grammar_too_complex"


class NoTokenAllowed(RequestError, ValueError):
    """Raised for a request whose grammar, bias and minimum length together exclude every next token."""

    code = "no_token_allowed"


class NonFiniteLogits(RequestError, ArithmeticError):
    """Raised for a request whose logits are not numbers.

    They have NaN or infinity, or no finite one, so that no token can be chosen.
    """

    code = "logits_not_numbers"
