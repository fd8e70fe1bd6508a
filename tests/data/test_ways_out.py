"""Ways out of damage: the commands that are printed mend it, word for word, whichever file is harmed."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import sana_pipe.stages.bucket
from sana_pipe.base.errors import IntegrityError
from sana_pipe.cli import main
from sana_pipe.config import dump
from sana_pipe.data.cache import index
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths
from tests.support import synthetic
from tests.support.damage import flip
from tests.support.packed import pack

SETTINGS = ["bucket.filter=score > 1", "bucket.batch=3", "bucket.heldout=0.3"]
Run = Callable[..., tuple[int, str]]
HARM: dict[str, Callable[[Path], None]] = {"lost": Path.unlink, "flipped": lambda path: flip(path, 40)}


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache and `sana-pipe.yaml`: a named snapshot with options, its pack, a newer one of more pictures."""
    root = tmp_path_factory.mktemp("ways")
    of = synthetic.config(root / "cache")
    (root / "sana-pipe.yaml").write_text(dump(of).replace(str(root / "cache"), "cache"))
    pictures = [synthetic.Picture(f"{n}.png", f"p{n}", meta={"score": n % 4}) for n in range(12)]
    cache = synthetic.add(of, "one", pictures)
    sana_pipe.stages.bucket.run(synthetic.config(root / "cache", *SETTINGS), name="old")
    pack(cache, name="packed")
    synthetic.add(of, "one", [*pictures, *synthetic.pictures(3, "new-")])
    sana_pipe.stages.bucket.run(of)
    return root


@pytest.fixture
def folder(made_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(digest: str, suffix: str) -> str:
    return Paths.table(digest, suffix)


def record_table(cache: Cache) -> str:
    [commit, *_] = index.commits(cache.files, synthetic.LATENT.name, 0)
    return table(str(commit.table), "arrow")


ONCE: dict[str, Callable[[Cache], str]] = {
    "record table": record_table,
    "joint shard": lambda cache: next(iter(cache.open_snapshot("packed").shard_files())),
}
TWICE: dict[str, Callable[[Cache], str]] = {
    "format": lambda cache: Paths.FORMAT,
    "encoding": lambda cache: Paths.encoding(synthetic.LATENT.name),
    "earlier scan": lambda cache: Paths.numbered(Paths.scans("one"), 0),
    "last scan": lambda cache: Paths.numbered(Paths.scans("one"), 1),
    "plan": lambda cache: Paths.numbered(Paths.plans(synthetic.LATENT.name), 0),
    "segment": lambda cache: Paths.segment(synthetic.LATENT.name, 0),
    "head": lambda cache: Paths.snapshot(cache.open_snapshot("old").id),
    "name": lambda cache: Paths.numbered(Paths.names("old"), 0),
    "table of an earlier scan": lambda cache: table(cache.open_snapshot("old").head.sources["one"], "parquet"),
    "table of the last scan": lambda cache: table((cache.last_scan("one") or {})["table"], "parquet"),
    "table of a plan": lambda cache: table(cache.plan(synthetic.LATENT.name, 0).table, "parquet"),
    "table of a pack's plan": lambda cache: table(
        cache.plan(cache.open_snapshot("packed").head.folder or "", 0).table, "parquet"
    ),
    "list of shards": lambda cache: table(cache.open_snapshot("old").head.shards["text"].entry.table, "arrow"),
    "list of chunks": lambda cache: table(cache.open_snapshot("old").head.chunks.entry.table, "arrow"),
    "samples": lambda cache: table(cache.open_snapshot("old").head.chunks[0].samples, "arrow"),
    "names": lambda cache: table(cache.open_snapshot("old.heldout").head.chunks[0].names, "arrow"),
    "samples of a pack": lambda cache: table(cache.open_snapshot("packed").head.chunks[0].samples, "arrow"),
}


def state(folder: Path) -> dict[str, bytes]:
    """The files of the cache, without those that were set aside and rounds of `verify`."""
    root = folder / "cache"
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    ignored = ("damaged/", "tmp/", "reports/", "rounds/")
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(ignored)}


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`run("verify", ...)`: the exit code of a command line, and what it prints."""

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        printed = capfd.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    return run


def follow(run: Run) -> list[str]:
    """Run `verify` and what it prints as fixes until it finds nothing; the commands that were run."""
    followed: list[str] = []
    while (verified := run("verify"))[0]:
        printed = verified[1]
        while True:
            lines = [line.removeprefix("fix: ") for line in printed.splitlines() if line.startswith("fix: ")]
            fix = next((line for line in lines if line not in followed), None)
            if fix is None:
                break
            followed.append(fix)
            code, printed = run(*shlex.split(fix)[1:])
        assert lines == [] or code == 0, f"{followed} did not mend it: {printed}"
    return followed


@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize("place", ["file", "copy"])
def test_harmed_files_of_all_kinds_come_back(folder: Path, run: Run, place: str, how: str) -> None:
    cache, before = Cache("cache"), state(folder)
    names = [kind(cache) for kind in TWICE.values()]
    harmed = [*names, *(kind(cache) for kind in ONCE.values())] if place == "file" else list(map(Paths.copy, names))
    for name in harmed:
        HARM[how](folder / "cache" / name)
    printed = run("verify")[1]
    assert not [name for name in harmed if name not in printed]
    assert follow(run) == ["sana-pipe verify --repair"]
    assert state(folder) == before


AGAIN = {
    "list of shards": "sana-pipe bucket --name old --move",
    "list of chunks": "sana-pipe bucket --name old --move",
    "samples": "sana-pipe bucket --name old --move",
    "names": "sana-pipe bucket --name old --move",
    "samples of a pack": "sana-pipe bucket --pack",
}


@pytest.mark.parametrize("kind", AGAIN)
def test_a_lost_list_has_one_way_out_that_is_printed_once(folder: Path, run: Run, kind: str) -> None:
    """The snapshot has options that the configuration does not say, and its source has changed: another gets the name,
    made with these options."""
    cache = Cache("cache")
    name, options = TWICE[kind](cache), cache.open_snapshot("old").head.options
    for place in (name, Paths.copy(name)):
        HARM["lost"](folder / "cache" / place)
    for repair in ([], ["--repair"]):
        code, printed = run("verify", *repair)
        assert (code, printed.count("sana-pipe ")) == (4, 1)
        assert f"\nfix: {AGAIN[kind]}" in printed and " 2 damaged\n" in printed
    [fix] = [line.removeprefix("fix: ") for line in printed.splitlines() if line.startswith("fix: ")]
    assert run(*shlex.split(fix)[1:])[0] == 0
    for path in (folder / "cache" / "snapshots").glob("*.json"):
        os.utime(path, (1, 1))
    assert run("gc", "--yes")[0] == 0
    assert run("verify")[0] == 0
    if kind == "samples of a pack":
        assert Cache("cache").open_snapshot("packed").packed
    else:
        assert Cache("cache").open_snapshot("old").head.options == options
        assert len(Cache("cache").open_snapshot("old.heldout"))


def test_a_head_that_is_lost_with_its_copy_is_named_with_the_way_out(folder: Path, run: Run) -> None:
    name = TWICE["head"](Cache("cache"))
    for place in (name, Paths.copy(name)):
        HARM["lost"](folder / "cache" / place)
    code, printed = run("train", "--snapshot", "old")
    assert code == IntegrityError.exit_code
    assert all(path in printed for path in (name, Paths.copy(name), "sana-pipe bucket --name"))
    code, printed = run("verify")
    assert code == IntegrityError.exit_code and "sana-pipe bucket --name old --move" in printed
    assert "sana-pipe forget --snapshot old" in printed and run("gc")[0] == IntegrityError.exit_code
    settings = [word for option in SETTINGS for word in ("--set", option)]
    assert run("bucket", "--name", "old", "--move", *settings)[0] == 0
    assert run("verify")[0] == 0


def test_a_scan_table_that_is_lost_twice_spoils_no_snapshot(folder: Path, run: Run) -> None:
    """Its source has changed since: `encode` makes another table, and only reports need the earlier one."""
    name = TWICE["table of an earlier scan"](Cache("cache"))
    for place in (name, Paths.copy(name)):
        HARM["flipped"](folder / "cache" / place)
    assert follow(run) == ["sana-pipe verify --repair"]
    cache = Cache("cache")
    assert len(cache.open_snapshot("old")) and "old" in cache.snapshot_names()
    assert run("status")[0] == 0
