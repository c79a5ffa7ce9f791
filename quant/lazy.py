"""The one place that imports hqq, gemlite and bitsandbytes: quietly, and when used (it takes seconds)."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from types import ModuleType


def lazy_import(name: str) -> ModuleType:
    """Import a module without what it prints and logs. ValueError saying what to install where it is missing."""
    quiet_before = logging.root.manager.disable
    logging.disable(max(quiet_before, logging.WARNING))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(name)
    except ImportError as error:
        raise _missing(name.partition(".")[0], error) from error
    finally:
        logging.disable(quiet_before)


def _missing(package: str, error: ImportError) -> ValueError:
    return ValueError(f"this quantization needs {package} ({error}); run: pip install {package}")
