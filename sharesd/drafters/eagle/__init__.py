"""EAGLE, EAGLE-2 and EAGLE-3 heads."""
