"""Z-Image from pictures to its pipeline: encode, bucket, check, train, sample, export; `ZImagePipeline` draws from the
export what `sample` draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.check
import sana_pipe.stages.encode
import sana_pipe.stages.export
import sana_pipe.stages.sample
import sana_pipe.stages.train
from sana_pipe.data.cache.cache import Cache
from sana_pipe.tools.reporting.draw_latents import SnapshotTensors
from sana_pipe.train.models.sampler import noise_of
from sana_pipe.train.models.zimage_config import ZImageConfig
from tests.support import tiny_models, tiny_zimage
from tests.support.checkpoints import load_model_state
from tests.support.drawings import draw_for

SHAPE = ZImageConfig(
    in_channels=16,
    dim=32,
    n_layers=2,
    n_refiner_layers=1,
    n_heads=2,
    n_kv_heads=2,
    cap_feat_dim=128,
    axes_dims=(4, 6, 6),
    axes_lens=(1024, 64, 64),
)
OPTIONS = (
    *("model.arch=null", "train.device=cpu", "train.precision=fp32", "train.compile=none", "train.steps=2"),
    *("train.optim.lr=1e-3", "train.optim.warmup_steps=0", "train.flow.shift=6", "train.ema={}"),
    *("data.buckets=[[64, 64], [48, 80], [80, 48]]", "sample.steps=4", "sample.guidance=4"),
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_from_pictures_to_the_pipeline(
    tmp_path: Path, photos: Path, make_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from diffusers import ZImagePipeline

    encoders = tiny_models.build_qwen3(tiny_models.build_kl(tmp_path / "encoders"))
    tiny_zimage.save(tmp_path, SHAPE)
    places = f"vae.id={encoders}", f"text.id={encoders}", f"model.weights={{id: {tmp_path / 'transformer'}}}"
    config = make_config(tmp_path, *places, *OPTIONS)
    sana_pipe.stages.encode.run(config, data=str(photos))
    sana_pipe.stages.bucket.run(config)
    assert sana_pipe.stages.check.run(config) == 0, capsys.readouterr()
    other = tiny_models.build_kl(tmp_path / "sd3", scaling_factor=1.5305, shift_factor=0.0609)
    capsys.readouterr()
    for option, named in ((f"vae.id={other}", ("vae.id", "1.5305", "0.3611")), ("text.max_length=993", ("992", "993"))):
        assert sana_pipe.stages.check.run(make_config(tmp_path, *places, *OPTIONS, option)) != 0
        problems = capsys.readouterr().err
        assert all(word in problems for word in named), problems
    sana_pipe.stages.train.run(config, log=lambda line: None)
    result = sana_pipe.stages.sample.run(config, "auto", None, tmp_path / "samples", 2, base=False)
    assert result.count == 2 and result.sheet.is_file()
    out = sana_pipe.stages.export.run(config, "auto", tmp_path / "export")

    index = json.loads((out / "model_index.json").read_text())
    assert index["_class_name"] == "ZImagePipeline" and index["text_encoder"] == ["transformers", "Qwen3Model"]
    pipe = ZImagePipeline.from_pretrained(out)
    pipe.set_progress_bar_config(disable=True)
    snapshot = Cache(config.cache).open_snapshot()
    spec, weights = load_model_state(tmp_path / "run/checkpoints/step-00000002")
    assert spec == SHAPE
    (drawn,) = draw_for(config, spec, dict(weights), snapshot, [0])
    records, entry = SnapshotTensors(snapshot), snapshot.sample(0)
    at = max(range(len(entry.captions)), key=lambda i: entry.captions[i].weight)
    rows, null = (each.float() for each in (records.text(entry, at), records.null()))
    theirs = pipe(
        latents=noise_of(drawn.sample_id, tuple(drawn.cached.shape), config.sample.seed),
        prompt_embeds=[rows],
        negative_prompt_embeds=[null],
        height=drawn.bucket[0],
        width=drawn.bucket[1],
        num_inference_steps=config.sample.steps,
        guidance_scale=config.sample.guidance - 1,
        output_type="latent",
    ).images
    assert (theirs[0] - drawn.latent).abs().max() <= 1e-4 * drawn.latent.abs().max()
    own, _ = pipe.encode_prompt(drawn.caption, do_classifier_free_guidance=False, device="cpu")
    assert own[0].shape == rows.shape and (own[0] - rows).abs().max() <= 2**-7 * rows.abs().max()
    code = (out / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace("PATH/OF/THIS/FOLDER", str(out)).replace("bfloat16", "float32"), names)
    assert names["image"].size == (config.data.resolution, config.data.resolution)
