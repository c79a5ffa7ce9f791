"""Errors of requests, without imports that take time."""

from sharesd.data.request_errors import RequestError


class NonFiniteLogits(RequestError, ArithmeticError):
    """Raised for a request whose logits are not numbers.

    They have NaN or infinity, or no finite one, so that no token can be chosen.
    """

    code = "logits_not_numbers"
