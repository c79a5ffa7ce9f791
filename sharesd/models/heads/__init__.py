"""Trained heads: small modules that guess the target's next tokens from its hidden states."""
