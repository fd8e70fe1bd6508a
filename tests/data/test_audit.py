"""`status`, `verify --repair` and `gc` on a real cache with real damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.gc
import sana_pipe.stages.status
import sana_pipe.stages.verify
from sana_pipe.config import Config
from sana_pipe.data.cache import audit, index, layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.findings import Finding
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.loader.loader import Loader
from sana_pipe.data.work.stop import Stopped
from tests.support.constants import set_constants, unit_sizes
from tests.support.damage import flip
from tests.support.loading import loader_settings

MakeConfig = Callable[..., Config]


@pytest.fixture
def filled(small_cache_copy: Path, make_config: MakeConfig, photos: Path, tmp_path: Path) -> tuple[Config, Path]:
    """The configuration of a small cache, and its source."""
    return make_config(tmp_path), photos


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def a_record(cache: Cache, kind: str, number: int = 1) -> tuple[Path, dict]:
    encoding = cache.encodings(kind)[0].name
    commit = max(index.commits(cache.files, encoding, 0), key=lambda c: c.records)
    row = audit.record_rows(cache, commit)[number]
    return cache.files.path(layout.Paths.shard(encoding, commit.shard or "")), row


def test_a_good_cache_is_right(filled: tuple[Config, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert sana_pipe.stages.verify.run(filled[0], as_json=True) == 0
    result = last_json(capsys)
    assert result["ok"]
    assert result["files"] > 20


@pytest.mark.parametrize("kind", ["latent", "text"])
def test_one_flipped_byte_is_named_and_exactly_it_is_restored(
    kind: str, filled: tuple[Config, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = filled
    cache = Cache(config.cache)
    path, row = a_record(cache, kind)
    whole = path.read_bytes()
    flip(path, row["offset"] + 5)
    assert sana_pipe.stages.verify.run(config, as_json=True) == 4
    [finding] = last_json(capsys)["findings"]
    assert finding["records"] == [row["key"].hex()]
    assert finding["path"] == path.relative_to(cache.root).as_posix()
    seen = []
    for cls in (encoders.LatentEncoder, TextEncoder):
        real = cls.encode
        monkeypatch.setattr(cls, "encode", lambda self, batch, real=real: seen.append(len(batch)) or real(self, batch))
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert "restored" in capsys.readouterr().out
    assert len(seen) == 1, "only the damaged record's batch is encoded again"
    assert path.read_bytes() == whole
    assert sana_pipe.stages.verify.run(config) == 0


@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_a_caption_is_made_again_in_the_mode_that_made_it(
    mode: str, make_config: MakeConfig, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sana_pipe.stages.encode.run(make_config(tmp_path, f"text.mode={mode}"), data=str(photos))
    other = make_config(tmp_path, f"text.mode={'exact' if mode == 'auto' else 'auto'}")
    path, row = a_record(Cache(other.cache), "text")
    whole = path.read_bytes()
    flip(path, row["offset"] + 5)
    modes = []
    real = TextEncoder.encode
    monkeypatch.setattr(TextEncoder, "encode", lambda self, some: (modes.append(self.mode), real(self, some))[1])
    assert sana_pipe.stages.verify.run(other, repair=True) == 0
    assert modes == [mode]
    assert path.read_bytes() == whole


def test_where_the_bytes_differ_the_new_plan_names_the_mode_that_made_it(
    make_config: MakeConfig, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sana_pipe.stages.encode.run(make_config(tmp_path, "text.mode=exact"), data=str(photos))
    config = make_config(tmp_path)
    cache = Cache(config.cache)
    path, row = a_record(cache, "text")
    flip(path, row["offset"] + 5)
    real = TextEncoder.encode
    monkeypatch.setattr(TextEncoder, "encode", lambda self, some: [rows ^ np.uint16(1) for rows in real(self, some)])
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    encoding = cache.encodings("text")[0].name
    [commit] = index.commits(cache.files, encoding, 1)
    assert commit.provenance["text_mode"] == "exact"


def test_a_lost_shard_and_a_lost_table_are_made_again(filled: tuple[Config, Path]) -> None:
    config, _ = filled
    cache = Cache(config.cache)
    path, _ = a_record(cache, "latent")
    whole = path.read_bytes()
    path.unlink()
    assert sana_pipe.stages.verify.run(config) == 4
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert path.read_bytes() == whole
    segment = cache.files.document(layout.Paths.segment(cache.encodings("latent")[0].name, 0))
    flip(cache.files.path(layout.Paths.table(segment["table"], "arrow")), 100)
    assert sana_pipe.stages.verify.run(config) == 4
    assert sana_pipe.stages.verify.run(config, repair=True) == 0


def test_other_bytes_go_into_a_new_plan(
    filled: tuple[Config, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the encoder gives other bits than it gave, the damaged record is replaced, not mixed into the old shard."""
    config, _ = filled
    cache = Cache(config.cache)
    path, row = a_record(cache, "latent")
    flip(path, row["offset"] + 5)
    real = encoders.LatentEncoder.encode
    monkeypatch.setattr(
        encoders.LatentEncoder, "encode", lambda self, images: real(self, images) ^ np.uint16(1)
    )  # the last bit: what another GPU may do
    for repair in (True, False, True):  # the newest snapshot refers to the damaged record until there is another
        assert sana_pipe.stages.verify.run(config, repair=repair, as_json=True) == 4
        finding = last_json(capsys)["findings"][-1]
        assert finding["path"].startswith("snapshots/")
        assert finding["fix"].startswith("sana-pipe bucket --set ") and "--name" not in finding["fix"]
    sana_pipe.stages.bucket.run(config)
    assert sana_pipe.stages.verify.run(config) == 0
    loader = Loader(
        Cache(config.cache).open_snapshot(),
        loader_settings(stop_step=6),
    )
    assert len(list(loader)) == 6


def test_a_repair_without_its_source_says_where_to_put_it(
    filled: tuple[Config, Path], tmp_path: Path, make_config: MakeConfig
) -> None:
    from sana_pipe.base.errors import UserError
    from tests.support.messages import naming

    config, photos = filled
    own = tmp_path / "own" / "photos"
    shutil.copytree(photos, own)
    config = make_config(tmp_path / "own")
    sana_pipe.stages.encode.run(config, data=str(own))
    path, row = a_record(Cache(config.cache), "latent")
    flip(path, row["offset"])
    moved = Path(shutil.move(own, tmp_path / "moved"))
    with pytest.raises(UserError, match="--data photos=DIR"):
        sana_pipe.stages.verify.run(config, repair=True)
    for wrong in ("photos=", "photos"):
        with pytest.raises(UserError, match=naming(wrong)):
            sana_pipe.stages.verify.run(config, repair=True, data=(wrong,))
    assert sana_pipe.stages.verify.run(config, repair=True, data=(f"photos={moved}",)) == 0


def test_a_finding_is_said_when_it_is_found(
    filled: tuple[Config, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = filled
    path, row = a_record(Cache(config.cache), "text")
    flip(path, row["offset"] + 5)
    real = audit.Contents.verify

    def interrupted(*args: Any) -> Iterator[Finding]:
        for finding in real(*args):
            yield finding
            raise KeyboardInterrupt

    monkeypatch.setattr(audit.Contents, "verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sana_pipe.stages.verify.run(config)
    said = capsys.readouterr().out
    assert path.name in said and row["key"].hex() in said


def test_every_kind_of_damage_is_found(small_cache: Path, tmp_path: Path, make_config: MakeConfig) -> None:
    """One byte in each file of a cache in turn; the control without damage passes."""
    silent = []
    whole = Path(shutil.copytree(small_cache, tmp_path / "cache"))
    config = make_config(tmp_path)
    for path in sorted(p for p in whole.rglob("*") if p.is_file()):
        name = path.relative_to(whole)
        if name.parts[0] in ("reports", "tmp", "format.json"):
            continue
        good = path.read_bytes()
        flip(path, len(good) // 2)
        if not list(audit.verify(Cache(config.cache))):
            silent.append(str(name))
        path.write_bytes(good)
    assert not silent
    assert not list(audit.verify(Cache(config.cache)))


def test_status_counts_what_is_missing(
    filled: tuple[Config, Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_constants(monkeypatch, unit_sizes(2, 3))
    config, photos = filled
    assert sana_pipe.stages.status.run(config, as_json=True) == 0
    whole = last_json(capsys)
    assert whole["complete"]
    assert sum(s["records"] for s in whole["stores"].values()) == 25
    part = make_config(tmp_path / "part")
    sana_pipe.stages.encode.run(part, data=str(photos))
    for folder in ("segments/*", "units/*/*"):  # as if the plans were not finished, and one unit of each not done
        for path in [sorted(p.rglob("*.json"))[0] for p in Path(part.cache).glob(folder)]:
            path.unlink()
            (Path(part.cache) / "copies" / path.relative_to(part.cache)).unlink()
    capsys.readouterr()
    assert sana_pipe.stages.status.run(part, as_json=True) == 1
    result = last_json(capsys)
    missing = sum(s["records_missing"] for s in result["stores"].values())
    made = sum(s["records"] for s in result["stores"].values())
    assert 0 < missing < 25
    assert made + missing == 25


def test_gc_removes_only_what_nothing_needs(
    filled: tuple[Config, Path], capsys: pytest.CaptureFixture[str], photos: Path
) -> None:
    config, _ = filled
    root = Path(config.cache)
    sana_pipe.stages.encode.run(config, data=str(photos))
    sana_pipe.stages.gc.run(config, older_than_hours=0, as_json=True)
    before = last_json(capsys)
    assert {entry["why"] for entry in before["files"]} == {"merged into the segment of its plan"}
    orphan = next(root.glob("shards/latent-*/*/*.tar")).with_name("0" * 32 + ".tar")
    orphan.write_bytes(b"never committed")
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp" / "dead").write_bytes(b"x")
    sana_pipe.stages.gc.run(config, yes=True, as_json=True)
    assert last_json(capsys)["files"] == [], "young files are spared"
    sana_pipe.stages.gc.run(config, yes=True, older_than_hours=0)
    assert not orphan.exists()
    assert not (root / "tmp" / "dead").exists()
    assert sana_pipe.stages.verify.run(config) == 0
    assert sana_pipe.stages.encode.run(config, data=str(photos))["images"] == 0
    sana_pipe.stages.bucket.run(config)


def test_every_file_that_is_lost_is_named(
    filled: tuple[Config, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but advice and reports."""
    config, _ = filled
    root = tmp_path / "cache"
    free = ("tmp/", "reports/", "claims/")
    names = [p.relative_to(root).as_posix() for p in sorted(root.rglob("*")) if p.is_file()]
    names = [name for name in names if not name.startswith(free) and name != "format.json"]
    assert len(names) > 20
    silent = []
    for name in names:
        data = (root / name).read_bytes()
        (root / name).unlink()
        if sana_pipe.stages.verify.run(config) == 0:
            silent.append(name)
        (root / name).write_bytes(data)
    capsys.readouterr()
    assert not silent
    assert sana_pipe.stages.verify.run(config) == 0


def test_a_table_and_its_shard_that_are_both_damaged_do_not_end_the_audit(filled: tuple[Config, Path]) -> None:
    cache = Cache(filled[0].cache)
    path, row = a_record(cache, "latent")
    commit = next(c for c in index.commits(cache.files, cache.encodings("latent")[0].name, 0) if c.shard == path.stem)
    flip(path, row["offset"] + 1)
    flip(cache.files.path(layout.Paths.table(commit.table or "", "arrow")), 200)
    text, other = a_record(cache, "text")
    flip(text, other["offset"] + 1)
    result = {finding.path: finding for finding in audit.verify(cache)}
    unlisted = result[path.relative_to(cache.root).as_posix()]
    assert (unlisted.unit, unlisted.records) == (commit.unit, ())
    assert result[text.relative_to(cache.root).as_posix()].records == (other["key"].hex(),)
    assert sana_pipe.stages.verify.run(filled[0], repair=True) == 0
    assert sana_pipe.stages.verify.run(filled[0]) == 0


def test_a_cache_that_was_only_scanned_is_not_complete(
    make_config: MakeConfig, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sana_pipe.stages.encode.planning, "plan_captions", killed)
    with pytest.raises(KeyboardInterrupt):
        sana_pipe.stages.encode.run(config, data=str(photos))
    assert sana_pipe.stages.status.run(config) == 1
    monkeypatch.undo()
    sana_pipe.stages.encode.run(config, data=str(photos))
    assert sana_pipe.stages.status.run(config) == 0


def test_a_signal_in_the_last_unit_leaves_a_complete_cache(
    make_config: MakeConfig, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = sana_pipe.stages.encode.make_units, []

    def make(*arguments: Any) -> Any:
        made = real(*arguments)
        calls.append(made)
        if len(calls) == 2:  # captions, then pictures
            raise Stopped
        return made

    monkeypatch.setattr(sana_pipe.stages.encode, "make_units", make)
    config = make_config(tmp_path)
    with suppress(Stopped):
        sana_pipe.stages.encode.run(config, data=str(photos), task_index=0, task_count=2)
    assert len(calls) == 2 and sana_pipe.stages.status.run(config) == 0


def test_gc_spares_what_was_trained_on(filled: tuple[Config, Path], tmp_path: Path) -> None:
    config, _ = filled
    cache = Cache(config.cache)
    trained = cache.open_snapshot().id
    cache.keep(trained)
    cache.keep(trained)
    other = config.model_copy(update={"bucket": config.bucket.model_copy(update={"batch": 6})})
    assert sana_pipe.stages.bucket.run(other) != trained
    sana_pipe.stages.gc.run(config, yes=True, older_than_hours=0)
    assert cache.open_snapshot(trained).id == trained
    assert list(audit.verify(cache)) == []
