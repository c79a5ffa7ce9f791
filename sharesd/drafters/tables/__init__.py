"""Shared parts of tables; the tables that ship."""
