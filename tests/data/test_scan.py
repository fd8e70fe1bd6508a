"""The scan: cut into fragments that any number of processes share, and that outlive a killed one."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sana_pipe.base.errors import NoSpaceError, ResourceError, UserError
from sana_pipe.data.cache import audit, layout, scan_table
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.garbage import unneeded
from sana_pipe.data.cache.item_rows import ItemRows
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.encoding import last_scan, scan_rows
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.encoding.fragments import Fragments, Rows
from sana_pipe.data.sources.caption_columns import CaptionRule
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.filesystem import LocalFilesystem, Unreadable
from sana_pipe.data.sources.folder import FolderSource
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import Given, Item, Part, Place, Source
from sana_pipe.data.sources.tables import ParquetSource
from sana_pipe.data.sources.tars import TarSource
from sana_pipe.data.work.claims import Claims
from sana_pipe.data.work.engine import Worker
from sana_pipe.data.work.stop import Stop, Stopped
from tests.support.failing_reads import fail_reads
from tests.support.messages import naming
from tests.support.workers.scanning import RUN

ROOT = Path(__file__).resolve().parents[2]
COUNT = 5 * RUN + 2


def picture(n: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(n).integers(0, 255, (8, 8, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    root.mkdir()
    for n in range(COUNT):
        (root / f"{n:03d}.png").write_bytes(picture(n))
        (root / f"{n:03d}.txt").write_text(f"caption {n}")
    (root / "readme.md").write_text("no picture")
    return root


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    paths = []
    for shard in range(4):
        paths.append(tmp_path / "tars" / f"{shard}.tar")
        paths[-1].parent.mkdir(exist_ok=True)
        with tarfile.open(paths[-1], "w") as tar:
            for n in range(shard * 3, shard * 3 + 3):
                for kind, data in (("png", picture(n)), ("txt", b"said"), ("cls", b"1")):
                    info = tarfile.TarInfo(f"{n}.{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return paths


class Counted(FolderSource):
    """Remembers what was read, and does `then` before each read."""

    def __init__(self, root: Path, then: Callable[[int], None] = lambda count: None):
        super().__init__(root, "text", "photos")
        self.reads: list[str] = []
        self.then = then

    def read(self, place: Place) -> bytes:
        self.then(len(self.reads))
        self.reads.append(place.item)
        return super().read(place)


class CountedTars(TarSource):
    def __init__(self, paths: list[Path]):
        super().__init__(
            LocalFilesystem(paths[0].parent), [path.name for path in paths], CaptionRule.column("text"), "photos"
        )
        self.reads: list[str] = []
        self.listed: list[str] = []

    def part(self, name: str) -> Any:
        self.listed.append(name)
        return super().part(name)

    def read(self, place: Place) -> bytes:
        self.reads.append(place.item)
        return super().read(place)


def place_of(table: pa.Table, row: int) -> Place:
    """Where the item of a row of a scan is."""
    return Place(*(table.column(name)[row].as_py() for name in Place._fields))


def scanned(
    source: Source,
    cache: Cache,
    share: tuple[int, int] = (0, 1),
    stop: Stop | None = None,
    run: int = RUN,
    publish: bool = True,
    rehash: bool = False,
    stale_s: float = 60,
    shared: bool = True,
    max_pixels: int = 10**6,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> pa.Table:
    fragments = Fragments(cache, "photos", Worker(Claims(cache.files, stale_s), stop or Stop(0), *share))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_rows, "RUN", run)
        table = scanning.scan(
            source,
            "photos",
            cache,
            max_pixels=max_pixels,
            workers=1,
            rehash=rehash,
            progress=progress,
            fragments=fragments if shared else None,
        )
    if publish:
        cache.add_scan(
            "photos",
            {"root": source.location, "table": cache.put_table(table), "encodings": {"latent": "l", "text": "t"}},
        )
        fragments.finish()
    return table


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", create=True)


@pytest.fixture
def truth(folder: Path, tmp_path: Path) -> str:
    """The digest of the table of one process, which shares nothing."""
    alone = Cache(tmp_path / "alone", create=True)
    return alone.put_table(scanned(Counted(folder), alone, shared=False))


def fragments_of(cache: Cache) -> list[str]:
    return [name for name in cache.files.names("fragments/photos") if name.endswith(".json")]


def dying(count: int) -> Callable[[int], None]:
    def then(reads: int) -> None:
        if reads == count:
            raise KeyboardInterrupt

    return then


def test_what_a_broken_off_scan_has_read_is_not_read_again(folder: Path, cache: Cache, truth: str) -> None:
    first = Counted(folder, dying(2 * RUN + 1))
    with pytest.raises(KeyboardInterrupt):
        scanned(first, cache)
    assert len(fragments_of(cache)) == 2
    assert not cache.files.names("claims/fragments/photos")
    printed: list[tuple[int, int | None]] = []
    second = Counted(folder)
    table = scanned(second, cache, progress=lambda done, total: printed.append((done, total)))
    assert cache.put_table(table) == truth
    read = set(first.reads[: 2 * RUN])
    assert sorted(second.reads) == sorted(f"{n:03d}.png" for n in range(COUNT) if f"{n:03d}.png" not in read)
    assert printed[-1] == (COUNT, COUNT)
    assert {total for _, total in printed} == {COUNT}
    assert not cache.files.names("fragments/photos"), "nothing is left of a finished scan"
    assert second.ignored.total == 1


@pytest.mark.parametrize("change", ["picture", "caption", "new caption file", "pixel limit"])
def test_nothing_stale_is_taken_over(folder: Path, cache: Cache, change: str) -> None:
    limits = {"max_pixels": 10**6}
    with pytest.raises(KeyboardInterrupt):
        scanned(Counted(folder, dying(4 * RUN)), cache)
    assert len(fragments_of(cache)) == 4
    if change == "picture":
        for n in range(COUNT):
            old = (folder / f"{n:03d}.png").stat()
            (folder / f"{n:03d}.png").write_bytes(picture(n + 100).ljust(old.st_size, b"\0")[: old.st_size])
            os.utime(folder / f"{n:03d}.png", ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    elif change == "caption":
        for n in range(COUNT):
            (folder / f"{n:03d}.txt").write_text(f"other {n}")
    elif change == "new caption file":
        for n in range(COUNT):
            (folder / f"{n:03d}.json").write_text('{"text": "more"}')
    else:
        limits["max_pixels"] = 10
    source = Counted(folder)
    table = scanned(source, cache, **limits)
    assert len(source.reads) == COUNT
    alone = Cache(cache.root.parent / "other", create=True)
    assert table.equals(scanned(Counted(folder), alone, shared=False, **limits))


def test_a_higher_limit_lets_in_what_a_lower_one_left_out(folder: Path, cache: Cache) -> None:
    assert scanned(Counted(folder), cache, max_pixels=10).column("reject").null_count == 0
    source = Counted(folder)
    assert scanned(source, cache).column("reject").null_count == COUNT
    assert len(source.reads) == COUNT


def test_a_higher_limit_lets_in_what_a_lower_one_left_out_of_a_tar(tars: list[Path], cache: Cache) -> None:
    assert scanned(CountedTars(tars), cache, max_pixels=10).column("reject").null_count == 0
    assert scanned(CountedTars(tars), cache).column("reject").null_count == 12


def test_two_processes_read_every_picture_once_and_have_the_same_table(folder: Path, cache: Cache, truth: str) -> None:
    sources = [Counted(folder, lambda count: time.sleep(0.005)) for _ in range(2)]
    tables: dict[int, str] = {}

    def work(task: int) -> None:
        tables[task] = cache.put_table(scanned(sources[task], cache, (task, 2), stale_s=2, publish=False))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_rows, "RUN", RUN)
        threads = [threading.Thread(target=work, args=(task,)) for task in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert tables == {0: truth, 1: truth}
    assert sorted(sources[0].reads + sources[1].reads) == [f"{n:03d}.png" for n in range(COUNT)]
    assert sources[0].reads and sources[1].reads
    assert [source.ignored.total for source in sources] == [1, 1]


def test_what_an_unchanged_tar_skips_is_named_again(tars: list[Path], cache: Cache) -> None:
    first, second, third = CountedTars(tars), CountedTars(tars), CountedTars(tars)
    table = scanned(first, cache)
    again = scanned(second, cache)
    assert (second.listed, second.reads) == ([], [])
    assert again.equals(table)
    assert vars(second.ignored) == vars(first.ignored) and first.ignored.total == 12
    tars[1].unlink()
    third = CountedTars([*tars[:1], *tars[2:]])
    scanned(third, cache)
    assert (third.listed, third.ignored.total) == ([], 9)


def test_of_tars_each_is_a_fragment_and_is_neither_listed_nor_read_twice(tars: list[Path], cache: Cache) -> None:
    alone = Cache(cache.root.parent / "alone", create=True)
    whole = CountedTars(tars)
    truth = scanned(whole, alone, shared=False)
    assert whole.ignored.total == 12
    first = CountedTars(tars)
    first.read = dying_read(first, 7)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        scanned(first, cache)
    assert len(fragments_of(cache)) == 2
    second = CountedTars(tars)
    table = scanned(second, cache)
    assert table.equals(truth)
    assert second.listed == ["2.tar", "3.tar"]
    assert len(second.reads) == 6
    assert second.ignored.total == 12, "those of the fragments that were taken over count, too"
    assert second.read(place_of(table, 0)) == picture(0), "where the bytes are stands in the fragments"


def test_a_source_is_opened_again_without_its_table(
    tars: list[Path], cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CountedTars(tars)
    table = scanned(source, cache, publish=False)
    cache.add_scan("photos", source.document() | {"table": "00" * 16, "encodings": {"latent": "l", "text": "t"}})
    monkeypatch.setattr(Cache, "table", lambda *_: 1 / 0)
    again = scanning.reopen(cache, "photos", DataConfig())
    for row in range(len(table)):
        assert layout.digest(again.read(place_of(table, row))) == table.column("digest")[row].as_py()


@pytest.mark.parametrize("kind", ["folder", "tars"])
def test_a_source_that_was_not_scanned_here_is_opened_where_it_is_said_to_be(
    folder: Path, tars: list[Path], kind: str, cache: Cache, tmp_path: Path
) -> None:
    source: Source = Counted(folder) if kind == "folder" else CountedTars(tars)
    place = place_of(scanned(source, Cache(tmp_path / "other", create=True)), 7)
    where = folder if kind == "folder" else tars[0].parent
    assert scanning.reopen(cache, "photos", DataConfig(), str(where)).read(place) == source.read(place)
    with pytest.raises(UserError, match=naming("'photos'")):
        scanning.reopen(cache, "photos", DataConfig())


@pytest.mark.parametrize("shared", [False, True])
def test_the_total_of_a_source_of_tars_is_estimated_by_the_listed_ones(
    tars: list[Path], cache: Cache, shared: bool
) -> None:
    printed: list[tuple[int, int | None]] = []
    scanned(CountedTars(tars), cache, shared=shared, progress=lambda done, total: printed.append((done, total)))
    assert printed == [(n, None if n <= 3 else 12) for n in range(1, 13)]
    scanned(CountedTars(tars[:3]), cache, progress=lambda done, total: printed.append((done, total)))
    assert printed[12:] == [(3, 9), (6, 9), (9, 9)]


def test_an_unchanged_source_of_tars_is_neither_joined_nor_sorted(
    tars: list[Path], cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = scanned(CountedTars(tars), cache)
    monkeypatch.setattr(Scratch, "sorted_by_key", lambda *_: 1 / 0)
    source = CountedTars(tars)
    assert scanned(source, cache).equals(table)
    assert source.read(place_of(table, 0)) == picture(0), "reading needs no look-up"


def test_equal_sample_ids_are_noticed_when_another_limit_lets_a_picture_in(
    tars: list[Path], cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned(CountedTars(tars), cache, max_pixels=1)
    monkeypatch.setattr(scanning, "sample_ids", lambda name, items: np.zeros(len(items), np.uint64))
    with pytest.raises(UserError, match="have the same 64-bit sample id"):
        scanned(CountedTars(tars), cache)


def dying_read(source: CountedTars, count: int) -> Callable[[str], bytes]:
    def read(key: str) -> bytes:
        if len(source.reads) == count:
            raise KeyboardInterrupt
        return CountedTars.read(source, key)

    return read


@pytest.mark.parametrize("suffix", [".json", ".arrow"])
def test_a_damaged_fragment_is_made_again(folder: Path, cache: Cache, truth: str, suffix: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        scanned(Counted(folder, dying(2 * RUN)), cache)
    for name in cache.files.names("fragments/photos"):
        if name.endswith(suffix):
            path = cache.root / "fragments/photos" / name
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    source = Counted(folder)
    assert cache.put_table(scanned(source, cache)) == truth
    assert len(source.reads) == COUNT


def test_one_piece_of_work_is_not_published(folder: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Fragments, one: str, rows: object) -> None:
        raise AssertionError("published")

    monkeypatch.setattr(Fragments, "publish", refuse)
    scanned(Counted(folder), cache, run=COUNT)
    # Nor is what only has to be looked at: every picture is known.
    source = Counted(folder)
    scanned(source, cache, run=2)
    assert not source.reads
    (folder / "000.png").write_bytes(picture(1000))
    scanned(source, cache, run=2)
    assert source.reads == ["000.png"]


def test_who_comes_too_late_takes_over_what_the_others_have_published(folder: Path, cache: Cache, truth: str) -> None:
    class Late(Counted):
        asked = 0

        def parts(self) -> list[Part]:
            self.asked += 1
            if self.asked == 1:
                scanned(Counted(folder), cache)
            return super().parts()

    source = Late(folder)
    assert cache.put_table(scanned(source, cache, (0, 2))) == truth
    assert (source.reads, source.asked, source.ignored.total) == ([], 2, 1)
    assert len(cache.files.numbers("sources/photos")) == 1


def rows_of(n: int) -> Rows:
    return Rows(pa.table({"item": [str(n)], "reject": pa.array([None], pa.string())}), Kinds({"file": n}, {"file": []}))


def test_what_is_published_is_taken_even_while_it_is_claimed(cache: Cache) -> None:
    other, mine = Claims(cache.files, 60), Claims(cache.files, 60)
    assert other.take("fragments", "photos", "ab" * 16) == "ours"
    Fragments(cache, "photos", Worker(other, Stop(0), 0, 2)).publish("ab" * 16, rows_of(1))
    got: list[int] = []
    fragments = Fragments(cache, "photos", Worker(mine, Stop(0), 1, 2))
    fragments.gather(["ab" * 16], lambda one: rows_of(2), lambda one, rows: got.append(rows.ignored.total), -1)
    assert got == [1]


def test_what_was_published_just_before_the_claim_is_not_made_again(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = Claims(cache.files, 60)
    fragments = Fragments(cache, "photos", Worker(claims, Stop(0), 1, 2))

    def take(*work: str | int) -> str:
        fragments.publish("ab" * 16, rows_of(1))  # another process, which then gave its claim back
        return Claims.take(claims, *work)

    monkeypatch.setattr(claims, "take", take)
    got: list[int] = []
    fragments.gather(["ab" * 16], lambda one: rows_of(2), lambda one, rows: got.append(rows.ignored.total), -1)
    assert got == [1]


def test_few_fragments_are_looked_at_before_their_turn(
    folder: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "RUNS_AHEAD", 2)
    monkeypatch.setattr(scan_rows, "RUN", RUN)
    looks, made = [], []
    real, make = LocalFilesystem.stat_many, scan_rows.RowMaker.make

    def stat_many(self: LocalFilesystem, names: Any) -> Any:
        looks.append(names)
        return real(self, names)

    def recorded(self: Any, piece: Any) -> Any:
        made.append(len(looks))
        return make(self, piece)

    monkeypatch.setattr(LocalFilesystem, "stat_many", stat_many)
    monkeypatch.setattr(scan_rows.RowMaker, "make", recorded)
    source = Counted(folder)
    scanning.scan(source, "photos", cache, max_pixels=1 << 20, workers=2, rehash=False, progress=lambda *_: None)
    assert len(source.reads) == COUNT and len(made) == 6
    assert all(count <= number + 2 for number, count in enumerate(made))


def test_the_rows_of_the_last_scan_are_indexed_once_and_before_threads_ask_for_them(
    folder: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned(Counted(folder), cache)
    (folder / "000.png").write_bytes(picture(1000))
    indexed: list[int] = []

    class Recorded(ItemRows):
        def __init__(self, *args: Any):
            indexed.append(threading.get_ident())
            super().__init__(*args)

    monkeypatch.setattr(last_scan, "ItemRows", Recorded)
    source = Counted(folder)
    scanned(source, cache)
    assert (indexed, source.reads) == ([threading.get_ident()], ["000.png"])


def test_another_data_set_under_a_known_name_is_refused(folder: Path, cache: Cache, tmp_path: Path) -> None:
    scanned(Counted(folder), cache)
    other = tmp_path / "other"
    other.mkdir()
    (other / "other.png").write_bytes(picture(1000))
    (other / "other.txt").write_text("other")
    source = Counted(other)
    table = scanned(source, cache, publish=False)
    with pytest.raises(UserError, match=naming(folder)) as caught:
        last_scan.count_missing(cache, source, table, 0.99)
    assert "--source-name" in str(caught.value.fix)


def test_a_fragment_that_waits_or_has_arrived_needs_little_memory(
    folder: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned(Counted(folder), cache)
    for n in range(0, COUNT, RUN):  # one new picture in each fragment
        (folder / f"{n:03d}.png").write_bytes(picture(n + 1000))
    pieces: list[Any] = []

    def recorded(*args: Any, **options: Any) -> Any:
        pieces.append(piece(*args, **options))
        return pieces[-1]

    piece, gather, waiting = scan_rows.Slice, Fragments.gather, []

    def watched(self: Fragments, *args: Any) -> None:
        waiting.extend(one for one in pieces if not (one.kept or one.rows))
        assert not any(one.before or one.stats for one in waiting)
        gather(self, *args)

    monkeypatch.setattr(scanning, "Slice", recorded)
    monkeypatch.setattr(Fragments, "gather", watched)
    with pytest.raises(KeyboardInterrupt):
        scanned(Counted(folder, dying(2)), cache)
    assert len(fragments_of(cache)) == 2 and len(waiting) == 6
    pieces.clear()
    source = Counted(folder)
    scanned(source, cache)
    assert len(source.reads) == 4
    assert all(one.rows and not (one.fragment or one.stats or one.before) for one in pieces)


def test_rehash_trusts_no_fragment_of_another_scan(folder: Path, cache: Cache, truth: str) -> None:
    scanned(Counted(folder), cache)
    for n in range(COUNT):
        (folder / f"{n:03d}.png").touch()
    with pytest.raises(KeyboardInterrupt):
        scanned(Counted(folder, dying(2 * RUN)), cache)
    source = Counted(folder)
    scanned(source, cache, rehash=True)
    assert len(source.reads) == COUNT


@pytest.mark.parametrize(("grace_s", "finished"), [(0, 1), (600, 2)])
def test_a_signal_ends_the_scan_and_leaves_nothing_half_done(
    grace_s: int, finished: int, folder: Path, cache: Cache, truth: str
) -> None:
    """Within the grace the fragment at hand is finished."""
    stop = Stop(grace_s)
    with stop.signals():

        def then(count: int) -> None:
            if count == RUN + 1:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(Stopped), stop.polite():
            scanned(Counted(folder, then), cache, stop=stop)
    assert len(fragments_of(cache)) == finished
    assert not cache.files.names("claims/fragments/photos")
    assert not cache.files.names("tmp")
    source = Counted(folder)
    assert cache.put_table(scanned(source, cache)) == truth
    assert len(source.reads) == COUNT - finished * RUN


def test_gc_lists_what_an_abandoned_scan_has_left(folder: Path, cache: Cache) -> None:
    with pytest.raises(KeyboardInterrupt):
        scanned(Counted(folder, dying(2 * RUN)), cache)
    assert not list(unneeded(cache))
    result = [name for name, _, why in unneeded(cache, now=time.time() + 1e6) if "scan" in why]
    assert result == sorted(f"fragments/photos/{name}" for name in cache.files.names("fragments/photos"))
    assert not list(audit.verify(cache))


# --- real processes ------------------------------------------------------------------------------------------------


def start(cache: Cache, folder: Path, task: int, tasks: int, seconds: float, stale_s: float = 2) -> Any:
    arguments = [cache.root, folder, f"{cache.root}.log{task}", task, tasks, stale_s, seconds]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.workers.scanning", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def reads(cache: Cache, task: int = 0) -> list[str]:
    log = Path(f"{cache.root}.log{task}")
    return log.read_text().split() if log.exists() else []


def until(condition: Callable[[], bool], process: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        assert process.poll() is None, "it ended before it could be disturbed"
        time.sleep(0.01)


def outcome(cache: Cache) -> str:
    assert cache.files.numbers("sources/photos") == [0]
    assert not cache.files.names("fragments/photos")
    assert not cache.files.names("claims/fragments/photos")
    last = cache.last_scan("photos")
    assert last is not None
    return last["table"]


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_scan_loses_the_fragment_in_hand_at_most(
    folder: Path, cache: Cache, truth: str, number: signal.Signals
) -> None:
    process = start(cache, folder, 0, 1, 0.05)
    until(lambda: len(reads(cache)) >= 2 * RUN + 2, process)
    process.send_signal(number)
    output, _ = process.communicate()
    assert (process.returncode, output) == ((0, "stopped\n") if number == signal.SIGTERM else (-number, ""))
    before = reads(cache)
    assert len(before) < COUNT
    assert start(cache, folder, 0, 1, 0).wait() == 0
    assert outcome(cache) == truth
    twice = Counter(reads(cache))
    assert set(twice) == {f"{n:03d}.png" for n in range(COUNT)}
    assert sum(count - 1 for count in twice.values()) <= RUN


@pytest.fixture
def tables(tmp_path: Path) -> list[Path]:
    """Parquet files: three with bytes, one that names files."""
    paths = [tmp_path / "tables" / f"{part}.parquet" for part in range(4)]
    (tmp_path / "tables").mkdir()
    for part, path in enumerate(paths[:3]):
        content = {"image": [picture(3 * part + n) for n in range(3)], "text": ["said"] * 3}
        pq.write_table(pa.table(content), path)
    for n in range(9, 12):
        (tmp_path / "tables" / f"{n}.png").write_bytes(picture(n))
    pq.write_table(pa.table({"file_name": [f"{n}.png" for n in range(9, 12)], "text": ["said"] * 3}), paths[3])
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_items_of_tables_that_name_files_are_not_in_memory(
    folder: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    for part in range(2):
        names = [f"{n:03d}.png" for n in range(part, COUNT, 2)]
        columns = {"file_name": names, "text": ["said"] * len(names), "when": [datetime(2026, 1, 1)] * len(names)}
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")

    def source() -> ParquetSource:
        given = Given(LocalFilesystem(folder), None, CaptionRule.column("text"), DataConfig(), "photos", 60)
        return ParquetSource(given, ["0.parquet", "1.parquet"])

    truth = pa.Table.from_pylist(
        [{"item": item.key, "where": item.where} for item in source().items() if isinstance(item, Item)]
    )
    items = list[int]()
    read = ParquetSource.read

    def counted(self: ParquetSource, place: Place) -> bytes:
        gc.collect()
        items.append(sum(isinstance(one, Item) for one in gc.get_objects()))
        return read(self, place)

    monkeypatch.setattr(ParquetSource, "read", counted)
    table = scanned(source(), cache, shared=shared)
    assert table.select(["item", "where"]).equals(truth) and not table.column("digest").null_count
    assert len(items) == COUNT and max(items) <= 2 * RUN
    assert scanned(source(), cache, shared=shared).equals(table) and len(items) == COUNT


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["tars", "tables"])
def test_a_killed_scan_of_parts_loses_the_part_in_hand_at_most(
    kind: str, tmp_path: Path, cache: Cache, request: pytest.FixtureRequest
) -> None:
    paths: list[Path] = request.getfixturevalue(kind)
    data = paths[0].parent / f"*{paths[0].suffix}"
    whole = Cache(tmp_path / "alone", create=True)
    assert start(whole, data, 0, 1, 0).wait() == 0
    process = start(cache, data, 0, 1, 0.05)
    until(lambda: len(reads(cache)) >= 7, process)
    process.kill()
    process.communicate()
    before = reads(cache)
    assert 7 <= len(before) < 12 and len(fragments_of(cache)) == len(before) // 3
    assert start(cache, data, 0, 1, 0).wait() == 0
    assert outcome(cache) == outcome(whole)
    times = Counter(reads(cache))
    assert len(times) == 12 and set(times) == set(reads(whole))
    again = {key for key, count in times.items() if count > 1}
    assert again <= set(before[len(before) // 3 * 3 :]), "parts that were read whole are not read again"


@pytest.mark.dist
@pytest.mark.parametrize("tasks", [2, 4])
def test_processes_share_the_scan(folder: Path, cache: Cache, truth: str, tasks: int) -> None:
    processes = [start(cache, folder, task, tasks, 0.1) for task in range(tasks)]
    assert [process.wait() for process in processes] == [0] * tasks
    assert outcome(cache) == truth
    every = [key for task in range(tasks) for key in reads(cache, task)]
    assert sorted(every) == [f"{n:03d}.png" for n in range(COUNT)]
    assert sum(bool(reads(cache, task)) for task in range(tasks)) > 1


@pytest.mark.fault
def test_a_stopped_process_is_overtaken_and_changes_nothing_when_it_wakes(
    folder: Path, cache: Cache, truth: str
) -> None:
    sleeper = start(cache, folder, 0, 2, 0.05)
    until(lambda: len(reads(cache, 0)) >= 2, sleeper)
    sleeper.send_signal(signal.SIGSTOP)
    try:
        assert start(cache, folder, 1, 2, 0).wait() == 0
        assert outcome(cache) == truth
    finally:
        sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait() == 0
    assert outcome(cache) == truth
    assert sum(count - 1 for count in Counter(reads(cache, 0) + reads(cache, 1)).values()) <= RUN


def test_what_could_not_be_read_is_read_by_the_next_run(folder: Path, cache: Cache, truth: str) -> None:
    """Also where the run that left the fragments never came to their removal."""
    scanned(Counted(folder, lambda count: refuse(count)), cache, publish=False)
    table = scanned(Counted(folder), cache, publish=False)
    assert not [r for r in table.column("reject").to_pylist() if r]
    assert cache.put_table(table) == truth


def refuse(count: int) -> None:
    if count == 3:
        raise Unreadable("the server is busy")


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("kind", ["tars", "tables"])
def test_a_part_of_which_a_read_failed_is_read_by_the_next_run(
    kind: str, after: int, tmp_path: Path, cache: Cache, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)[1]
    data = str(path.parent / f"*{path.suffix}")
    alone = Cache(tmp_path / "alone", create=True)
    truth = scanned(open_source(data, DataConfig()), alone)
    with pytest.MonkeyPatch.context() as patch:
        fail_reads(patch, path.name, errno.EIO, after)
        broken = scanned(open_source(data, DataConfig()), cache)
    assert all(r.startswith("unreadable: ") for r in broken.column("reject").to_pylist() if r)
    assert scanned(open_source(data, DataConfig()), cache).equals(truth)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, NoSpaceError), (errno.EMFILE, ResourceError)])
@pytest.mark.parametrize("files", ["tars", "tables"])
def test_a_limit_of_this_machine_rejects_no_part(
    files: str, number: int, kind: type, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    path = request.getfixturevalue(files)[1]
    fail_reads(monkeypatch, path.name, number, times=100)
    with pytest.raises(kind):
        scanned(open_source(str(path.parent / f"*{path.suffix}"), DataConfig()), cache)


@pytest.mark.parametrize(
    ("reason", "again"),
    [
        ("unreadable: 1.tar: Input/output error", True),
        ("is not a whole tar: unexpected end of data (after byte 512)", False),
    ],
)
def test_rejects_that_came_from_failed_reads_are_tried_again(
    reason: str, again: bool, tars: list[Path], cache: Cache
) -> None:
    truth = scanned(CountedTars(tars), cache)
    rows = truth.to_pylist()
    lost = [row for row in rows if row["part"] == "1.tar"]
    kept = [row for row in rows if row not in lost]
    empty = dict.fromkeys(scan_table.SCAN.names)
    kept[3:3] = [
        {**empty, "item": "1.tar", "captions": [], "reject": reason, "part": "1.tar", "stamp": lost[0]["stamp"]}
    ]
    old = pa.Table.from_pylist(kept, scan_table.SCAN)
    source = CountedTars(tars)
    cache.add_scan(
        "photos", {"root": source.location, "table": cache.put_table(old), "encodings": {"latent": "l", "text": "t"}}
    )
    assert scanned(source, cache).equals(truth if again else old)
    assert source.listed == ["1.tar"] * again


# ---------------------------------------------------------------- one process makes the table, the others help


def begun(source: Source, cache: Cache, task: int = 0, **options: Any) -> Any:
    fragments = Fragments(cache, "photos", Worker(Claims(cache.files, 60), Stop(0), task, 2))
    settings = {"max_pixels": 10**6, "workers": 1, "rehash": False, "progress": lambda done, total: None, **options}
    return scanning.begin(source, "photos", cache, fragments=fragments, **settings)


def test_a_process_that_helps_reads_no_rows(
    folder: Path, cache: Cache, truth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_rows, "RUN", RUN)
    printed: list[tuple[int, int | None]] = []
    first, second = Counted(folder, dying(2 * RUN)), Counted(folder)
    with begun(first, cache) as scan, pytest.raises(KeyboardInterrupt):
        scan.table()
    read = sum(cache.files.document(f"fragments/photos/{name}")["rows"] for name in fragments_of(cache))
    known = Fragments.published
    monkeypatch.setattr(Fragments, "published", lambda *_: 1 / 0)
    with begun(second, cache, 1, progress=lambda done, total: printed.append((done, total))) as scan:
        scan.help()
        assert len(second.reads) == COUNT - read and len(fragments_of(cache)) == 6
        assert printed[-1] == (COUNT, COUNT)
        assert len(scan.made.finish()) == 0
    monkeypatch.setattr(Fragments, "published", known)
    third = Counted(folder)
    with begun(third, cache) as scan:
        scan.help()
        assert cache.put_table(scan.table()) == truth, "the helper takes over"
    assert (third.reads, third.ignored.total) == ([], 1)


@pytest.mark.parametrize("kind", ["folder", "tars"])
def test_a_helper_that_takes_over_makes_again_what_was_lost(
    kind: str, folder: Path, tars: list[Path], cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_rows, "RUN", RUN)
    source: Source = Counted(folder) if kind == "folder" else CountedTars(tars)
    with begun(source, cache) as scan:
        scan.help()
        ignored = source.ignored.total
        for name in fragments_of(cache)[::2]:
            cache.files.remove(f"fragments/photos/{name}")
        table = scan.table()
    alone = Counted(folder) if kind == "folder" else CountedTars(tars)
    assert table.equals(scanned(alone, cache, shared=False, publish=False))
    assert source.ignored.total == ignored == alone.ignored.total > 0


def test_the_files_that_a_helper_skips_are_counted_once(tars: list[Path], cache: Cache) -> None:
    source = CountedTars(tars)
    with begun(source, cache) as scan:
        scan.help()
        assert len(scan.table()) == 12
    assert source.ignored.total == 12


def test_a_helper_ends_when_another_process_has_published_the_scan(folder: Path, cache: Cache) -> None:
    with begun(Counted(folder), cache, 1) as scan:
        assert scan.slices
        scanned(Counted(folder), cache)
        scan.help()
        with pytest.raises(scanning.ScanSuperseded):
            scan.table()


def test_of_an_unchanged_source_only_the_stamps_are_read(
    tars: list[Path], cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = scanned(CountedTars(tars), cache)
    asked: list[object] = []
    real = Cache.table
    monkeypatch.setattr(Cache, "table", lambda self, *args: asked.append(args[1]) or real(self, *args))
    with begun(CountedTars(tars), cache) as scan:
        assert scan.id
        scan.help()
        assert asked == [["part", "stamp", "reject"]]
        assert scan.table().equals(table)


@pytest.mark.parametrize("change", ["nothing", "time", "caption", "more", "fewer", "pixels", "rehash", "the last scan"])
def test_the_id_of_a_scan_covers_what_decides_its_table(folder: Path, cache: Cache, change: str) -> None:
    def identity(**options: Any) -> str:
        with begun(Counted(folder), cache, **options) as scan:
            return scan.id

    scanned(Counted(folder), cache)
    before, options = identity(), dict[str, Any]()
    if change == "time":
        os.utime(folder / "000.png", (1, 1))
    elif change == "caption":
        (folder / "000.txt").write_text("another")
    elif change == "more":
        (folder / "more.png").write_bytes(picture(77))
    elif change == "fewer":
        (folder / "000.png").unlink()
    elif change == "the last scan":
        body = cache.last_scan("photos")
        assert body is not None
        cache.add_scan("photos", {**body, "encodings": {**body["encodings"], "latent": "other"}})
    elif change != "nothing":
        options = {"pixels": {"max_pixels": 7}, "rehash": {"rehash": True}}[change]
    assert (identity(**options) == before) == (change == "nothing")


def test_the_id_of_a_scan_covers_the_stamps_of_tars(tars: list[Path], cache: Cache) -> None:
    def identity(of: list[Path]) -> str:
        with begun(CountedTars(of), cache) as scan:
            return scan.id

    scanned(CountedTars(tars), cache)
    before = identity(tars)
    assert identity(tars) == before != identity(tars[:3])
    os.utime(tars[2], (1, 1))
    assert identity(tars) != before
