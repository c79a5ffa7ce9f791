"""Files named as ShareSD's top-level packages, where Python finds them first: one clear error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sharesd import shadowing
from tests.helpers.paths import ROOT

REMEDY = "rename it, or run from another folder"
SCRIPT = "import sharesd; print('imported', sharesd.__version__)"


def run(folder: Path, *arguments: str, path: tuple[Path, ...] = (ROOT,)) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder; `path` is its PYTHONPATH."""
    env, command = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}, [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def hide(folder: Path, name: str) -> Path:
    """Write a module of this name, or a package where the name ends in /."""
    if not name.endswith("/"):
        (folder / f"{name}.py").touch()
        return folder / f"{name}.py"
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    return folder / name


def is_refused(done: subprocess.CompletedProcess[str], file: Path) -> bool:
    """In one line."""
    said = done.stderr.startswith(f"error: {file} hides") and done.stderr.count("\n") == 1 and REMEDY in done.stderr
    return said and (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("name", ["quant", "compile", "offload/", "multigpu/"])
def test_an_import_names_the_file(name: str, tmp_path: Path) -> None:
    file = hide(tmp_path, name)
    done = run(tmp_path, "-c", SCRIPT)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and not done.stdout
    assert last.startswith(f"ImportError: {file} hides the package {name.rstrip('/')} of ShareSD") and REMEDY in last


@pytest.mark.parametrize("program", ["sharesd", "serve", "train", "benchmark"])
def test_a_program_says_it_in_one_line(program: str, tmp_path: Path) -> None:
    file = hide(tmp_path, "quant")
    done = run(tmp_path, "-m", program, "--help")
    assert is_refused(done, file), done


def test_the_console_command_says_it_in_one_line(tmp_path: Path) -> None:
    """It lies in a folder of its own, so that only PYTHONPATH brings such a file."""
    file, script = hide(tmp_path, "offload"), tmp_path / "bin/sharesd"
    script.parent.mkdir()
    script.write_text("from sharesd.cli.main import main\nraise SystemExit(main(['--version']))\n")
    done = run(tmp_path, str(script), path=(tmp_path, ROOT))
    assert is_refused(done, file), done
    assert run(tmp_path, str(script)).returncode == 0


def test_a_script_of_such_a_name_and_a_copy_of_one_package_are_named(tmp_path: Path) -> None:
    """A checkout of which one package lies elsewhere, too."""
    script = tmp_path / "quant.py"
    script.write_text(SCRIPT)
    done = run(tmp_path, str(script))
    assert done.returncode == 1 and f"ImportError: {script} hides the package quant" in done.stderr
    script.unlink()
    shutil.copytree(ROOT / "quant", tmp_path / "quant", ignore=shutil.ignore_patterns("__pycache__"))
    assert f"{tmp_path / 'quant'} hides" in run(tmp_path, "-c", SCRIPT).stderr


def test_names_that_sharesd_does_not_import_and_folders_without_modules_are_free(tmp_path: Path) -> None:
    for name in ("train", "serve", "benchmark", "tests", "quantize"):
        hide(tmp_path, name)
    (tmp_path / "compile").mkdir()  # ours has modules, and comes later on the path
    assert run(tmp_path, "-c", SCRIPT).stdout.startswith("imported")


def test_it_hides_what_an_editable_installation_finds(tmp_path: Path) -> None:
    """Its finder comes last: a bare folder in the working directory wins."""
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    (work / "compile").mkdir(parents=True)
    (site / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name in ('sharesd', 'sharesd_files', *{shadowing.LOWER!r}):\n"
        "            place = f'{name}.py' if name == 'sharesd_files' else f'{name}/__init__.py'\n"
        f"            return importlib.util.spec_from_file_location(name, {str(ROOT)!r} + '/' + place)\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()] + [Finder]\n"
    )
    done = run(work, "-m", "sharesd", "--version", path=(site,))
    assert done.returncode == 2 and done.stderr.startswith(f"error: {work / 'compile'} hides"), done.stderr
    assert run(tmp_path, "-m", "sharesd", "--version", path=(site,)).returncode == 0


def test_archives_and_links_are_no_strangers(tmp_path: Path) -> None:
    archive, link, links = (tmp_path / name for name in ("all.zip", "link", "links"))
    link.symlink_to(ROOT)
    links.mkdir()
    with zipfile.ZipFile(archive, "w") as packed:
        for name in ("sharesd", *shadowing.LOWER, "sharesd_files.py"):
            (links / name).symlink_to(ROOT / name)
            for file in (ROOT / name).glob("*.py") if (ROOT / name).is_dir() else [ROOT / name]:
                packed.write(file, file.relative_to(ROOT))
    for place in (archive, link, links):
        done = run(tmp_path, "-P", "-c", f"{SCRIPT}; print(sharesd.__file__)", path=(place,))
        assert done.stdout.startswith("imported") and str(place) in done.stdout, done.stderr
    assert shadowing.hidden((*shadowing.LOWER, *shadowing.PROGRAMS)) is None, "under pytest, from this checkout"
