"""The console command `sharesd`: what it names, that help needs no torch, and that mistakes cost one line."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys

import pytest

import sharesd_command
from sharesd.cli import main as answering
from sharesd_command import COMMANDS, HELP, main
from tests.helpers.paths import ROOT


def run_python(code: str) -> str:
    """Output of a fresh interpreter, run from the repository root."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_help_fits_one_screen_and_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert main(argv) == 0
        assert capsys.readouterr().out == HELP + "\n"
    lines = HELP.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert all(sum(line.startswith(f"  {name} ") for line in lines) == 1 for name in COMMANDS)


def test_help_and_versions_come_without_torch() -> None:
    out = run_python(
        "import sys, sharesd_command\n"
        "assert not [name for name in sys.modules if name.startswith('sharesd.')]\n"
        "assert sharesd_command.main(['--help']) == sharesd_command.main(['--version']) == 0\n"
        "heavy = ('torch', 'transformers', 'numpy', 'benchmark', 'train', 'serve')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert out.endswith("[]\n") and out.splitlines()[-2].startswith("sharesd ")


def test_a_package_that_is_missing_does_not_hide_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise answering.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(answering.metadata, "version", version)
    assert answering.versions().endswith("torch not installed, transformers not installed")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["answer"], "unknown command 'answer'; see `sharesd --help`"),
        (["--bogus"], "unknown command '--bogus'; see `sharesd --help`"),
        (["bench"], "the following arguments are required: BENCHMARK; see `sharesd bench --help`"),
        (["generate", "a", "--bogus"], "unknown argument '--bogus'; see `sharesd generate --help`"),
        (["serve", "--bogus"], "unknown argument '--bogus'; see `sharesd serve --help`"),
        (["train", "corpus", "--out", "a", "--bogus"], "unknown argument '--bogus'; see `sharesd train corpus --help`"),
        (["bench", "mtbench", "--bogus"], "unknown argument '--bogus'; see `sharesd bench mtbench --help`"),
        (["tune", "--bogus"], "unknown argument '--bogus'; see `sharesd tune --help`"),
        (["verify", "--bogus"], "unknown argument '--bogus'; see `sharesd verify --help`"),
        (["cache", "info", "--bogus"], "unknown argument '--bogus'; see `sharesd cache info --help`"),
        (["verify", "--mode", "naive"], "--mode is only naive"),
    ],
)
def test_mistakes_cost_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(argv)
    except SystemExit as ended:  # argparse's own
        status = ended.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    ("argv", "usage"), [(["serve"], "sharesd serve"), (["verify"], "sharesd verify"), (["chat"], "sharesd chat")]
)
def test_help_names_the_command_that_was_typed(argv: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*argv, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {usage} [-h]")


@pytest.mark.parametrize("module", ["sharesd", "serve", "train", "benchmark"])
def test_modules_that_are_started_name_themselves(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith(f"usage: python -m {module} [-h]")


def test_nothing_imports_the_command() -> None:
    for package in ("sharesd", "serve", "train", "benchmark", "compile", "quant", "offload", "multigpu"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            taken = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            taken |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
            assert sharesd_command.__name__ not in taken, path


def test_the_reference_of_commands_is_what_the_parsers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of flags: `python scripts/cli_reference.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    reference = importlib.import_module("cli_reference")
    page = reference.page()
    assert page == reference.FILE.read_text(encoding="utf-8")
    assert all(f"## {command.name}\n" in page for command in reference.commands())
    anchors = {reference._anchor(line.removeprefix("## ")) for line in page.splitlines() if line.startswith("## ")}
    assert anchors >= set(re.findall(r"\]\(#([^)]*)\)", page))
