"""`python -m sharesd`, and what other command lines share with it."""
