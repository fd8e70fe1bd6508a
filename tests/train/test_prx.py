"""PRX, the third model: its values, gradients, runs and exports are those of diffusers' class and pipeline."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import PRXPipeline, PRXTransformer2DModel, SanaTransformer2DModel
from torch.utils.flop_counter import FlopCounterMode

import sana_pipe.stages.bucket
import sana_pipe.stages.check
import sana_pipe.stages.encode
import sana_pipe.stages.export
import sana_pipe.stages.sample
import sana_pipe.stages.train
from sana_pipe.base.errors import ConfigError
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.tools.planning import predict
from sana_pipe.tools.reporting import draw_latents, export_folder
from sana_pipe.tools.reporting.draw_latents import SnapshotTensors
from sana_pipe.train.models.config import ModelConfig
from sana_pipe.train.models.prx import PRX
from sana_pipe.train.models.sampler import noise_of, pad_rows
from sana_pipe.train.models.spec import spec_of
from sana_pipe.train.training import checkpoint, metrics
from tests.support import tiny_models
from tests.support.checkpoints import load_model_state
from tests.support.drawings import draw_for
from tests.support.messages import naming
from tests.support.tiny_prx import of_diffusers

TINY = PRX(in_channels=16, patch_size=1, context_in_dim=128, hidden_size=32, num_heads=4, depth=2, axes_dim=(4, 4))
RELEASED = PRX(in_channels=32, patch_size=1)
"""PRX 1.3B on the latents of DC-AE."""
OPTIONS = ["train.device=cpu", "train.precision=fp32", "train.log_every=1", "train.ema={}", "train.flow.shift=3"]
OPTIONS += ["model.arch=null", "train.optim.warmup_steps=0", "train.compile=none", "train.optim.lr=1e-3"]


def inputs(rows: int = 7) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    mask = torch.arange(rows)[None] < torch.tensor([3, rows])[:, None]
    return torch.randn(2, 16, 6, 8), torch.randn(2, rows, 128), mask, torch.tensor([10.0, 900.0])


@pytest.mark.parametrize("packed", [False, True])
def test_outputs_and_gradients_equal_those_of_diffusers(packed: bool) -> None:
    theirs = of_diffusers(TINY)
    ours = TINY.loaded({name: value.clone() for name, value in theirs.state_dict().items()})
    latents, captions, mask, times = inputs()
    output = ours(latents, captions[mask] if packed else captions, mask, times)
    expected = theirs(latents, times / 1000, captions, mask).sample
    assert (output - expected).abs().max() <= 1e-6 * expected.abs().max()
    output.square().mean().backward()
    expected.square().mean().backward()
    named = dict(theirs.named_parameters())
    assert named.keys() == dict(ours.named_parameters()).keys() == TINY.shapes().keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - named[name].grad).abs().max() <= 1e-5 * named[name].grad.abs().max(), name


def test_padding_and_time_matter() -> None:
    ours = TINY.loaded(of_diffusers(TINY).state_dict())
    latents, captions, mask, times = inputs()
    output = ours(latents, captions, mask, times)
    other = captions.clone()
    other[0, 3:] += 1
    assert torch.equal(ours(latents, other, mask, times), output), "rows behind the mask"
    assert (ours(latents, captions, mask, times + 50) - output).abs().max() > 1e-3
    assert (ours(latents, captions, torch.ones_like(mask), times) - output)[0].abs().max() > 1e-4


def test_operations_are_counted() -> None:
    """torch counts no attention on a CPU."""
    latents, captions, mask, times = inputs()
    ours = TINY.loaded(of_diffusers(TINY).state_dict())
    with FlopCounterMode(display=False) as counter:
        ours(latents, captions, mask, times).sum().backward()
    samples, tokens, rows = 2, 48, 14
    attention = 3 * 2 * TINY.depth * 2 * (samples * tokens * tokens + rows * tokens) * TINY.hidden_size
    assert counter.get_total_flops() + attention == TINY.training_flops(samples, tokens, rows)
    assert sum(torch.Size(shape).numel() for shape in RELEASED.shapes().values()) == 1_170_576_928


def test_start_values_are_those_that_diffusers_class_begins_with() -> None:
    torch.manual_seed(0)
    theirs, values = PRXTransformer2DModel(**{**asdict(TINY), "axes_dim": [4, 4]}), TINY.initial(3)
    for name, parameter in theirs.named_parameters():
        drawn = values.read(name, [0] * parameter.dim(), parameter.shape)
        spread = float(parameter.detach().std())
        assert (float(drawn.std()) == 0) == (spread == 0), name
        if parameter.dim() == 2:
            assert float(drawn.std()) == pytest.approx(spread, rel=0.2, abs=1e-9), name


def test_defaults_are_those_of_diffusers() -> None:
    theirs = inspect.signature(PRXTransformer2DModel.__init__).parameters
    ours = {name: value for name, value in PRX().to_dict().items() if not name.startswith("_")}
    expected = {name: parameter.default for name, parameter in theirs.items() if name != "self"}
    assert ours == {**expected, "axes_dim": [32, 32]} and expected["axes_dim"] is None
    for given in ({}, {"axes_dim": None}):
        assert spec_of({"_class_name": PRX.class_name, **given}) == PRX()
    for name in ("prx-512-t2i-dc-ae", "prx-512-t2i-dc-ae-sft"):
        model = ModelConfig.model_validate({"weights": f"Photoroom/{name}"})
        assert predict.architecture(model, 512, predict.Data({}, None, 256)) == RELEASED


def test_what_is_not_implemented_is_refused_by_name() -> None:
    assert spec_of(TINY.to_dict()) == TINY
    for change in ({"bottleneck_size": 8}, {"resolution_embeds": True}, {"another": 1}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            spec_of({**TINY.to_dict(), **change})
    with pytest.raises(ConfigError, match="num_heads"):
        spec_of({**TINY.to_dict(), "num_heads": 2})
    RELEASED.check_factors("Sana's", "", 0.41407, 0.0)
    with pytest.raises(ConfigError, match=naming("vae.id", 0.41407, 0.3189)):
        RELEASED.check_factors("another DC-AE's", "vae.id", 0.3189, 0.0)
    for sizes, option in (((2, 1), "tp_size"), ((1, 2), "pp_size")):
        with pytest.raises(ConfigError, match=option):
            TINY.check_parallel(*sizes)
    with pytest.raises(ConfigError, match=naming("axes_dim", "[3, 5]")):
        spec_of({**TINY.to_dict(), "axes_dim": [3, 5]})
    with pytest.raises(ConfigError, match="in_channels is 16"):
        TINY.check_widths("these latents", "another model", channels=32)
    with pytest.raises(ConfigError, match="caption_channels is 128"):
        TINY.check_widths("these rows", "another model", text_width=2560)


# --------------------------------------------------------------------------------------- from the cache to a pipeline


@pytest.fixture(scope="module")
def text(made_once: Callable[..., Path]) -> Path:
    return made_once("t5gemma", tiny_models.build_t5gemma)


@pytest.fixture(scope="module")
def cache(
    tmp_path_factory: pytest.TempPathFactory, small_cache: Path, photos: Path, make_config: Any, text: Path
) -> Path:
    """A copy of a cache of Sana with the captions by T5Gemma, too, and a snapshot of both."""
    root = tmp_path_factory.mktemp("prx-cache")
    shutil.copytree(small_cache, root / "cache")
    config = make_config(root, f"text.id={text}")
    sana_pipe.stages.encode.run(config, data=str(photos))
    sana_pipe.stages.bucket.run(config)
    return root / "cache"


def test_the_latents_of_a_sana_cache_serve(cache: Path, small_cache: Path) -> None:
    before, after = Cache(small_cache), Cache(cache)
    kinds = {LatentEncoding: True, TextEncoding: False}
    for kind, same in kinds.items():
        then, now = (each.open_snapshot().encoding(kind) for each in (before, after))
        assert (then == now) == same
    latents = after.open_snapshot().encoding(LatentEncoding).name
    shards = [{path.name for path in (each / "shards" / latents).rglob("*.tar")} for each in (small_cache, cache)]
    assert shards[0] == shards[1] != set(), "0 new pictures"


def test_encode_counts_the_captions_that_cleaning_empties(
    cache: Path, photos: Path, make_config: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(cache, tmp_path / "cache")
    shutil.copytree(photos, tmp_path / photos.name)
    captions = sorted((tmp_path / photos.name).glob("*.txt"))
    for path in captions[:2]:
        path.write_text("https://www.example.com/x")
    config = make_config(tmp_path, f"text.id={text}")
    sana_pipe.stages.encode.dry_run(config, data=str(tmp_path / photos.name), probe=False)
    sana_pipe.stages.encode.run(config, data=str(tmp_path / photos.name))
    lines = [line for line in capsys.readouterr().out.splitlines() if "cleaning" in line]
    assert len(lines) == 2 and all("2 pictures" in line and captions[0].stem in line for line in lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: Path, make_config: Any, text: Path) -> SimpleNamespace:
    """A run of four steps; and one that was stopped after two and resumed."""
    root = tmp_path_factory.mktemp("prx")
    start = of_diffusers(TINY)
    start.save_pretrained(root / "start")

    def config(name: str, *more: str) -> Any:
        (root / name).mkdir(exist_ok=True)
        given = [*OPTIONS, f"model.weights={{id: {root / 'start'}}}", "train.steps=4", *more]
        return make_config(root / name, f"cache={cache}", f"text.id={text}", *given)

    lines: list[str] = []
    whole = config("whole")
    sana_pipe.stages.train.run(whole, log=lines.append)
    sana_pipe.stages.train.run(config("stopped", "train.steps=2"), log=lambda line: None)
    sana_pipe.stages.train.run(config("stopped"), resume="auto", log=lambda line: None)
    return SimpleNamespace(root=root, start=start, config=config, whole=whole, lines=lines)


LAST = "run/checkpoints/step-00000004"


def test_it_trains_and_a_resumed_run_is_the_uninterrupted_one(run: SimpleNamespace) -> None:
    rows = [metrics.read(run.root / name / "run/metrics.jsonl") for name in ("whole", "stopped")]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]] and len(rows[0]) == 4
    assert all(row["model_tflops"] > 0 for row in rows[0])
    one, other = (checkpoint.read_document(run.root / name / LAST).files for name in ("whole", "stopped"))
    one.pop(".metadata"), other.pop(".metadata")
    assert one == other
    spec, weights = load_model_state(run.root / "whole" / LAST)
    assert spec == TINY
    moved = {name for name, value in run.start.named_parameters() if not torch.equal(value, weights[name])}
    assert moved == weights.keys()


def test_diffusers_pipeline_loads_the_export_and_draws_what_sample_draws(
    run: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers builds the text encoder by the sizes of T5Gemma-2B, whatever its `config.json` says: a small one needs
    transformers' class."""
    from diffusers.pipelines import prx
    from diffusers.pipelines.prx import pipeline_prx
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    monkeypatch.setattr(prx, "T5GemmaEncoder", T5GemmaEncoder, raising=False)
    out = sana_pipe.stages.export.run(run.config("whole"), "auto", run.root / "export")
    index = json.loads((out / "model_index.json").read_text())
    assert index["_class_name"] == "PRXPipeline" and index["text_encoder"] == ["prx", "T5GemmaEncoder"]
    assert index["scheduler"] == ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    pipe = PRXPipeline.from_pretrained(out)
    pipe.set_progress_bar_config(disable=True)

    snapshot = Cache(cache).open_snapshot()
    spec, weights = load_model_state(run.root / "whole" / LAST)
    (drawn,) = draw_for(run.whole, spec, dict(weights), snapshot, [0])
    records, entry = SnapshotTensors(snapshot), snapshot.sample(0)
    at = max(range(len(entry.captions)), key=lambda i: entry.captions[i].weight)
    rows, mask = pad_rows([records.null(), records.text(entry, at)])
    latents = noise_of(drawn.sample_id, tuple(drawn.cached.shape), run.whole.sample.seed)
    size = {"height": drawn.bucket[0], "width": drawn.bucket[1], "use_resolution_binning": False}
    given = {"prompt_embeds": rows[1:], "prompt_attention_mask": mask[1:]}
    given |= {"negative_prompt_embeds": rows[:1], "negative_prompt_attention_mask": mask[:1]}
    settings = {"num_inference_steps": run.whole.sample.steps, "guidance_scale": run.whole.sample.guidance}
    theirs = pipe(latents=latents, output_type="latent", **given, **size, **settings).images
    assert (theirs[0] - drawn.latent).abs().max() <= 1e-4 * drawn.latent.abs().max()

    monkeypatch.setattr(pipeline_prx, "ftfy", SimpleNamespace(fix_text=str), raising=False)
    code = (out / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace("PATH/OF/THIS/FOLDER", str(out)).replace("bfloat16", "float32"), names)
    side = run.whole.data.resolution
    assert names["image"].size == (side, side)


def test_a_whole_t5gemma_is_no_part_of_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["T5GemmaForConditionalGeneration"]}))
    with pytest.raises(ConfigError, match="decoder"):
        export_folder.class_of(tmp_path, "text_encoder", PRX.libraries)


def test_a_lora_is_exported_in_its_base_and_train_says_so_before(run: SimpleNamespace) -> None:
    lines: list[str] = []
    config = run.config("lora", "train.steps=1", "train.adapter={rank: 2}")
    sana_pipe.stages.train.run(config, log=lines.append)
    assert any("--format merged" in line for line in lines[:10])
    with pytest.raises(ConfigError, match="comfyui"):
        sana_pipe.stages.export.run(config, "auto", run.root / "file", form="comfyui")
    for only, noted in (("txt_in", True), (None, False)):
        more = [f"train.only=[{only}]"] if only else []
        given, lines = run.config(f"only {only}", "train.steps=1", *more), []
        sana_pipe.stages.train.run(given, log=lines.append)
        assert any("--format merged" in line for line in lines) == noted, "of train.only, not of a whole model"
    out = sana_pipe.stages.export.run(config, "auto", run.root / "merged")
    assert (out / "model_index.json").is_file() and not list(out.glob("*.safetensors"))


def test_the_text_encoder_of_another_model_is_not_exported(run: SimpleNamespace, make_config: Any) -> None:
    gemma = make_config(run.root).text.id
    with pytest.raises(ConfigError, match="t5gemma"):
        sana_pipe.stages.export.run(run.config("whole", f"text.id={gemma}"), "auto", run.root / "other")


def test_a_sana_from_scratch_on_another_encoder_is_fine_tuned_from_its_export(
    run: SimpleNamespace, cache: Path, tmp_path: Path, make_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its export records the encoder, so that its rows are taken and those of the released weights' encoder refused."""
    gemma, text = make_config(tmp_path).text.id, run.whole.text.id
    own = [f"cache={cache}", *(each for each in OPTIONS if each != "model.arch=null"), "train.steps=1"]

    def config(name: str, encoder: str, *more: str) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        return make_config(tmp_path / name, *own, f"text.id={encoder}", *more)

    scratch = config("scratch", text)
    sana_pipe.stages.train.run(scratch, log=lambda line: None)
    with pytest.raises(ConfigError, match=r"t5gemma.*gemma2"):
        sana_pipe.stages.export.run(config("scratch", gemma), "auto", tmp_path / "no")
    out = sana_pipe.stages.export.run(scratch, "auto", tmp_path / "export")
    SanaTransformer2DModel.from_pretrained(out / "transformer")
    weights = "model.arch=null", f"model.weights={{id: {out}}}"
    tuned = config("tuned", text, *weights)
    assert sana_pipe.stages.check.run(tuned) == 0
    assert sana_pipe.stages.train.run(tuned, log=lambda line: None).step == 1
    again = sana_pipe.stages.export.run(tuned, "auto", tmp_path / "again") / "transformer/config.json"
    assert json.loads(again.read_text())["_text_kind"] == "t5gemma"
    capsys.readouterr()
    assert sana_pipe.stages.check.run(config("other", gemma, *weights)) == 2
    assert "reads text rows of t5gemma" in capsys.readouterr().err


def test_rows_of_another_encoder_are_not_drawn_from(
    run: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Snapshot.encoding
    other = replace(Cache(run.whole.cache).open_snapshot().encoding(TextEncoding), encoder_kind="gemma2")
    monkeypatch.setattr(Snapshot, "encoding", lambda self, kind: other if kind is TextEncoding else read(self, kind))
    monkeypatch.setattr(draw_latents, "draw_for", lambda *args: pytest.fail("drew"))
    with pytest.raises(ConfigError, match=r"t5gemma.*gemma2"):
        sana_pipe.stages.sample.run(run.whole, "auto", None, tmp_path / "samples")


def test_check_refuses_sides_that_the_patches_do_not_divide(
    run: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_diffusers(replace(TINY, patch_size=2)).save_pretrained(tmp_path / "patches")
    given = "train.steps=1", f"model.weights={{id: {tmp_path / 'patches'}}}"
    assert sana_pipe.stages.check.run(run.config("sides", *given, "data.buckets=[[64, 64], [64, 48]]")) == 0
    capsys.readouterr()
    assert sana_pipe.stages.check.run(run.config("sides", *given, "data.buckets=[[64, 64], [64, 40]]")) == 2
    said = capsys.readouterr().err
    assert "multiples of 16 pixels" in said and "64x40" in said and "data.buckets with [64, " in said
