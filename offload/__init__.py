"""Offloading: plans, block files, and prefetching through links.

The package imports no other package of the project.
"""
