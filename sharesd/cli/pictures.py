"""Pictures, which need matplotlib: the one place that looks for it."""

from __future__ import annotations

from sharesd.cli.console import err_console


def can_draw(*names: str) -> bool:
    """True with matplotlib; else one line on stderr that names the pictures and the command that installs it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        hint = f"{' and '.join(names)}: not drawn, matplotlib is not installed; run: pip install matplotlib"
        err_console.print(hint, markup=False, highlight=False, soft_wrap=True)
        return False
    return True
