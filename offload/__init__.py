"""Offloading: plans, files of blocks, and prefetching through links. Imports no other package of the project."""
