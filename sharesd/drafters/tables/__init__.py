"""Drafters without a model: tables on the host that guess from what was seen before, and learn as the text grows."""
