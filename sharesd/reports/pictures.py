"""Style of all plots, and the check for matplotlib, which they need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sharesd.cli.console import err_console, print_line
from sharesd_files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def can_draw(*names: str) -> bool:
    """Return True if matplotlib is installed, else print its installation command."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        hint = f"{' and '.join(names)}: not drawn, matplotlib is not installed; run: pip install matplotlib"
        print_line(hint, err_console)
        return False
    return True


def finish(axes: Axes, title: str, y_label: str = "") -> None:
    """Set title and label, with light lines behind the data."""
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(y_label)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)


def save(path: Path, figure: Figure) -> None:
    """Write a plot as PNG, atomically."""
    with atomic_path(path) as fresh:
        figure.savefig(fresh, format="png")
