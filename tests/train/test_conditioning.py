"""The trained model draws the picture whose caption it is given, and a model trained on shuffled captions does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.sample
import sana_pipe.stages.train
from sana_pipe.config import Config

MakeConfig = Callable[..., Config]
SHORT = ("train.steps=700", "train.save_every=700", "train.log_every=100", "sample.steps=12")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_model_draws_what_the_caption_says(photos: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    true = make_config(tmp_path / "true", *SHORT)
    sana_pipe.stages.encode.run(true, data=str(photos))
    sana_pipe.stages.bucket.run(true)
    sana_pipe.stages.train.run(true)
    drawn = sana_pipe.stages.sample.run(true, "auto", None, tmp_path / "drawn", count=12)
    assert drawn.count >= 8
    assert drawn.nearest >= 0.8 * drawn.count

    # The same check on a model whose captions were shuffled among the pictures must fail.
    mixed = tmp_path / "mixed" / "photos"
    shutil.copytree(photos, mixed)
    texts = sorted(mixed.glob("*.txt"))
    words = [path.read_text() for path in texts]
    for path, word in zip(texts, words[5:] + words[:5], strict=True):
        path.write_text(word)
    shuffled = make_config(tmp_path / "shuffled", *SHORT)
    sana_pipe.stages.encode.run(shuffled, data=str(mixed))
    sana_pipe.stages.bucket.run(shuffled)
    sana_pipe.stages.train.run(shuffled)
    asked = make_config(tmp_path / "true", *SHORT, f"train.output={shuffled.train.output}")
    wrong = sana_pipe.stages.sample.run(asked, "auto", None, tmp_path / "wrong", count=12)
    assert wrong.nearest < 0.8 * wrong.count
