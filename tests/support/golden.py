"""The golden cache and checkpoint. `python -m tests.support.golden` records them anew when a format has changed; the
orders of the snapshots and the losses of the run must stay."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
import tempfile
from pathlib import Path

import pytest
import torch

import sana_pipe.stages.bucket
import sana_pipe.stages.pack
from sana_pipe.base.launch import Launch
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.loader.loader import Loader
from sana_pipe.data.snapshots import making
from sana_pipe.train.training import metrics
from sana_pipe.train.training.trainer import fit
from tests.support import synthetic
from tests.support.loading import loader_settings
from tests.support.trees import unpack
from tests.support.workers import tiny_run

GOLDEN = Path(__file__).resolve().parents[1] / "files" / "golden.tar.xz"
PAD = 8
"""`PAD_TEXT_MULTIPLE` of the recorded snapshots."""
SETTINGS = {
    "plain": [],
    "chosen": ["bucket.filter=score >= 2", "bucket.batch=3", "bucket.remainder=drop", "bucket.heldout=0.2"],
    "windows": ["bucket.batch=2"],
}


def config(golden: Path, *overrides: str) -> Config:
    return synthetic.config(golden / "cache", *overrides)


def run_config(golden: Path, steps: int) -> Config:
    heads = {"num_attention_heads": 2, "num_cross_attention_heads": 1}
    return tiny_run.config(golden / "run", steps=steps, layers=2, arch=heads, ema={"decay": 0.9})


def losses_after(golden: Path, start: int) -> list[float]:
    """Resume the run and return its losses up to step 8."""
    settings = run_config(golden, 8)
    fit(settings.train, tiny_run.task(settings), Launch(), resume="auto", log=lambda line: None)
    return [row["loss"] for row in metrics.read(golden / "run" / "metrics.jsonl") if row["step"] > start]


def batch_digests(cache: Path, snapshot: str) -> list[str]:
    """A digest of the ids and tensors of each step's batch."""
    loader = Loader(
        Cache(cache).open_snapshot(snapshot),
        loader_settings(
            seed=7,
            phase=1,
            microbatch=64,
            caption_drop=0.2,
            stop_step=40,
            length_window=3 if snapshot == "windows" else 1,
        ),
    )
    steps = []
    for parts, _ in loader:
        digest = hashlib.sha256()
        for batch in parts:
            digest.update(repr((batch.sample_ids, batch.bucket)).encode())
            bits = (batch.latents.view(torch.int16), batch.captions.view(torch.int16))
            for tensor in (*bits, batch.mask, batch.noise, batch.logit):
                digest.update(tensor.numpy().tobytes())
        steps.append(digest.hexdigest()[:16])
    return steps


def record() -> None:
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "PAD_TEXT_MULTIPLE", PAD)
        folder = Path(temporary)
        unpack(GOLDEN, folder)
        figures = json.loads((folder / "figures.json").read_text())
        shutil.rmtree(folder / "cache")
        synthetic.add(config(folder), "photos", synthetic.pictures(60))
        synthetic.add(config(folder), "more", synthetic.pictures(30, "more"))
        made = {
            name: sana_pipe.stages.bucket.run(config(folder, *options), name=name) for name, options in SETTINGS.items()
        }
        made["packed"] = str(sana_pipe.stages.pack.run(config(folder, "bucket.pack_mib=1"), "plain", "packed"))
        orders = {name: batch_digests(folder / "cache", name) for name in made}
        assert all(orders[name] == figures["orders"][name] for name in SETTINGS), "another order"
        figures |= {"snapshots": made, "orders": orders}
        shutil.rmtree(folder / "run")
        settings = run_config(folder, 4)
        fit(settings.train, tiny_run.task(settings), Launch(), log=lambda line: None)
        shutil.copytree(folder / "run" / "checkpoints", folder / "four" / "run" / "checkpoints")
        shutil.rmtree(folder / "run")
        shutil.copytree(folder / "four" / "run", folder / "run")
        assert losses_after(folder / "four", 4) == pytest.approx(figures["losses"], rel=1e-5), "other losses"
        (folder / "figures.json").write_text(json.dumps(figures, indent=1))
        shutil.rmtree(folder / "cache" / "tmp", ignore_errors=True)
        with tarfile.open(GOLDEN, "w:xz") as tar:
            for name in ("cache", "figures.json", "run"):
                tar.add(folder / name, name)


if __name__ == "__main__":
    record()
