"""`bucket.metadata`: a table from beside is joined to pictures, stored, repeated, checked, taken down."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import sana_pipe.stages.bucket
import sana_pipe.stages.forget
import sana_pipe.stages.gc
import sana_pipe.stages.push
import sana_pipe.stages.snapshots
from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.cli import cli
from sana_pipe.config import Config
from sana_pipe.data.cache import audit, layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.snapshots import metadata_table, takedown_check
from tests.support.messages import naming
from tests.support.synthetic import Picture, add, config


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source of folders with 20 pictures, and one with the same file, another of an equal name, and a reject."""
    root = tmp_path_factory.mktemp("metadata") / "cache"
    every = [Picture(f"{n % 2}/{n:03d}.png", f"{n}", meta={"score": n, "own": "x"}) for n in range(20)]
    add(config(root), "one", every)
    two = [Picture("003.png", "3"), Picture("9/004.png", "another"), Picture("bad.png", "bad", reject="broken")]
    add(config(root), "two", two)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "cache"))


def write(root: Path, rows: list[dict[str, Any]], ending: str = "jsonl") -> str:
    file = root.parent / f"scores.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif ending == "csv":
        names = list(rows[0])
        lines = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
        file.write_text("".join(",".join(line) + "\n" for line in lines))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def with_table(root: Path, file: str, key: str, *more: str) -> Config:
    return config(root, f"bucket.metadata={json.dumps(file)}", f"bucket.metadata_key={key}", *more)


def report(of: Config, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    capsys.readouterr()
    sana_pipe.stages.bucket.run(of, as_json=True, **options)
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def items(of: Config, name: str = "latest") -> set[str]:
    snapshot = Cache(of.cache).open_snapshot(name)
    return {": ".join(snapshot.source_item(row)) for row in range(len(snapshot))}


def keyed(form: str, n: int) -> str:
    item = f"{n % 2}/{n:03d}.png"
    return {
        "item": item if n % 3 else f"one: {item}",
        "file name": f"{n:03d}.png",
        "file name stem": f"{n:03d}",
        "digest": layout.digest(f"{n}").hex().upper() if n % 2 else layout.digest(f"{n}").hex(),
    }[form]


@pytest.mark.parametrize("form", ["item", "file name", "file name stem", "digest"])
@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_rows_are_joined_by_every_kind_of_key(
    root: Path, capsys: pytest.CaptureFixture[str], form: str, ending: str
) -> None:
    """Every odd value is high. 3 is also a file of the other source, 4 the name of another picture there."""
    rows = [{"id": keyed(form, n), "quality": n % 2 * 100} for n in range(20)]
    of = with_table(root, write(root, rows, ending), "id", "bucket.filter=quality > 50")
    shown = report(of, capsys)["metadata"]
    wanted = {f"one: 1/{n:03d}.png" for n in range(1, 20, 2)}
    assert items(of) == wanted | ({"two: 003.png"} if form != "item" else set())
    assert (shown["by"], shown["rows"], shown["pictures"]) == (form, 20, 22)
    several = form in ("file name", "file name stem")
    assert shown["keys_of_several"]["examples"] == ([keyed(form, 4)] if several else [])
    assert shown["matched"] == {"item": 20, "digest": 21}.get(form, 20)


def test_what_does_not_fit_is_counted_and_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["0/000.png", "0/000.png", "1/001.png", "nobody.png", "two: bad.png"]
    rows: list[dict[str, Any]] = [{"item": name, "score": 50 + n, "new": n} for n, name in enumerate(names)]
    file = write(root, [*rows, {"new": 1}])
    of = config(root, f"bucket.metadata={file}", "bucket.filter=score >= 50")
    shown = report(of, capsys)["metadata"]
    assert items(of) == {"one: 0/000.png", "one: 1/001.png"}
    assert (shown["matched"], shown["pictures"], shown["rows_without_key"]) == (2, 22, 1)
    assert shown["pictures_without_row"]["count"] == 20 and shown["pictures_without_row"]["examples"][0] == "0/002.png"
    assert shown["keys_without_picture"] == {"count": 1, "examples": ["nobody.png"]}
    assert shown["repeated_keys"] == {"count": 1, "examples": ["0/000.png"]}
    assert shown["replaced"] == ["score"]
    sana_pipe.stages.bucket.run(of)
    out = capsys.readouterr().out
    assert "nobody.png" in out and "2 of 22 pictures have a row" in out and "score" in out


def test_the_first_row_of_a_key_counts_and_own_values_stay_where_the_table_has_none(root: Path) -> None:
    rows = [
        {"item": "0/000.png", "score": None, "tag": "first"},
        {"item": "0/000.png", "score": 99, "tag": "second"},
        {"item": "1/001.png", "score": 77, "tag": None},
    ]
    of = config(root, f"bucket.metadata={write(root, rows)}", "bucket.filter=tag = 'first' AND score = 0 OR score = 77")
    sana_pipe.stages.bucket.run(of)
    assert items(of) == {"one: 0/000.png", "one: 1/001.png"}


def test_columns_work_in_groups_and_filters_of_a_source(root: Path) -> None:
    file = write(root, [{"id": f"{n:03d}.png", "artist": f"a{n % 5}"} for n in range(20)], "csv")
    of = with_table(root, file, "id", "bucket.group=artist", "bucket.heldout=0.5", "bucket.filter=artist <> 'a4'")
    sana_pipe.stages.bucket.run(of)
    sides = [{int(item[-7:-4]) % 5 for item in items(of, name)} for name in ("latest", "latest.heldout")]
    assert sides[0] and sides[1] and not sides[0] & sides[1] and 4 not in sides[0] | sides[1]
    of = with_table(root, file, "id", "bucket.sources={one: {filter: \"artist = 'a1'\"}, two: {weight: 0}}")
    sana_pipe.stages.bucket.run(of)
    assert items(of) == {f"one: {n % 2}/{n:03d}.png" for n in (1, 6, 11, 16)}


def test_keys_and_values_of_a_csv_stay_as_they_are_written(root: Path) -> None:
    rows = [{"id": "1.50", "day": "03/01/2024"}, {"id": "2.00", "day": "04/01/2024"}]
    table = metadata_table.opened([Cache(root)], write(root, rows, "csv"), "id")
    assert table.rows.column("key").to_pylist() == ["1.50", "2.00"]
    assert [json.loads(row) for row in table.rows.column("row").to_pylist()] == rows


def test_a_table_that_names_no_picture_names_the_column_that_would(root: Path) -> None:
    rows = [{"number": n, "stem": f"{n:03d}", "quality": 1} for n in range(20, 0, -1)]
    file = write(root, rows)
    for key, what in (("number", "'number'"), ("itm", "'itm'")):
        with pytest.raises(UserError, match=naming("bucket.metadata_key=stem", "0/000.png", what)):
            sana_pipe.stages.bucket.run(with_table(root, file, key))
    with pytest.raises(UserError, match=naming("bucket.metadata_key=COLUMN", "nowhere")):
        sana_pipe.stages.bucket.run(config(root, f"bucket.metadata={write(root, [{'item': 'nowhere'}])}"))
    assert Cache(root).snapshot_of("latest") is None


def test_a_snapshot_names_its_table_and_is_made_again_without_the_file(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `--like`, by the command that `snapshots show` prints, and in a copy of the cache."""
    file = write(root, [{"id": f"{n:03d}", "quality": n} for n in range(20)], "csv")
    of = with_table(root, file, "id", "bucket.filter=quality > 9")
    dry = report(of, capsys, dry_run=True)
    assert dry["metadata"]["matched"] == 20 and not list(root.glob("tables/*/" + dry["metadata"]["table"] + "*"))
    first = sana_pipe.stages.bucket.run(of, name="one")
    table = Cache(root).open_snapshot("one").head.metadata
    assert table == dry["metadata"]["table"]
    assert sana_pipe.stages.bucket.run(of) == first
    Path(file).unlink()
    sana_pipe.stages.bucket.run(config(root))
    capsys.readouterr()
    sana_pipe.stages.snapshots.show(config(root), "one")
    command = capsys.readouterr().out.rpartition("to make it again: ")[2].split()
    assert f"bucket.metadata={table}" in command and "bucket.metadata_key=id" in command
    copied = root.parent / "copy"
    shutil.copytree(root, copied)
    for place in (root, copied):
        heads = [Cache(place).open_snapshot(first).head]
        again = with_table(place, str(table), "id", "bucket.filter=quality > 9")
        for of, like in ((config(place), "one"), (again, None)):
            heads.append(Cache(place).open_snapshot(sana_pipe.stages.bucket.run(of, like=like)).head)
        assert len({head.without_history for head in heads}) == 1 and heads[0].options == heads[1].options
        assert heads[1] == heads[2] and heads[1].metadata == table
    third = config(root.parent / "third", "bucket.filter=quality > 9")
    add(third, "three", [Picture("019.png", "three")])
    both = [
        f"bucket.caches=[{root}]",
        f"bucket.metadata={table}",
        "bucket.metadata_key=id",
        "bucket.filter=quality > 9",
    ]
    sana_pipe.stages.bucket.run(config(root.parent / "third", *both))
    assert items(third) == {f"one: {n % 2}/{n:03d}.png" for n in range(10, 19)}, "19 is the name of two pictures"
    assert Cache(third.cache).table(str(table)).num_rows == 20 and not list(audit.verify(Cache(third.cache)))
    with pytest.raises(CacheError, match=naming("0" * 32, "bucket.metadata")):
        sana_pipe.stages.bucket.run(with_table(root, "0" * 32, "id"))


def test_the_command_takes_a_table_and_like_refuses_another(root: Path, tmp_path: Path) -> None:
    file = write(root, [{"id": f"{n:03d}", "quality": n} for n in range(20)])
    given = tmp_path / "file.yaml"
    given.write_text(config(root).model_dump_json())
    command = ["bucket", "--config", str(given)]
    runner = CliRunner()
    made = runner.invoke(
        cli, [*command, "--name", "one", "--metadata", file, "--key", "id", "--filter", "quality > 17"]
    )
    assert made.exit_code == 0 and items(config(root), "one") == {"one: 0/018.png", "one: 1/019.png"}, made.output
    again = runner.invoke(cli, [*command, "--like", "one", "--metadata", file, "--key", "id"])
    assert again.exit_code == 0 and "nothing differs" in again.output, again.output
    other = str(Path(shutil.copy(file, tmp_path / "other.jsonl")))
    Path(other).write_text(Path(file).read_text() + '{"id": "more"}\n')
    refused = runner.invoke(cli, [*command, "--like", "one", "--metadata", other, "--key", "id"])
    assert isinstance(refused.exception, UserError) and "bucket.metadata" in str(refused.exception)
    assert runner.invoke(cli, [*command, "--key", "id"]).exit_code == 2
    assert runner.invoke(cli, [*command, "--pack", "--snapshot", "one", "--metadata", file]).exit_code == 2


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.jsonl", '{"item": "x"}\n{"item": \n', "line 3"),
        ("a.jsonl", "[1, 2]\n", "object"),
        ("a.csv", "item,score\n0/000.png,1\n0/002.png,1,2\n" + "0/004.png,1\n" * 30, "a.csv"),
        ("a.parquet", "no parquet", "a.parquet"),
        ("a.xlsx", "", ".parquet, .csv, .tsv, .jsonl"),
        ("missing.csv", None, "no such file"),
        ("s3://bucket/a.csv", None, "disk"),
    ],
)
def test_a_file_that_is_no_table_is_refused(root: Path, name: str, content: str | None, found: str) -> None:
    file = str(root.parent / name) if "://" not in name else name
    if content is not None:
        Path(file).write_text(content)
    of = config(root)
    of = of.model_copy(update={"bucket": of.bucket.model_copy(update={"metadata": file})})
    with pytest.raises(UserError, match=naming(found, name.rpartition("//")[2])):
        sana_pipe.stages.bucket.run(of)
    assert Cache(root).snapshot_of("latest") is None


def test_verify_finds_a_damaged_or_lost_table_and_gc_keeps_what_snapshots_need(root: Path) -> None:
    rows = [{"item": f"{n % 2}/{n:03d}.png", "quality": n} for n in range(20)]
    sana_pipe.stages.bucket.run(config(root, f"bucket.metadata={write(root, rows)}"), name="one")
    sana_pipe.stages.bucket.run(config(root, f"bucket.metadata={write(root, rows[:9])}"), name="two")
    cache = Cache(root)
    tables = [Paths.table(str(cache.open_snapshot(name).head.metadata), "parquet") for name in ("one", "two")]
    cache.forget_name("two")
    sana_pipe.stages.bucket.run(config(root))
    sana_pipe.stages.gc.run(config(root), yes=True, older_than_hours=0)
    assert [(root / table).exists() for table in tables] == [True, False]
    assert not list(audit.verify(Cache(root)))
    sana_pipe.stages.push.run(config(root), str(root.parent / "pushed"), snapshot="one", license="cc0-1.0")
    pushed = Cache(root.parent / "pushed")
    assert pushed.open_snapshot("one").head.metadata in tables[0] and not pushed.files.has_file(tables[0])
    assert not list(audit.verify(pushed)), "without sources nothing is joined with it"
    add(config(pushed.root), "theirs", [Picture("other.png", "other")])
    assert not list(audit.verify(Cache(pushed.root))), "its sources are not here"
    path = root / tables[0]
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    assert [finding.path for finding in audit.verify(Cache(root))] == [tables[0]]
    for lost in (path, root / Paths.copy(tables[0])):
        lost.unlink()
    findings = list(audit.verify(Cache(root)))
    assert {finding.path for finding in findings} == {tables[0], Paths.copy(tables[0])}
    assert all("--metadata FILE" in str(finding.fix) for finding in findings)


@pytest.mark.parametrize("form", ["item", "file name", "file name stem", "digest"])
def test_a_picture_that_leaves_leaves_the_table(root: Path, form: str) -> None:
    """Its row goes from the table of each named snapshot; the others stay, and rules are used again on what is left."""
    rows = [{"id": keyed(form, n), "quality": n} for n in range(5, 20)]
    file = write(root, rows)
    of = with_table(root, file, "id", "bucket.filter=quality < 18")
    sana_pipe.stages.bucket.run(of, name="one")
    before = str(Cache(root).open_snapshot("one").head.metadata)
    sana_pipe.stages.forget.run(config(root), items=("one: 1/007.png", "one: 1/019.png"))
    cache = Cache(root)
    after = str(cache.open_snapshot("one").head.metadata)
    left = [json.loads(row)["quality"] for row in cache.table(after).column("row").to_pylist()]
    assert left == [n for n in range(5, 20) if n not in (7, 19)]
    assert not list(root.rglob(f"{before}*")), "the table before"
    assert not list(takedown_check.remains(cache))
    assert "one: 1/007.png" not in items(config(root), "one")
    again = sana_pipe.stages.bucket.run(config(root), like="one")
    assert items(config(root), again) == items(config(root), "one")
    if form == "digest":
        sana_pipe.stages.bucket.run(of)  # the file still has the rows
        assert Cache(root).open_snapshot().head.metadata == after
        cache.put_table(pa.Table.from_pylist([{"key": keyed(form, 7), "row": "{}"}], metadata_table.SCHEMA))
        assert [finding.path[:7] for finding in takedown_check.remains(cache)] == ["tables/", "copies/"]


# ---------------------------------------------------------------- types, as of a source's own metadata


def odd(shown: dict[str, Any], field: str) -> list[str]:
    return [note for note in shown["notes"] if repr(field) in note]


def test_text_of_a_csv_that_is_a_number_is_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One odd value among 200 is missing, counted, and named once."""
    every = [Picture(f"{n:04d}.jpg", f"many {n}") for n in range(200)]
    add(config(root), "many", every)
    rows = [{"item": p.item, "value": "n/a" if n == 150 else f"{n / 10}"} for n, p in enumerate(every)]
    of = config(root, f"bucket.metadata={write(root, rows, 'csv')}", "bucket.filter=value >= 9")
    shown = report(of, capsys)
    assert items(of) == {f"many: {n:04d}.jpg" for n in range(90, 200) if n != 150}
    [note] = odd(shown, "value")
    assert "1 of 200" in note and "n/a" in note and "0150.jpg" in note


def test_lists_and_structs_of_parquet_are_fields(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a table of JSON lines a number among lists is missing, counted, and named once."""
    rows: list[dict[str, Any]] = [
        {"item": f"{n % 2}/{n:03d}.png", "tags": ["cat"] * (n % 3 == 0) + ["dog"], "exif": {"iso": n * 100, "by": None}}
        for n in range(20)
    ]
    condition = "bucket.filter=list_contains(tags, 'cat') AND exif.iso > 600"
    wanted = {f"one: {n % 2}/{n:03d}.png" for n in (9, 12, 15, 18)}
    of = config(root, f"bucket.metadata={write(root, rows, 'parquet')}", condition)
    assert not odd(report(of, capsys), "tags") and items(of) == wanted
    rows[9]["tags"] = 5
    of = config(root, f"bucket.metadata={write(root, rows)}", condition)
    [note] = odd(report(of, capsys), "tags")
    assert "1 of 20" in note and "009.png" in note and items(of) == wanted - {"one: 1/009.png"}


def test_dates_are_text(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of Parquet's dates and times, too; a number among them is missing, counted, and named once."""
    first = datetime.date(2024, 2, 20)
    made = [first + datetime.timedelta(days=n) for n in range(20)]
    rows: list[dict[str, Any]] = [
        {"item": f"{n % 2}/{n:03d}.png", "made": day, "taken": datetime.datetime(day.year, day.month, day.day, 12)}
        for n, day in enumerate(made)
    ]
    condition = (
        "bucket.filter=TRY_CAST(made AS DATE) >= DATE '2024-03-01' AND TRY_CAST(made AS DATE) < DATE '2024-03-06'"
    )
    of = config(root, f"bucket.metadata={write(root, rows, 'parquet')}", f"{condition} AND taken LIKE '%12:00:00'")
    sana_pipe.stages.bucket.run(of)
    wanted = {f"one: {n % 2}/{n:03d}.png" for n, day in enumerate(made) if 1 <= day.day <= 5 and day.month == 3}
    assert len(wanted) == 5 and items(of) == wanted
    lines = [{"item": row["item"], "made": str(row["made"])} for row in rows]
    lines[0]["made"] = [20240220]
    of = config(root, f"bucket.metadata={write(root, lines)}", condition)
    [note] = odd(report(of, capsys), "made")
    assert "1 of 20" in note and "000.png" in note and items(of) == wanted
