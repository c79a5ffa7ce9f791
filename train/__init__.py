"""Preparation of drafters: tables, corpora, and trained heads."""
