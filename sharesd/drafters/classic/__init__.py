"""A second model drafts."""
