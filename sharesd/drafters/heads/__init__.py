"""Shared parts of trained heads; the heads that ship."""
