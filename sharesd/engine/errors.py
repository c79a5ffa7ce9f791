"""Errors of requests, without imports that take time."""


class NonFiniteLogits(ArithmeticError):
    """Raised for a request whose logits are not numbers.

    They have NaN or infinity, or no finite one, so that no token can be chosen.
    """
