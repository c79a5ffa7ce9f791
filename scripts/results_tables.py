"""Tables of the documentation, made from the CSV files in docs/results.

    python scripts/results_tables.py                     write the tables into README.md and docs
    python scripts/results_tables.py --check             exit status 1 if a page is out of date
    python scripts/results_tables.py --add FOLDER... --host NAME [--date D] [--commit C]
                                                         add runs of `sharesd bench mtbench` to mtbench.csv, then write

A page holds `<!-- table: FILE.csv | COLUMN=VALUE, ... | COLUMN, ... -->` before a table and `<!-- /table -->` after it:
the rows of the file that have these values (`COLUMN=` keeps rows where it is empty), and the columns to show.
`COLUMN as HEADING` renames one. README.md holds `<!-- results -->` and `<!-- /results -->` around the table of
mtbench.csv: medians over the runs of its last date, and the least and the most of the speedups. `--add` also draws its
plot, docs/img/mtbench.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "docs" / "results"
MTBENCH = RESULTS / "mtbench.csv"
PLOT = ROOT / "docs" / "img" / "mtbench.png"
_TABLE = re.compile(r"(<!-- table: ([\w.-]+) \|([^|]*)\|([^>]*?)-->\n).*?(<!-- /table -->)", re.DOTALL)
_RESULTS = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)
Row = dict[str, str]


def read(file: Path) -> list[Row]:
    """The rows of a CSV file; ValueError for a missing file or a row of another length than the header."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist; name a file of {RESULTS}")
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines, restkey="?"))
    for number, row in enumerate(rows, 2):
        if "?" in row or None in row.values():
            raise ValueError(f"{file}:{number} has another number of fields than the header; quote fields with commas")
    return rows


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns of numbers are right-aligned."""
    numeric = [all(re.fullmatch(r"[\d.,]*(x.*)?", row[i]) for row in rows) for i in range(len(heads))]
    lines = [heads, ["---:" if right else "---" for right in numeric], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(file: Path, wanted: str, shown: str) -> str:
    """The rows of a file that a marker asks for; ValueError for an unknown column or no rows."""
    rows = read(file)
    for condition in filter(None, (part.strip() for part in wanted.split(","))):
        column, _, value = condition.partition("=")
        _known(file, rows, column)
        rows = [row for row in rows if row[column] == value]
    if not rows:
        raise ValueError(f"{file.name} has no row with {wanted.strip()}; mend the marker or add the row")
    columns = [part.strip().partition(" as ")[::2] for part in shown.split(",")]
    for column, _ in columns:
        _known(file, rows, column)
    heads = [heading or column.replace("_", " ") for column, heading in columns]
    return markdown(heads, [[row[column] for column, _ in columns] for row in rows])


def readme_table(rows: Sequence[Row]) -> str:
    """The table of README.md under a line of its conditions. The commands are in the file."""
    if not rows:
        return "No run is recorded yet in docs/results/mtbench.csv.\n"
    last = max(row["date"] for row in rows)
    rows = [row for row in rows if row["date"] == last]
    temperatures = sorted({float(row["temperature"]) for row in rows})
    heads, body = ["mode", "tok/s"], []
    for temperature in temperatures:
        heads += [f"speedup, T = {temperature:g}", f"tokens per round, T = {temperature:g}"]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        found = [row for row in rows if row["mode"] == mode]
        line = [f"`{mode}`", _median(found, temperatures[0], "tokens_per_second", ".1f")]
        for temperature in temperatures:
            line += [_spread(found, temperature), _median(found, temperature, "tokens_per_round", ".2f")]
        extra = max((float(row["extra_mb"]) for row in found if row["extra_mb"]), default=None)
        body.append([*line, "" if extra is None else f"{extra:.1f} MB" if extra else "0"])
    runs = set(Counter((row["mode"], row["temperature"]) for row in rows).values())
    hosts, commits = (", ".join(dict.fromkeys(row[name] for row in rows)) for name in ("host", "commit"))
    same = min(float(row["identical"]) for row in rows if row["identical"])
    texts = "All texts are identical to those of `naive`." if same == 1 else f"Identical texts: {same:.1%} at least."
    measured = "One run." if runs == {1} else f"Medians of {_range(sorted(runs))} runs (least to most)."
    conditions = f"Machine [{hosts}](docs/results/README.md), {last}, commit {commits}. {measured}\n{texts}\n"
    return f"{conditions}\n{markdown([*heads, 'extra memory'], body)}"


def rows_of(folder: Path, *, host: str, date: str | None, commit: str) -> list[Row]:
    """The rows of a `sharesd bench mtbench` folder, one for each mode and run; ValueError for an incomplete one."""
    from benchmark.questions import records
    from benchmark.questions.summary import summarize

    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if not found["status"]["complete"]:
        raise ValueError(f"{folder} lacks {found['status']['num_missing_turns']} turns; go on with --resume")
    command = re.sub(r"\s+--(out-dir|log-dir)[= ]\S+", "", found["settings"]["command"])
    turns = {mode: records.read(folder, mode) for mode in found["modes"]}
    rows = []
    for run in range(1, found["settings"]["runs"] + 1):
        timed = {mode: {key: turn for key, turn in each.items() if key[0] == run} for mode, each in turns.items()}
        if "naive" not in timed:
            raise ValueError(f"{folder} has no mode naive; run it with the others")
        figures = summarize(timed, list(timed["naive"]))
        for mode, each in figures.items():
            extra = found["modes"][mode]["extra_weight_bytes"] + found["modes"][mode]["extra_kv_bytes"]
            rows.append(
                {
                    "date": date or found["environment"]["date"][:10],
                    "host": host,
                    "commit": commit,
                    "command": command.replace("python -m benchmark", "sharesd bench"),
                    "mode": mode,
                    "temperature": f"{found['settings']['sampling']['temperature']:g}",
                    "run": str(run),
                    "tokens_per_second": f"{each['tokens_per_second']:.1f}",
                    "speedup": f"{each['speedup']:.3f}",
                    "tokens_per_round": f"{each['tau']:.3f}",
                    "extra_mb": f"{extra / 1e6:.1f}",
                    "identical": f"{each['identical_to_naive']:g}",
                }
            )
    return rows


def add(folders: Sequence[Path], *, host: str, date: str | None, commit: str | None) -> None:
    """Append runs to mtbench.csv; each gets the next free number of its date, mode and temperature."""
    commit = commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    rows = read(MTBENCH)
    for folder in folders:
        for row in rows_of(folder, host=host, date=date, commit=commit):
            same = [all(row[name] == other[name] for name in ("date", "mode", "temperature")) for other in rows]
            rows.append(row | {"run": str(1 + sum(same))})
    header = MTBENCH.read_text(encoding="utf-8").splitlines()[0].split(",")
    with MTBENCH.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def file_of(name: str) -> Path:
    """Return a file of docs/results, or of its archive."""
    return next((file for file in (RESULTS / name, RESULTS / "archive" / name) if file.exists()), RESULTS / name)


def pages() -> dict[Path, str]:
    """README.md and the pages of docs, as their tables say that they should be."""
    made = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        text = _TABLE.sub(lambda m: m[1] + table(file_of(m[2]), m[3], m[4]) + m[5], text)
        made[page] = _RESULTS.sub(lambda m: m[1] + readme_table(read(MTBENCH)) + m[2], text)
    return made


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the speedups of the README's table: medians as bars, the least and the most as lines."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["date"] == max(each["date"] for each in rows)]
    temperatures = sorted({float(row["temperature"]) for row in rows})
    greedy = [row for row in rows if float(row["temperature"]) == temperatures[0]]
    modes = sorted(
        dict.fromkeys(row["mode"] for row in greedy),
        key=lambda mode: median(_values([row for row in greedy if row["mode"] == mode], temperatures[0], "speedup")),
    )
    figure = Figure(figsize=(8, 0.6 + 0.36 * len(modes)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / len(temperatures)
    for number, temperature in enumerate(temperatures):
        colour = ("#0072B2", "#56B4E9")[min(number, 1)]
        axes.barh(0, 0, color=colour, label=f"T = {temperature:g}")
        for place, mode in enumerate(modes):
            found = _values([row for row in rows if row["mode"] == mode], temperature, "speedup")
            if not found:
                continue
            middle, y = median(found), place + height * ((len(temperatures) - 1) / 2 - number)
            axes.barh(y, middle, height, color=colour)
            axes.plot([min(found), max(found)], [y, y], color="#333333", linewidth=1)
            axes.text(max(found) + 0.02, y, f"{middle:.2f}x", va="center", fontsize=8)
    axes.axvline(1.0, color="#999999", linewidth=0.8)
    axes.set_yticks(range(len(modes)), modes)
    axes.set_xlabel("speed over plain decoding, same text")
    axes.spines[["top", "right"]].set_visible(False)
    if len(temperatures) > 1:
        axes.legend(frameon=False, loc="lower right")
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file)


def _known(file: Path, rows: Sequence[Row], column: str) -> None:
    if rows and column not in rows[0]:
        raise ValueError(f"{file.name} has no column {column!r}; it has {', '.join(rows[0])}")


def _values(rows: Sequence[Row], temperature: float, column: str) -> list[float]:
    return [float(row[column]) for row in rows if float(row["temperature"]) == temperature and row[column]]


def _median(rows: Sequence[Row], temperature: float, column: str, form: str) -> str:
    values = _values(rows, temperature, column)
    return format(median(values), form) if values else ""


def _spread(rows: Sequence[Row], temperature: float) -> str:
    values = _values(rows, temperature, "speedup")
    if not values:
        return ""
    spread = f" ({min(values):.2f} to {max(values):.2f})" if max(values) > min(values) else ""
    return f"{median(values):.2f}x{spread}"


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description="Tables of the documentation from docs/results/*.csv.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    parser.add_argument("--add", nargs="+", type=Path, metavar="FOLDER", help="runs of `sharesd bench mtbench`")
    parser.add_argument("--host", help="the machine of --add, as docs/results/README.md names it")
    parser.add_argument("--date", help="of --add, YYYY-MM-DD (default: the run's)")
    parser.add_argument("--commit", help="of --add (default: the checkout's)")
    args = parser.parse_args(argv)
    try:
        if args.add:
            if not args.host:
                raise ValueError("--add needs --host; name the machine as docs/results/README.md does")
            add(args.add, host=args.host, date=args.date, commit=args.commit)
            draw(read(MTBENCH), PLOT)
        made = pages()
    except (OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stale = [page for page, text in made.items() if page.read_text(encoding="utf-8") != text]
    for page in stale:
        if not args.check:
            page.write_text(made[page], encoding="utf-8")
        print(f"{'out of date' if args.check else 'written'}: {page.relative_to(ROOT)}")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
