"""Runs and pictures that are taken out of a cache: what a run says while it reads, what it learned, how it goes on."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.forget
import sana_pipe.stages.train
from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache import readers
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.tools.reporting import run_copies
from sana_pipe.train.training import checkpoint
from tests.support.drawings import draw, paint
from tests.support.messages import naming

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., Config]


def test_checkpoints_that_learned_are_listed_and_runs_without_the_picture_go_on(
    make_config: MakeConfig,
    photos: Path,
    small_cache_copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = small_cache_copy.parent

    def settings(run: str, *more: str) -> Config:
        quick = ("train.save_every=1", "train.log_every=1", "train.microbatch=4")
        return make_config(folder, f"train.output={folder / run}", *quick, *more)

    few = folder / "few"
    few.mkdir()
    items = sorted(path for path in photos.iterdir() if path.suffix != ".txt" and path.with_suffix(".txt").exists())
    for path in items[:5]:
        for file in (path, path.with_suffix(".txt")):
            shutil.copy(file, few / file.name)
    sana_pipe.stages.encode.run(settings("few"), data=str(few))
    victim = f"photos: {items[-1].name}"
    sana_pipe.stages.bucket.run(settings("few", "bucket.sources.photos.weight=0"), name="few")
    sana_pipe.stages.bucket.run(settings("all", "bucket.sources.few.weight=0"), name="all")
    cache = Cache(settings("all").cache)
    all_id, few_id = cache.open_snapshot("all").id, cache.open_snapshot("few").id
    lived: list[readers.Run] = []
    real: Any = sana_pipe.stages.train.fit

    def fit(train: Any, task: Any, *rest: Any, **named: Any) -> Any:
        report = real(train, task, *rest, **named)
        lived.extend(readers.living(cache))
        with pytest.raises(UserError, match=naming(str(folder / "all"), platform.node())):
            sana_pipe.stages.forget.run(settings("all"), items=[victim])
        return report

    with monkeypatch.context() as patch:
        patch.setattr(sana_pipe.stages.train, "fit", fit)
        sana_pipe.stages.train.run(settings("all", "train.steps=1"), snapshot="all")
    assert [(run.snapshot, run.run) for run in lived] == [(all_id, str(folder / "all"))]
    assert not list(readers.living(cache)), "it has ended"
    assert readers.runs(cache, readers.trained_name(all_id)) == [(platform.node(), str(folder / "all"))]
    sana_pipe.stages.train.run(settings("few", "train.steps=1"), snapshot="few")
    capsys.readouterr()
    assert sana_pipe.stages.forget.run(settings("few"), items=[victim]) == 0
    said = capsys.readouterr().out
    learned = checkpoint.newest(folder / "all" / "checkpoints")
    assert f"checkpoint {learned} learned from them" in said
    assert str(checkpoint.newest(folder / "few" / "checkpoints")) not in said
    assert cache.open_snapshot("few").id not in (few_id, all_id) and cache.open_snapshot(few_id).id != few_id
    report = sana_pipe.stages.train.run(settings("few", "train.steps=2"), resume="auto")
    assert report.step == 2
    with pytest.raises(CacheError, match=naming(all_id)):
        sana_pipe.stages.train.run(settings("all", "train.steps=2"), resume="auto")
    capsys.readouterr()
    assert sana_pipe.stages.forget.run(settings("few"), items=[f"few: {items[0].name}"]) == 0
    said = capsys.readouterr().out
    for path in checkpoint.complete(folder / "few" / "checkpoints"):
        assert f"checkpoint {path} learned from them" in said, "under the earlier id, too"


def test_drawings_and_reports_of_a_run_that_show_a_caption_go(tmp_path: Path) -> None:
    encoding = LatentEncoding(weights="w", compression=8, channels=4)
    secret, other = draw(tmp_path, 1, encoding, ["a secret", "x"]), draw(tmp_path, 2, encoding, ["a public"])
    for path in (secret, other):
        paint(path)
    (tmp_path / "report.html").write_text("<img alt='beach.jpg'>")
    (tmp_path / "other.html").write_text("nothing of it")
    (tmp_path / "notes.txt").write_text("a secret, noted by hand")
    lines = run_copies.remove(tmp_path, ["a secret"], ["beach.jpg"])
    assert not secret.exists() and not secret.with_suffix("").exists() and not (tmp_path / "report.html").exists()
    assert other.exists() and other.with_suffix("").exists() and (tmp_path / "other.html").exists()
    assert len(lines) == 3 and any(str(tmp_path / "notes.txt") in line and "yourself" in line for line in lines)
    assert run_copies.remove(tmp_path / "nowhere", ["a secret"], []) == []
