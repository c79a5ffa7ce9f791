"""Inputs that go wrong today, or once did: strict expected failures turn into tests when they are fixed."""
