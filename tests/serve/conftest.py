"""The server that most files here test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.served_model import Served, served


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server with a fake engine, by the module's SERVED (options) and SCRIPTS (what the engine says)."""
    with served(**getattr(request.module, "SERVED", {})) as running:
        running.engine.scripts |= getattr(request.module, "SCRIPTS", {})
        yield running
