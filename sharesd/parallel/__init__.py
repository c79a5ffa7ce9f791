"""Pipeline stages and tensor parallelism inside one runtime.

Imports weights and lower packages.
"""
