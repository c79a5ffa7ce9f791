"""Files that users give: records of JSON Lines and of JSON lists, lines of text, and where a mistake is."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sharesd.data.json_lines import read_text, records, text_lines

LINES = '\ufeff{"a": 1}\r\n\n  \n"x\u2028y"\n'.encode()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_lines_and_lists_hold_the_same_records(tmp_path: Path, pack) -> None:
    lines, one = tmp_path / "lines", tmp_path / "list"
    lines.write_bytes(pack(LINES))
    one.write_bytes(pack('\ufeff \n[{"a": 1},\n"x\u2028y"]\n'.encode()))
    assert records(lines) == [(f"{lines}:1", {"a": 1}), (f"{lines}:4", "x\u2028y")]
    assert records(one) == [(f"{one}, record 1", {"a": 1}), (f"{one}, record 2", "x\u2028y")]
    assert text_lines(lines) == [(f"{lines}:1", '{"a": 1}'), (f"{lines}:4", '"x\u2028y"')]
    assert read_text(lines) == '{"a": 1}\n\n  \n"x\u2028y"\n'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{}\n{1}", ":2: not JSON (Expecting property name enclosed in double quotes at column 2); write one JSON"),
        (
            b"[{},\n\n {]",
            ":3: not JSON (Expecting property name enclosed in double quotes at column 3); write one JSON",
        ),
        (b"[1]\n[2]", ":2: not JSON (Extra data at column 1)"),
        (b"{}\n" + b"9" * 5000, ":2: not JSON that can be read (Exceeds the limit"),
        (b"[" * 100_000, ":1: not JSON that can be read (maximum recursion depth"),
        (b"\xef\xbb\xbf\xff", ":1: byte 1 (0xff) is not UTF-8; save the file as UTF-8"),
        (b"{}\n\n[\xe4", ":3: byte 2 (0xe4) is not UTF-8"),
        ("{}".encode("utf-16-le"), ":1: byte 2 is zero, as in UTF-16 or a binary file; save the file as UTF-8"),
        ("[]\n{}".encode("utf-16-be"), ":1: byte 1 is zero"),
        (gzip.compress(b"{}\n\0", mtime=0), ":2: byte 1 is zero"),
        (b"\x1f\x8b", ": not a whole gzip file ("),
    ],
)
def test_a_mistake_has_its_place(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        records(path)
    assert str(error.value).startswith(f"{path}{says}") and "\n" not in str(error.value)
