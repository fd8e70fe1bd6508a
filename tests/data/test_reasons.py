"""Rejects by kind: what people read of many."""

from __future__ import annotations

import csv
import io

import pytest

from sana_pipe.base.amounts import amount
from sana_pipe.data.sources.reject_kinds import EXAMPLES, KINDS, OTHERS, SHOWN, Kinds, cell, examples, kind


@pytest.mark.parametrize(
    ("item", "reason", "expected"),
    [
        ("a/my cat.jpg", "has no caption: no my cat.txt beside it", "has no caption: no *.txt beside it"),
        ("x.jpg", "has no usable caption: x.txt is empty", "has no usable caption: *.txt is empty"),
        ("x.jpg", "unreadable: sub/x.jpg: Permission denied", "unreadable: *: Permission denied"),
        ("a/my cat.jpg", "unreadable: my cat.jpg: gone", "unreadable: *: gone"),
        ("a b/my cat.jpg", "unreadable: a b/my cat.jpg: gone", "unreadable: *: gone"),
        ("a b/my cat.jpg", "has no usable caption: a b/my cat.txt is empty", "has no usable caption: *.txt is empty"),
        ("s.tar/1.jpg", "its .json has only 'prompt', 'w'", "its .json has only 'prompt', 'w'"),
        ("m.csv:5", "names 'far away.jpg', which does not exist", "names *, which does not exist"),
        ("a", "512x300 = 153,600 pixels, more than max_pixels = 1,000", "N = N pixels, more than max_pixels = 1,000"),
        ("a", "is not UTF-8 (byte 17)", "is not UTF-8 (byte N)"),
        ("a", "the shorter side is below data.min_side = 41", "the shorter side is below data.min_side = 41"),
        ("a", "enlarged by more than data.max_upscale = 1.2", "enlarged by more than data.max_upscale = 1.2"),
        ("a", "(--set data.caption_field=caption.raw) of 1.jpg", "(--set data.caption_field=caption.raw) of *"),
        ("a", "(--set 'data.caption_field=my text')", "(--set 'data.caption_field=my text')"),
        ("a", "has none (data.pictures.mask.suffix: -m)", "has none (data.pictures.mask.suffix: -m)"),
    ],
)
def test_a_kind_is_the_reason_without_what_is_of_one_item(item: str, reason: str, expected: str) -> None:
    assert kind(item, reason) == expected


def test_a_million_rejects_are_a_few_lines() -> None:
    many = Kinds.of((f"dir/{i} a.jpg", f"has no caption: no {i} a.txt beside it") for i in range(10_000))
    assert many.counts == {"has no caption: no *.txt beside it": 10_000}
    assert list(many.examples.values()) == [[f"dir/{i} a.jpg" for i in range(EXAMPLES)]]
    assert len(many.lines()) == 1
    odd = Kinds.of((f"{i}", "cause " + "x" * i) for i in range(300) for _ in range(i))
    assert len(odd.counts) == KINDS + 1
    assert sum(odd.counts.values()) == 300 * 299 // 2
    assert max(odd.counts.values()) == odd.counts[OTHERS] != odd.counts["cause " + "x" * 299] == 299
    assert len(odd.lines()) == SHOWN + 1
    assert len(odd.examples[OTHERS]) == EXAMPLES


def test_items_of_a_kind_stand_on_one_line() -> None:
    assert examples(["a.png", "b\n.png"], 2) == "a.png, b\\n.png"
    assert examples(["a.png", "b.png"], 3) == "a.png, b.png, ..."
    assert examples(["x" * 60, "y" * 61], 2) == f"{'x' * 60}, {'y' * 57}..."
    lines = Kinds.of((f"{i}.png", f"cause {'abcdefghijklmnopqrstuvwxyz'[i % 25]}") for i in range(60)).lines()
    assert lines[0] == "       3  cause a\n          0.png, 25.png, 50.png"
    assert lines[-1] == "      10  for 5 other reasons"


def test_no_cell_is_a_formula() -> None:
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"):
        sheet = io.StringIO()
        csv.writer(sheet).writerow([cell(text)])
        [[back]] = csv.reader(io.StringIO(sheet.getvalue(), newline=""))
        assert back == "'" + text
    assert cell("a=1.png") == "a=1.png"


def test_amounts_show_what_is_there() -> None:
    result = [amount(n) for n in (0, 1, 1023, 1024, 1_800_000, 3 << 30, 5 << 40)]
    assert result == ["0 B", "1 B", "1023 B", "1.0 KiB", "1.7 MiB", "3.0 GiB", "5.00 TiB"]
