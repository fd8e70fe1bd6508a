"""A LoRA of the demonstration's model learns a photograph by a trigger word; `preserve` keeps the other captions."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.export
import sana_pipe.stages.sample
import sana_pipe.stages.train
from sana_pipe.config import Config, load
from sana_pipe.tools.demo import photographs
from sana_pipe.train.training import metrics

TRIGGER = "a zorp photograph"
NEW = "motorcycle"
STEPS = 200


def configuration(folder: Path, tiny_repo: Path, run: str, *settings: str) -> Config:
    own = [f"cache={folder / 'cache'}", f"train.output={folder / run}", f"vae.id={tiny_repo}", f"text.id={tiny_repo}"]
    return load("tiny", [*own, "train.log_every=10", *settings])


def weights_of(*sources: str) -> list[str]:
    """Only these sources are in the snapshot."""
    return [f"bucket.sources.{name}.weight={float(name in sources):g}" for name in ("known", "new")]


@pytest.fixture(scope="module")
def folder(tiny_repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that knows eight photographs, and a ninth with the trigger word as its caption."""
    path = tmp_path_factory.mktemp("learning")
    known = photographs.ROUNDS["photos"]
    photographs.demo_photos(path / "known", known)
    photographs.demo_photos(path / "new", [photo for photo in photographs.ROUNDS["more"] if photo.name == NEW])
    (path / "new" / f"{NEW}.txt").write_text(TRIGGER)
    (path / "prompts.txt").write_text("".join(f"{photo.caption}\n" for photo in known))
    config = configuration(path, tiny_repo, "base", "train.steps=400")
    for name in ("known", "new"):
        sana_pipe.stages.encode.run(config, str(path / name), prompts=str(path / "prompts.txt"))
    for name, sources in {"new": ["new"], "all": ["known", "new"], "known": ["known"]}.items():
        batch = "bucket.batch=4" if name == "new" else "bucket.batch=12"
        sana_pipe.stages.bucket.run(configuration(path, tiny_repo, "base", batch, *weights_of(*sources)), name=name)
    sana_pipe.stages.train.run(config, snapshot="known", log=lambda line: None)
    sana_pipe.stages.export.run(config, "auto", path / "exported")
    return path


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_lora_learns_a_photograph_and_preserve_keeps_the_others(
    folder: Path, tiny_repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captions = (folder / "prompts.txt").read_text().splitlines()
    rises: dict[str, float] = {}
    seconds: dict[str, float] = {}
    own: dict[str, set[str]] = {}
    kept = {"lora": [], "preserved": [f"train.preserve={{prompt: {json.dumps(captions[::2])}}}"]}
    for name, settings in kept.items():
        options = [
            "model.arch=null",
            f"model.weights={{id: {folder / 'exported'}}}",
            f"train.steps={STEPS}",
            "train.adapter={rank: 8, targets: all}",
            f"train.validation={{snapshot: known, every: {STEPS}}}",
            "train.optim.lr=2e-3",
            "train.optim.warmup_steps=10",
            *settings,
        ]
        config = configuration(folder, tiny_repo, name, *options)
        began = time.process_time()
        sana_pipe.stages.train.run(config, snapshot="new", log=lambda line: None)
        seconds[name] = time.process_time() - began
        events = metrics.read_events(folder / name / "metrics.jsonl")["validation"]
        rises[name] = events[-1]["loss"] - events[0]["loss"]
        sana_pipe.stages.sample.run(config, "auto", "all", folder / f"{name} drawn", count=9)
        rows = [json.loads(line) for line in (folder / f"{name} drawn/samples.jsonl").read_text().splitlines()]
        own[name] = {row["caption"] for row in rows if row["nearest_is_own"]}
    with capsys.disabled():
        for name, rise in rises.items():
            drawn = f"{len(own[name])} of 9 pictures are nearest to their own"
            print(f"\n{name}: loss of the other captions +{rise:.2f}, {drawn}, {seconds[name]:.0f} s of CPU time")
    assert all(TRIGGER in drawn for drawn in own.values())
    assert 0 < rises["preserved"] < 0.5 * rises["lora"], "of eight captions four are preserved by name"
    assert max(seconds.values()) < 120, "of CPU time, whatever else the machine does"
