"""Handlers of HTTP routes: one file per API, with the schemas that only it uses."""
