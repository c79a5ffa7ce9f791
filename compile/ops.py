"""The namespace in which this package registers its operators with torch, so that Inductor can call them."""

from torch.library import Library

LIBRARY = Library("sharesd", "DEF")
