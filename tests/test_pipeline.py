"""Laws of the whole: cached training is training with the encoders in the loop; real photographs go all the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.train
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.images import decoding
from sana_pipe.data.loader.loader import Batch, Loader, bf16
from sana_pipe.data.sources import caption_rules
from sana_pipe.train.models.flow_matching import FlowMatching
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from tests.support.constants import set_constants
from tests.support.loading import loader_settings

MakeConfig = Callable[..., Config]
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


class InTheLoop:
    """What a trainer that holds the encoders does: encode a sample's file and caption when the sample is drawn."""

    def __init__(self, config: Config, snapshot: Snapshot, sources: dict[str, Path]):
        self.snapshot, self.sources = snapshot, sources
        self.prompting = config.text.prompting
        self.vae = encoders.LatentEncoder.load(config.vae, "cpu")
        self.text = TextEncoder.load(config.text, "cpu")
        self.rows = {snapshot.sample_id(row): row for row in range(len(snapshot))}

    def batch(self, cached: Batch) -> Batch:
        """The same visits (same noise, times and padded length), with latents and rows encoded now, one at a time."""
        latents, rows = [], torch.zeros_like(cached.captions)
        mask = torch.zeros_like(cached.mask)
        for i, sample_id in enumerate(cached.sample_ids):
            source, item = self.snapshot.source_item(self.rows[sample_id])
            path = self.sources[source] / item
            picture = decoding.load(path.read_bytes(), cached.bucket, decoder=decoding.choose("auto"))
            latents.append(bf16(self.vae.encode(picture[None])[0]))
            caption = caption_rules.normalise(path.with_suffix(".txt").read_text(), self.prompting)
            alone = bf16(self.text.encode([caption])[0])
            rows[i, : len(alone)], mask[i, : len(alone)] = alone, True
        return replace(cached, latents=torch.stack(latents), captions=rows, mask=mask)


def losses(config: Config, batches: list[Batch]) -> list[float]:
    """Losses of a short training run, written down without the trainer."""
    assert config.model.arch is not None
    torch.manual_seed(0)
    model = SanaTransformer.from_scratch(SanaConfig.from_arch(config.model.arch, 8), 0)
    flow = FlowMatching(config.train.flow)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    result = []
    for batch in batches:
        sigma, times = flow.sigmas(batch.logit)
        latents = batch.latents.float()
        prediction = model(flow.noised(latents, batch.noise, sigma), batch.captions.float(), batch.mask, times)
        loss = flow.loss(prediction, flow.target(latents, batch.noise)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


def test_cached_training_is_training_with_the_encoders_in_the_loop(
    photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, {"sana_pipe.data.encoding.plan.CPU_TEXT_BATCH": 1})
    config = make_config(tmp_path, "encode.image_batch=1", "bucket.batch=4")
    sana_pipe.stages.encode.run(config, data=str(photos))
    sana_pipe.stages.bucket.run(config)
    snapshot = Cache(config.cache).open_snapshot()
    loader = Loader(
        snapshot,
        loader_settings(seed=3, microbatch=4, stop_step=10),
    )
    cached = [batch for batches, _ in loader for batch in batches]
    loop = InTheLoop(config, snapshot, {"photos": photos})
    live = [loop.batch(batch) for batch in cached]
    one, other = losses(config, cached), losses(config, live)
    assert np.abs(np.array(one) - np.array(other)).max() <= 1e-5
    # The comparison can fail: one caption in another's place is seen.
    wrong = [replace(b, captions=b.captions.roll(1, 0), mask=b.mask.roll(1, 0)) for b in live]
    assert np.abs(np.array(one) - np.array(losses(config, wrong))).max() > 1e-5


def test_a_run_is_only_its_snapshot(photos: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    """Train where neither pictures nor encoders are, on a moved cache; then bring the pictures back and go on."""
    here = tmp_path / "here"
    source = Path(shutil.copytree(photos, tmp_path / "photos"))
    config = make_config(here)
    sana_pipe.stages.encode.run(config, data=str(source))
    sana_pipe.stages.bucket.run(config)
    there = tmp_path / "there"
    shutil.copytree(here / "cache", there / "cache")
    shutil.rmtree(here)
    shutil.move(source, tmp_path / "gone")
    moved = make_config(
        there, "train.steps=4", "train.log_every=1", "train.save_every=2", "vae.id=/nowhere", "text.id=/nowhere"
    )
    report = sana_pipe.stages.train.run(moved)
    assert report.step == 4
    rows = [json.loads(line) for line in (there / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    shutil.move(tmp_path / "gone", source)
    assert sana_pipe.stages.encode.run(make_config(there), data=str(source))["images"] == 0


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the sample pictures do not lie beside this checkout")
def test_real_photographs_go_all_the_way(tiny_repo: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path, "train.steps=50", "train.log_every=10", "train.optim.warmup_steps=5")
    photos = sana_pipe.stages.encode.run(config, data=str(SHARED / "photos"))
    assert photos["images"] == photos["items"] - photos["rejects"] > 50
    exif = tmp_path / "exif"
    shutil.copytree(SHARED / "exif", exif, ignore=shutil.ignore_patterns("LICENSE"))
    for path in exif.glob("*.jpg"):
        path.with_suffix(".txt").write_text(f"a {path.stem.split('_')[0].lower()}")
    turned = sana_pipe.stages.encode.run(config, data=str(exif))
    assert (turned["rejects"], turned["images"]) == (0, turned["items"])
    sana_pipe.stages.bucket.run(config)
    snapshot = Cache(config.cache).open_snapshot()
    assert len(snapshot) == photos["images"] + turned["images"]
    shapes = {
        snapshot.source_item(row)[1].split("_")[0]: snapshot.buckets[snapshot.sample(row).bucket]
        for row in range(len(snapshot))
        if snapshot.source_item(row)[0] == "exif"
    }
    assert shapes["Landscape"].width > shapes["Landscape"].height
    assert shapes["Portrait"].height > shapes["Portrait"].width
    report = sana_pipe.stages.train.run(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [row["loss"] for row in rows if "loss" in row]
    assert report.step == 50
    assert curve[-1] < curve[0]
