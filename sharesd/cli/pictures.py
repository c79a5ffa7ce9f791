"""Check for matplotlib, which all pictures need."""

from __future__ import annotations

from sharesd.cli.console import err_console


def can_draw(*names: str) -> bool:
    """Return True if matplotlib is installed, else print its installation command."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        hint = f"{' and '.join(names)}: not drawn, matplotlib is not installed; run: pip install matplotlib"
        err_console.print(hint, markup=False, highlight=False, soft_wrap=True)
        return False
    return True
