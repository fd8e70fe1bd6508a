"""Export to diffusers' format, drawing with a decoder apart, and the contact sheet."""

from __future__ import annotations

import ast
import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from sana_pipe import cli
from sana_pipe.base.errors import AwayError, ConfigError, NoSpaceError, UserError
from sana_pipe.config import Config, dump, load
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.prompts import spread
from sana_pipe.data.encoders.frozen import from_bits
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.sources.source import Unreadable
from sana_pipe.stages import bucket, encode, export, sample, train
from sana_pipe.stages import run as chain
from sana_pipe.tools.demo import small_models
from sana_pipe.tools.reporting import draw_latents, drawing_folder, encoder_process, export_folder, pair_page
from sana_pipe.tools.reporting import source_pictures as reading
from sana_pipe.tools.reporting.contact_sheet import SheetRow, contact_sheet
from sana_pipe.tools.reporting.export_readme import call_arguments, readme
from sana_pipe.train.models import sampler as sampling
from sana_pipe.train.models.sampler import noise_of
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.training import changes
from sana_pipe.train.training import checkpoint as checkpoints
from tests.support.checkpoints import load_model_state
from tests.support.drawings import draw_for
from tests.support.messages import naming
from tests.support.tiny_sana import load_transformer

CAPTIONS = ("A red square", "a green square", "a blue field", "a yellow wall", "a grey road", "a white door")

CPU = torch.device("cpu")
FACTS = {"weights": "last weights", "dtype": "float32", "vae": "a local folder", "text_encoder": "a local folder"}


@dataclass(frozen=True)
class Trained:
    """A folder with photographs, small models, a cache, and a checkpoint after a few steps."""

    root: Path
    config: Config
    checkpoint: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    pictures = root / "photos"
    pictures.mkdir()
    generator = np.random.default_rng(0)
    for i, caption in enumerate(CAPTIONS):
        height, width = ((64, 64), (48, 80))[i % 2]
        pixels = generator.integers(0, 255, (height // 8, width // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
        Image.fromarray(pixels).save(pictures / f"{i}.png")
        (pictures / f"{i}.txt").write_text(caption)
    small_models.make_all(root / "tiny", [], CAPTIONS, instruction="Draw this: ", steps=0, flow_shift=3.0)
    config = load(
        "tiny",
        [
            f"cache={root / 'cache'}",
            f"vae.id={root / 'tiny'}",
            f"text.id={root / 'tiny'}",
            "text.instruction='Draw this: '",
            f"train.output={root / 'run'}",
            "train.steps=3",
            "train.ema={decay: 0.9}",
            "train.optim.warmup_steps=0",
            "model.arch.num_layers=2",
            "bucket.batch=4",
            "sample.steps=2",
        ],
    )
    encode.run(config, str(pictures))
    bucket.run(config)
    train.run(config)
    return Trained(root, config, root / "run" / "checkpoints" / "step-00000003")


@pytest.fixture(scope="module")
def exported(trained: Trained) -> Path:
    return export.run(trained.config, "auto", trained.root / "export")


def changed(config: Config, tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "changed.yaml"
    path.write_text(dump(config))
    return load(path, overrides)


# ---------------------------------------------------------------------------------------------------- export


def test_a_finished_run_says_what_has_changed_since_and_keeps_its_trigger_word(
    trained: Trained, tmp_path: Path
) -> None:
    for name in ("cache", "run"):
        shutil.copytree(trained.root / name, tmp_path / name)
    here = f"cache={tmp_path / 'cache'}", f"train.output={tmp_path / 'run'}"
    config = changed(trained.config, tmp_path, *here, "data.caption_prefix='zwx dog, '")
    assert train.run(config, resume="auto").step == 3, "nothing was encoded with it yet"
    encode.run(config, str(trained.root / "photos"))
    bucket.run(config)
    both = naming("zwx dog, ", "--from", "train.output=DIR")
    with pytest.raises(UserError, match=both):
        train.run(config, resume="auto")
    with pytest.raises(UserError, match=both):
        chain.check_unchanged(config)
    document = checkpoints.read_document(trained.checkpoint)
    assert changes.of_weights(config.model.weights, document) == []
    other = changed(config, tmp_path, "model.arch=null", "model.weights={id: other}", "vae.id=gone")
    assert "model.weights.id" in "".join(changes.of_weights(other.model.weights, document))

    export.run(config, "auto", tmp_path / "export")
    assert "zwx" not in (tmp_path / "export/README.md").read_text()
    longer = changed(trained.config, tmp_path, *here, "data.caption_prefix='abc, '", f"train.output={tmp_path / 'new'}")
    train.run(longer)
    stored = checkpoints.read_document(tmp_path / "new/checkpoints/step-00000003")
    assert stored.config["data"]["caption_prefix"] == "zwx dog, ", "as encoded, not as the file says now"


def test_diffusers_loads_the_export_and_the_readmes_call_runs(trained: Trained, exported: Path) -> None:
    """The code block of the README itself is executed (in fp32, on the CPU), and draws what our sampler draws."""
    code = (exported / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    code = code.replace("PATH/OF/THIS/FOLDER", str(exported)).replace("torch.bfloat16", "torch.float32")
    names: dict[str, Any] = {}
    loading, calling = code.partition("image = pipe(")[0], "image = pipe(" + code.partition("image = pipe(")[2]
    exec(loading, names)
    names["pipe"].set_progress_bar_config(disable=True)
    exec(calling, names)
    assert names["image"].size == (64, 64)

    pipe = names["pipe"]
    document = checkpoints.read_document(trained.checkpoint)
    _, weights = load_model_state(trained.checkpoint)
    opened = Cache(trained.config.cache).open_snapshot()
    (one,) = draw_for(trained.config, document.architecture, weights, opened, [len(opened) - 1])
    assert one.bucket == (64, 64)
    noise = noise_of(one.sample_id, tuple(one.latent.shape), trained.config.sample.seed)

    def drawn(caption: str) -> torch.Tensor:
        return pipe(
            caption,
            height=64,
            width=64,
            num_inference_steps=trained.config.sample.steps,
            guidance_scale=trained.config.sample.guidance,
            use_resolution_binning=False,
            complex_human_instruction=["Draw this: "],
            latents=noise.clone(),
            output_type="latent",
        ).images[0]

    latents = drawn(one.caption)
    # The cached rows are rounded to bf16, the pipeline's are not.
    error = (latents - one.latent).norm() / one.latent.norm()
    assert error < 5e-3, error
    wrong = drawn(one.caption + " in the rain")
    assert (wrong - one.latent).norm() / one.latent.norm() > 2 * error  # the comparison sees another caption


def test_exported_weights_are_the_checkpoints(trained: Trained, exported: Path) -> None:
    _, weights = load_model_state(trained.checkpoint)
    model = load_transformer(exported / "transformer")
    assert {n: p.shape for n, p in model.named_parameters()} == {n: w.shape for n, w in weights.items()}
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def test_the_ema_weights_are_exported_and_drawn_with_when_asked_for(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(dump(trained.config))
    given = ["--config", str(config), "--checkpoint", str(trained.checkpoint), "--ema", "--out"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", *given, str(tmp_path / "averaged")])
    assert ended.value.code == 0
    _, last = load_model_state(trained.checkpoint)
    _, averages = load_model_state(trained.checkpoint, ema=True)
    exported = dict(load_transformer(tmp_path / "averaged" / "transformer").named_parameters())
    assert all(torch.equal(exported[name], value) for name, value in averages.items())
    assert not all(torch.equal(last[name], value) for name, value in averages.items())
    assert json.loads((tmp_path / "averaged" / export_folder.MARK).read_text())["state"]["weights"] == "EMA weights"
    assert "the EMA weights of step 3" in (tmp_path / "averaged" / "README.md").read_text()
    for ema, stem in ((False, "sana_step_3"), (True, "sana_step_3_ema")):
        export.run(trained.config, "auto", tmp_path / stem, ema=ema, form="nvlabs")
        assert (tmp_path / stem / f"{stem}.pth").is_file()
        name = "EMA weights" if ema else "last weights"
        assert name in (tmp_path / stem / "README.md").read_text() and name in capsys.readouterr().out

    drawn: list[dict[str, torch.Tensor]] = []

    def open_model(train: Any, architecture: Any, weights: dict[str, torch.Tensor], *rest: Any) -> Any:
        drawn.append(weights)
        raise UserError("enough")

    monkeypatch.setattr(draw_latents, "open_model", open_model)
    with pytest.raises(SystemExit):
        cli.main(["sample", *given, str(tmp_path / "samples")])
    assert all(torch.equal(drawn[0][name], value) for name, value in averages.items())


def test_the_parts_are_those_of_the_configuration(trained: Trained, exported: Path) -> None:
    source = Path(trained.config.vae.id)
    for name in (
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
    ):
        assert (exported / name).read_bytes() == (source / name).read_bytes(), name
    scheduler = json.loads((exported / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["_class_name"] == "DPMSolverMultistepScheduler"
    wanted = {"flow_shift": 3.0, "use_flow_sigmas": True, "prediction_type": "flow_prediction", "solver_order": 2}
    assert {key: scheduler[key] for key in wanted} == wanted
    assert json.loads((exported / "transformer" / "config.json").read_text())["sample_size"] == 64 // 8


def test_readme_says_where_the_pipeline_cannot_draw_as_sample_does(trained: Trained, tmp_path: Path) -> None:
    """`SanaPipeline` guides above 1 only."""
    document = checkpoints.read_document(trained.checkpoint)
    facts = {**FACTS, "state": document.state}
    told = {}
    for guidance in (0.5, 1.0, 4.5):
        config = changed(trained.config, tmp_path, f"sample.guidance={guidance}")
        told[guidance] = "guides only above 1" in readme(
            "diffusers", export.described(config, document.architecture), 8, **facts
        )
    assert told == {0.5: True, 1.0: False, 4.5: False}
    assert "diffusers 0.33" in readme("diffusers", export.described(trained.config, document.architecture), 8, **facts)


def test_readme_states_what_this_model_needs(trained: Trained, exported: Path, tmp_path: Path) -> None:
    text = (exported / "README.md").read_text()
    assert "use_resolution_binning=False" in text
    assert "step 3" in text
    quoted = next(line for line in text.splitlines() if line.startswith("INSTRUCTION = ")).partition(" = ")[2]
    assert json.loads(ast.literal_eval(quoted)) == ["Draw this: "]

    document = checkpoints.read_document(trained.checkpoint)

    def arguments(config: Config, sample_size: int, compression: int) -> dict[str, str]:
        shape = replace(document.architecture, sample_size=sample_size)  # type: ignore[type-var]
        return call_arguments(export.described(config, shape), compression)

    big = load("sana_1600m_1024")
    plain = arguments(big, 32, 32)
    assert set(plain) == {"height", "width", "num_inference_steps", "guidance_scale"}
    assert plain["height"] == "1024"
    # 1024 px of an f8 VAE has the sample_size of Sana's 4096 px bins: they would be the wrong shapes
    assert arguments(big, 128, 8)["use_resolution_binning"] == "False"
    square = changed(big, tmp_path, "data.buckets=[[1024, 1024]]")
    assert arguments(square, 32, 32)["use_resolution_binning"] == "False", "other shapes than Sana's"
    raw = changed(big, tmp_path, "text.prompting=nvlabs", "text.max_length=200")
    assert arguments(raw, 32, 32)["max_sequence_length"] == "200"
    shape = document.architecture.with_sample_size(32)
    printed = readme("diffusers", export.described(raw, shape), 32, state=document.state, **FACTS)
    assert "lowers and strips" in printed
    assert 'an \\\\\\"Enhanced prompt\\\\\\"' in printed
    none = changed(big, tmp_path, "text.instruction=''")
    assert arguments(none, document.architecture.sample_size, 32)["complex_human_instruction"] == "None"


def test_a_variant_and_its_shards_lose_the_name(trained: Trained, tmp_path: Path) -> None:
    from diffusers import AutoencoderDC

    models = tmp_path / "models"
    shutil.copytree(trained.config.vae.id, models)
    vae = AutoencoderDC.from_pretrained(models / "vae")
    (models / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    vae.save_pretrained(models / "vae", variant="bf16", max_shard_size="4MB")
    assert len(list((models / "vae").glob("*.bf16*.safetensors"))) > 1
    config = changed(trained.config, tmp_path, f"vae.id={models}")
    out = export.run(config, "auto", tmp_path / "export")
    again = AutoencoderDC.from_pretrained(out / "vae")
    assert not any("bf16" in path.name for path in (out / "vae").iterdir())
    assert all(torch.equal(a, b) for a, b in zip(vae.parameters(), again.parameters(), strict=True))


def test_an_adapter_is_written_in_the_precision_of_its_base() -> None:
    expected = {"sana_1600m_1024_lora": "bf16", "controlnet_24gb": "bf16", "sana_600m_512": "fp32", "tiny": "fp32"}
    for name, dtype in expected.items():
        assert export.default_dtype(load(name), of_adapter=True) == dtype, name
        assert export.default_dtype(load(name), of_adapter=False) == "fp32", name


def test_another_configuration_than_the_checkpoints_is_refused(trained: Trained, tmp_path: Path) -> None:
    for override, name in (
        ("train.flow.shift=4.0", "train.flow.shift"),
        ("text.instruction=''", "text.instruction"),
        ("data.resolution=128", "data.resolution"),
        ("text.max_length=77", "text.max_length"),
    ):
        with pytest.raises(ConfigError, match=naming(name)):
            export.run(changed(trained.config, tmp_path, override), "auto", tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_length_that_is_written_out_is_the_encoders(trained: Trained, tmp_path: Path) -> None:
    document = checkpoints.read_document(trained.checkpoint)
    for then, now in ((300, None), (None, 300), (None, None)):
        of_training = {**document.config, "text": {**document.config["text"], "max_length": then}}
        given = changed(trained.config, tmp_path, f"text.max_length={'null' if now is None else now}")
        export.check_same(given, of_training, trained.checkpoint)
    with pytest.raises(ConfigError, match=naming("text.max_length", "200")):
        export.check_same(given, {**of_training, "text": {**of_training["text"], "max_length": 200}}, tmp_path)


def test_best_takes_the_checkpoint_with_the_lowest_heldout_loss(trained: Trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for step in (2, 3):
        shutil.copytree(trained.checkpoint, checkpoints.folder_of(run / "checkpoints", step))
    rows = [{"event": "validation", "step": step, "loss": loss} for step, loss in ((2, 0.1), (3, 0.2))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = changed(trained.config, tmp_path, f"train.output={run}")
    (run / "checkpoints/step-00000003/checkpoint.json").unlink()  # so that the newest cannot be exported
    export.run(config, "auto", tmp_path / "export", best=True, form="nvlabs")
    with pytest.raises(UserError):
        export.run(config, "auto", tmp_path / "newest", form="nvlabs")


def test_an_export_is_on_the_disk_before_it_takes_its_name(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, synced = tmp_path / "export", list[tuple[Path, bool]]()
    monkeypatch.setattr(export_folder, "sync_path", lambda path: synced.append((path, out.exists())))
    export.run(trained.config, "auto", out, form="nvlabs")
    work = tmp_path / ".export.partial"
    assert set(synced[:-1]) == {(work / path.relative_to(out), False) for path in (out, *out.rglob("*"))}
    assert synced[-1] == (tmp_path, True), "the name, too"


def test_a_damaged_checkpoint_is_named_before_encoders_are_fetched(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(trained.checkpoint, tmp_path / "run/checkpoints" / trained.checkpoint.name)
    (folder / ".metadata").unlink()
    monkeypatch.setattr(export.hub, "resolve", lambda *given: pytest.fail("an encoder was fetched"))
    with pytest.raises(checkpoints.CheckpointError, match=r"\.metadata: is missing"):
        export.run(trained.config, str(folder), tmp_path / "export")


def test_encoders_that_do_not_fit_are_refused(trained: Trained, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(trained.config.vae.id, models)
    path = models / "vae" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "latent_channels": 32}))
    with pytest.raises(ConfigError, match=r"the VAE .*in_channels is 16, .*32"):
        export.run(changed(trained.config, tmp_path, f"vae.id={models}"), "auto", tmp_path / "export")


def test_export_is_whole_or_not_at_all(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "export"
    export.run(trained.config, str(trained.checkpoint), out)
    before = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export_folder, "copy_model", full)
        with pytest.raises(NoSpaceError, match=naming(out)):
            export.run(trained.config, "auto", out, overwrite=True)
    assert {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export"]
    export.run(trained.config, "auto", out, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export"]


def test_the_folder_that_one_stands_in_may_be_exported_to(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "export").mkdir()
    monkeypatch.chdir(tmp_path / "export")
    assert export.run(trained.config, "auto", Path(".")) == tmp_path / "export"
    assert (tmp_path / "export" / "model_index.json").is_file()


def test_an_export_is_replaced_only_by_overwrite(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "export"
    out.mkdir()
    mark = json.dumps({"files": {}})
    (out / export_folder.MARK).write_text(mark)
    written: list[Path] = []
    monkeypatch.setattr(export, "write_parts", lambda *rest: written.append(rest[2]))
    with pytest.raises(UserError, match="holds an export") as caught:
        export.run(trained.config, "auto", out)
    assert "--overwrite" in str(caught.value.fix) and (out / export_folder.MARK).read_text() == mark and not written
    export.run(trained.config, "auto", out, overwrite=True)
    assert written and json.loads((out / export_folder.MARK).read_text())["state"]["step"] == 3


def test_what_was_added_to_an_export_or_changed_in_it_stays(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export.run(trained.config, "auto", tmp_path / "export")
    (out / "sks_v1.safetensors").write_text("mine")
    (out / "README.md").write_text("edited")

    def kept() -> tuple[str, str]:
        return (out / "sks_v1.safetensors").read_text(), (out / "README.kept.md").read_text()

    export.run(trained.config, "auto", out, overwrite=True)
    assert kept() == ("mine", "edited") and "sana-pipe export" in (out / "README.md").read_text()
    with monkeypatch.context() as patch:  # killed between the two renames
        patch.setattr(export.os, "rename", Mock(side_effect=[None, KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            export.run(trained.config, "auto", out, overwrite=True)
    out.rename(out.with_name(".export.old"))
    export.run(trained.config, "auto", out, overwrite=True)
    assert kept() == ("mine", "edited")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]


def test_an_export_without_a_list_of_its_files_is_not_replaced(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / export_folder.MARK).write_text("{}")
    with pytest.raises(UserError, match=naming(tmp_path / export_folder.MARK, "--out")):
        export.run(trained.config, "auto", tmp_path, overwrite=True)


def test_no_export_takes_the_place_of_a_model_that_is_read_nor_a_files_name(trained: Trained, tmp_path: Path) -> None:
    base = Path(trained.config.vae.id)
    with pytest.raises(UserError, match=naming("--out")):
        export.run(trained.config, "auto", base, overwrite=True)
    with pytest.raises(UserError, match=naming("--out")):
        export.run(trained.config, "auto", tmp_path / "lora.safetensors")
    assert (base / "vae/config.json").is_file() and not [*tmp_path.iterdir()]


def test_an_export_says_what_is_in_it_and_not_where_it_came_from(trained: Trained, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(trained.config.vae.id, models)
    for name, key in (
        ("vae/config", "_name_or_path"),
        ("text_encoder/config", "_name_or_path"),
        ("tokenizer/tokenizer_config", "name_or_path"),
    ):
        path = models / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: str(models)}))
    config = changed(
        trained.config,
        tmp_path,
        f"vae.id={models}",
        f"text.id={models}",
        f"data.image_root={tmp_path}",
        f"mirror.path={tmp_path}",
        f"bucket.caches=[{tmp_path}]",
        "cache=https://user:sesame@host/tiny?sig=sesame",
    )
    out = export.run(config, "auto", tmp_path / "export")
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for place in (str(tmp_path), str(trained.root), "sesame"):
        assert [name for name, content in files.items() if place.encode() in content] == []
    mark = json.loads(files.pop(export_folder.MARK))
    assert mark["state"]["step"] == 3
    assert mark["config"]["text.instruction"] == "Draw this: "


def test_export_never_writes_over_something_else(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=naming(tmp_path / "mine", "--out")):
        export.run(trained.config, "auto", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_pictures_that_cannot_be_written_are_not_drawn(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_latents, "draw_for", lambda *args: pytest.fail("drew"))
    monkeypatch.setattr(encoder_process, "encode_prompts", lambda *args: pytest.fail("encoded"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=naming(out, "--out")):
            sample.run(trained.config, "auto", None, out)
        with pytest.raises(UserError, match=naming(out, "--out")):
            sample.run_prompts(trained.config, "auto", ["a cube"], out)


def test_pictures_of_somebody_else_are_not_replaced(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_latents, "draw_for", lambda *args: pytest.fail("drew"))
    monkeypatch.setattr(encoder_process, "encode_prompts", lambda *args: pytest.fail("encoded"))
    (tmp_path / "0000.png").write_bytes(b"mine")
    with pytest.raises(UserError, match=naming(tmp_path, "0000.png", "--out")):
        sample.run(trained.config, "auto", None, tmp_path)
    with pytest.raises(UserError, match=naming(tmp_path, "0000.png", "--out")):
        sample.run_prompts(trained.config, "auto", ["a cube"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0000.png"]


def test_no_checkpoint_yet(trained: Trained, tmp_path: Path) -> None:
    config = changed(trained.config, tmp_path, f"train.output={tmp_path / 'none'}")
    for run in (
        lambda: export.run(config, "auto", tmp_path / "export"),
        lambda: sample.run(config, "auto", None, tmp_path / "samples"),
    ):
        with pytest.raises(UserError, match="holds no checkpoint yet"):
            run()
    with pytest.raises(UserError, match=naming(tmp_path / "absent")):
        export.run(config, str(tmp_path / "absent"), tmp_path / "export")


# ---------------------------------------------------------------------------------------------------- sample


@pytest.mark.slow
def test_sample_writes_pictures_a_table_and_a_sheet(trained: Trained, tmp_path: Path) -> None:
    result = sample.run(trained.config, "auto", None, tmp_path / "samples", 4)
    assert result.count == 4
    names = {p.name for p in (tmp_path / "samples").iterdir()}
    pictures = {f"{i:04d}{end}.png" for i in range(4) for end in ("", "-reconstruction")}
    assert names == pictures | {"contact_sheet.png", "samples.jsonl"}
    rows = [json.loads(line) for line in (tmp_path / "samples" / "samples.jsonl").read_text().splitlines()]
    assert {row["caption"] for row in rows} <= set(CAPTIONS)
    assert len({row["item"] for row in rows}) == 4
    for row in rows:
        with Image.open(tmp_path / "samples" / row["file"]) as picture:
            assert picture.size == (row["width"], row["height"])
    assert {(row["height"], row["width"]) for row in rows} == {(48, 80), (64, 64)}


def test_several_pictures_a_caption_become_pairs_that_encode_reads(
    trained: Trained, tmp_path: Path, in_this_process: None
) -> None:
    """The CSV file has what the page's script saves: the columns and names that the page holds as JSON."""
    out = tmp_path / "pairs"
    page = sample.run_pairs(trained.config, "auto", None, out, 2).read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", page)
    found = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    assert found is not None
    told = json.loads(found[1])
    rows = [json.loads(line) for line in (out / "candidates.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * len(CAPTIONS) and {row["seed"] for row in rows} == {0, 1}
    assert [group["caption"] for group in told["groups"]] == [row["caption"] for row in rows[::2]]
    assert [file for group in told["groups"] for file in group["files"]] == [row["file"] for row in rows]
    assert len({(out / row["file"]).read_bytes() for row in rows}) == len(rows)
    with (out / told["file"]).open("w", newline="") as sheet:
        writer = csv.writer(sheet, quoting=csv.QUOTE_ALL)
        writer.writerow(told["columns"])
        for group in told["groups"][:-1]:
            better, worse = group["files"]
            marked = {"chosen": better, "rejected": worse, "caption": group["caption"], "weight": 1}
            writer.writerow([marked[column] for column in told["columns"]])
    words = shlex.split(pair_page.command(out))
    options = [option for option in words if option.startswith("data.")]
    config = changed(trained.config, tmp_path, f"cache={tmp_path / 'cache'}", *options)
    done = encode.run(config, words[words.index("--data") + 1])
    assert done["images"] == done["rejected pictures"] == len(CAPTIONS) - 1 and not done["rejects"]
    bucket.run(config)
    made = Cache(config.cache).open_snapshot()
    assert {made.sample(row).pictures["rejected"].weight for row in range(len(made))} == {1.0}
    with pytest.raises(UserError, match="no new folder"):
        sample.run_pairs(trained.config, "auto", None, out, 2)
    with pytest.raises(ConfigError, match="--count 1"):
        sample.run_pairs(trained.config, "auto", None, tmp_path / "one", 1)


def test_the_script_of_the_page_of_the_documents_ranks_pictures_by_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = re.findall(r"```python\n(.*?candidates\.jsonl.*?)```", Path("docs/encoding.md").read_text(), re.DOTALL)
    scores = {"0000-0.png": 0.5, "0000-1.png": 2.0, "0000-2.png": 1.0, "0001-0.png": 3.0, "0001-1.png": 1.0}
    (tmp_path / "pairs").mkdir()
    rows = [{"file": file, "number": int(file[:4]), "caption": f"caption {file[3]}"} for file in scores]
    (tmp_path / "pairs" / pair_page.TABLE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    exec(text, {"score": lambda file: scores[Path(file).name]})
    with (tmp_path / "pairs" / pair_page.FILE).open() as sheet:
        assert list(csv.reader(sheet)) == [
            list(pair_page.COLUMNS),
            ["0000-1.png", "0000-0.png", "caption 0", "1.5"],
            ["0001-0.png", "0001-1.png", "caption 1", "2.0"],
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["run({config}, 'auto', None, {out}, 1)", "run_prompts({config}, 'auto', ['a cube'], {out})"]
)
def test_the_drawing_process_imports_no_encoder(trained: Trained, tmp_path: Path, call: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(dump(trained.config))
    made = call.format(config="load(sys.argv[1])", out="Path(sys.argv[2])")
    code = (
        "import sys; from pathlib import Path; from sana_pipe.config import load; "
        f"from sana_pipe.stages import sample; sample.{made}; "
        "bad = [m for m in sys.modules if m.rpartition('.')[2] in ('autoencoder_dc', 'modeling_gemma2') "
        "or m == 'transformers']; sys.exit(str(bad) if bad else 0)"
    )
    arguments = [sys.executable, "-c", code, str(config), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "contact_sheet.png").exists()


def test_a_picture_depends_on_its_sample_and_the_seed_alone(trained: Trained, tmp_path: Path) -> None:
    document = checkpoints.read_document(trained.checkpoint)
    opened = Cache(trained.config.cache).open_snapshot()

    def drawn(rows: list[int], config: Config = trained.config) -> dict[int, torch.Tensor]:
        _, weights = load_model_state(trained.checkpoint)
        return {d.row: d.latent for d in draw_for(config, document.architecture, weights, opened, rows)}

    every, alone = drawn(list(range(len(opened)))), drawn([4])
    torch.testing.assert_close(every[4], alone[4], rtol=1e-4, atol=1e-4)
    other = drawn([4], changed(trained.config, tmp_path, "sample.seed=1"))
    assert (other[4] - alone[4]).norm() > 0.1 * alone[4].norm()


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes with encoders cost seconds each."""

    def run(config: str, work: Path, *words: str, what: str) -> None:
        (work / "config.yaml").write_text(config, encoding="utf-8")
        if words[0] == "encode":
            encode.run(load(work / "config.yaml"), None, prompts=words[2])
        else:
            sample.decode(load(work / "config.yaml"), Path(words[2]), Path(words[4]))

    monkeypatch.setattr(encoder_process, "_run", run)


def test_the_base_is_drawn_next_to_the_trained_weights_one_model_at_a_time(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that began from another: its checkpoint. Of one from random values: nothing. Lost: a note."""
    monkeypatch.setattr(sample, "decode_in_subprocess", lambda *_: pytest.fail("decoded"))
    seen: list[dict[str, torch.Tensor]] = []
    models: list[weakref.ref[Any]] = []
    real = draw_latents.open_model

    def open_model(train: Any, architecture: Any, weights: dict[str, torch.Tensor], *rest: Any) -> Any:
        assert all(model() is None for model in models), "two models are in memory"
        seen.append({name: value.clone() for name, value in weights.items()})
        model = real(train, architecture, weights, *rest)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(draw_latents, "open_model", open_model)
    published: list[dict[str, Any]] = []
    monkeypatch.setattr(sample, "publish", lambda config, latents, *rest: published.append(latents) or tmp_path)
    sample.run(trained.config, "auto", None, tmp_path / "samples", 3)
    assert list(published.pop()) == ["reconstruction", "drawn"] and len(seen) == 1
    later = changed(trained.config, tmp_path, f"train.output={tmp_path / 'later'}", "train.steps=1")
    train.run(later, origin=trained.checkpoint)
    sample.run(later, "auto", None, tmp_path / "samples", 3)
    assert list(published.pop()) == ["reconstruction", "base", "drawn"]
    first, last = load_model_state(trained.checkpoint)[1], seen[2]
    assert len(models) == 3 and seen[1].keys() == last.keys()
    assert all(torch.equal(first[name], value) for name, value in seen[1].items())
    assert not all(torch.equal(first[name], value) for name, value in last.items())
    assert re.search(r"likeness: \d of 3 pictures .*; before the training \d;", capsys.readouterr().out)
    sample.run(later, "auto", None, tmp_path / "samples", 3, base=False)
    assert list(published.pop()) == ["reconstruction", "drawn"]
    (tmp_path / "later/from.json").unlink()
    sample.run(later, "auto", None, tmp_path / "samples", 3)
    assert list(published.pop()) == ["reconstruction", "drawn"]
    assert "the run began from are not drawn" in capsys.readouterr().out


def test_the_likeness_says_its_numbers_and_what_a_low_one_means() -> None:
    def of(own: float) -> list[draw_latents.DrawnLatent]:
        """The latent of picture n is n everywhere; the last one is drawn as `own`."""
        values = [0.0, 10.0, own]
        cached = [torch.full((1, 4, 4), 10.0 * n) for n in range(3)]
        return [
            draw_latents.DrawnLatent(n, n, "c", "s", f"{n}.jpg", (32, 32), cached[n], torch.full((1, 4, 4), values[n]))
            for n in range(3)
        ]

    def numbers(line: str) -> list[int]:
        return [int(number) for number in re.findall(r"\b\d\b", line)]

    better, worse = of(20.0), of(0.0)
    assert draw_latents.nearest(worse) == [True, True, False]
    first, others, meaning = draw_latents.likeness(worse, [True, True, False], None)
    assert numbers(first) == [2, 3, 2, 1] and others.endswith("0002.png (2.jpg)") and not numbers(meaning)
    [first] = draw_latents.likeness(better, [True] * 3, worse)
    assert numbers(first) == [3, 3, 2, 2, 1], "all of them, and two before the training: nothing is to be explained"
    first, same = draw_latents.likeness(worse, [False] * 3, None)
    assert numbers(first)[:2] == [0, 3] and same == meaning, "photographs of one subject: what 0 means, no list"
    assert list(draw_latents.likeness(better[:1], [True], None)) == [], "one picture has no other to resemble"


PROMPTS = ["A red CUBE", "a lighthouse\nat sea", "a red cube"]


@pytest.mark.usefixtures("in_this_process")
def test_new_prompts_are_drawn_as_in_training(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[torch.Tensor] = []
    real = draw_latents.draw_prompts
    monkeypatch.setattr(draw_latents, "draw_prompts", lambda *a: drawn.extend(real(*a)) or drawn)
    before = sorted(path for path in Path(trained.config.cache).rglob("*"))
    sheet = sample.run_prompts(trained.config, "auto", PROMPTS, tmp_path / "samples", height=32, width=48)
    assert sorted(path for path in Path(trained.config.cache).rglob("*")) == before, "the cache is left as it was"
    printed = capsys.readouterr()
    assert "line 3 repeats" in printed.err and "--ema" in printed.out
    names = {path.name for path in (tmp_path / "samples").iterdir()}
    assert names == {"0000.png", "0001.png", sheet.name, "samples.jsonl"}
    rows = [json.loads(line) for line in (tmp_path / "samples" / "samples.jsonl").read_text().splitlines()]
    assert [row["caption"] for row in rows] == PROMPTS[:2]
    assert {(row["weights"], row["checkpoint"]) for row in rows} == {("last weights", trained.checkpoint.name)}
    with Image.open(tmp_path / "samples" / "0001.png") as picture:
        assert picture.size == (48, 32)

    text = TextEncoder.load(trained.config.text, "cpu")
    captions = [from_bits(bits).float() for bits in text.encode([p.lower() for p in PROMPTS[:2]])]
    null, valid = text.null()
    del text
    architecture, weights = load_model_state(trained.checkpoint)
    model = SanaTransformer.on_meta(architecture)
    model.load_state_dict(weights, assign=True)
    alone = sampling.sample(
        model.eval(),
        captions[1:],
        from_bits(null[:valid]).float(),
        sampling.prompt_noise(PROMPTS[1:2], tuple(drawn[1].shape), trained.config.sample.seed),
        replace(sampling.Sampling.of(trained.config.sample, trained.config.train.flow.shift), steps=2),
    )
    torch.testing.assert_close(drawn[1], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("in_this_process")
def test_prompts_of_another_text_encoding_or_size_are_refused(trained: Trained, tmp_path: Path) -> None:
    config = changed(trained.config, tmp_path, "text.instruction='Say this: '")
    with pytest.raises(UserError, match="another text encoding"):
        sample.run_prompts(config, "auto", PROMPTS, tmp_path / "samples")
    with pytest.raises(UserError, match="multiples of 8") as refused:
        sample.run_prompts(config, "auto", PROMPTS, tmp_path / "samples", height=60)
    assert refused.value.fix == "--height 64 --width 64"
    assert not list((tmp_path / "samples").iterdir())


@pytest.mark.usefixtures("in_this_process")
def test_how_the_cache_stores_text_is_no_other_text_encoding(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are stored in bf16, whatever the samples were."""
    head = Cache(trained.config.cache).open_snapshot().head
    encodings = head.encoding(LatentEncoding), replace(head.encoding(TextEncoding), storage="int8")
    monkeypatch.setattr(sample, "encodings_of", lambda *_: encodings)
    sample.run_prompts(trained.config, "auto", PROMPTS[:1], tmp_path / "samples")
    assert (tmp_path / "samples" / "0000.png").exists()


def test_captions_of_other_encoders_are_refused(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = checkpoints.ModelTensors(trained.checkpoint)
    architecture = stored.architecture
    monkeypatch.setattr(draw_latents, "draw_for", lambda *args: pytest.fail("drew"))
    monkeypatch.setattr(checkpoints, "ModelTensors", lambda *_, **__: stored)
    others = {"in_channels": {"in_channels": 7, "out_channels": 7}, "caption_channels": {"caption_channels": 7}}
    for field, change in others.items():
        stored.architecture = replace(architecture, **change)
        with pytest.raises(ConfigError, match=naming(field, "7", "--snapshot")):
            sample.run(trained.config, "auto", None, tmp_path / "samples")


@pytest.mark.usefixtures("in_this_process")
def test_prompts_are_drawn_where_the_cache_is_not(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(trained.config, tmp_path, f"cache={tmp_path / 'none'}")
    sample.run_prompts(config, "auto", PROMPTS[:1], tmp_path / "samples")
    assert "is not in" in capsys.readouterr().out and not (tmp_path / "none").exists()
    with Image.open(tmp_path / "samples" / "0000.png") as picture:
        assert picture.size == (64, 64), "data.resolution"


def test_rows_are_spread_without_repeats() -> None:
    for samples in (1, 2, 7, 100):
        for count in range(1, samples + 1):
            rows = spread(samples, count)
            assert len(set(rows)) == count
            assert 0 <= min(rows) <= max(rows) < samples


def test_nearest_tells_whose_picture_was_drawn() -> None:
    generator = torch.Generator().manual_seed(0)

    def one(cached: torch.Tensor, latent: torch.Tensor) -> draw_latents.DrawnLatent:
        return draw_latents.DrawnLatent(0, 0, "", "", "", (64, 64), cached, latent)

    cached = [torch.randn(4, *shape, generator=generator) for shape in ((8, 8), (6, 10), (10, 6))]
    right = [one(c, c + 0.1 * torch.randn(c.shape, generator=generator)) for c in cached]
    assert draw_latents.nearest(right) == [True] * 3
    assert draw_latents.nearest([one(cached[0], cached[0]), one(cached[1], cached[2]), one(cached[2], cached[1])]) == [
        True,
        False,
        False,
    ]


def test_a_missing_source_leaves_a_gap_on_the_sheet(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(config: Config, by_column: Any, work: Path) -> None:  # another process would cost seconds
        for i in range(len(by_column[drawing_folder.DRAWN])):
            for name in (f"{i:04d}", f"{i:04d}-reconstruction"):
                (work / "pictures").mkdir(exist_ok=True)
                Image.new("RGB", (80, 48), (9, 9, 9)).save(work / "pictures" / f"{name}.png")

    monkeypatch.setattr(sample, "decode_in_subprocess", here)
    hidden = trained.root / "photos-away"
    (trained.root / "photos").rename(hidden)
    try:
        result = sample.run(trained.config, "auto", None, tmp_path / "samples", 1)
    finally:
        hidden.rename(trained.root / "photos")
    with_photo = sample.run(trained.config, "auto", None, tmp_path / "again", 1)
    assert result.sheet.read_bytes() != with_photo.sheet.read_bytes()


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (AwayError("s3://photos: no answer"), 1),
        (UserError("s3://photos: refused"), 1),
        (Unreadable("moved"), 2),
        ([b"no picture"] * 2, 2),
    ],
    ids=repr,
)
def test_a_picture_that_cannot_be_had_leaves_a_gap(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, error: Exception | list[bytes], asked: int
) -> None:
    """A source that does not answer is asked once, not for every picture."""
    source = Mock(**{"read.side_effect": error})
    monkeypatch.setattr(reading, "reopen", lambda *_: source)
    places = pa.table({"item": ["a.png"], "part": [None], "where": [None], "digest": [None]})
    cache = Mock(**{"table.return_value": places, "last_scan.return_value": {"table": ""}})
    photos = reading.SourcePictures(trained.config.data, cache)
    assert [photos.cropped("photos", "a.png", (48, 80)) for _ in range(2)] == [None, None]
    assert source.read.call_count == asked


@pytest.mark.slow
@pytest.mark.slow
def test_earlier_drawings_stay_and_another_file_draws_as_the_checkpoint_was_trained(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def drawn(count: int, out: Path | None = None, **train: Any) -> Path:
        return sample.run(trained.config.with_train(**train), "auto", None, out, count, base=False).sheet.parent

    assert drawn(2) == Path("samples")
    before = {path.name: path.read_bytes() for path in Path("samples").iterdir()}
    assert drawn(1) == Path("samples-2") and drawn(2) == Path("samples")
    assert {path.name: path.read_bytes() for path in Path("samples").iterdir()} == before
    shift = trained.config.train.flow.shift
    capsys.readouterr()
    assert drawn(2, flow=trained.config.train.flow.model_copy(update={"shift": shift + 2})) == Path("samples")
    assert "train.flow.shift" in capsys.readouterr().out
    drawn(1, Path("samples"))
    assert {path.name for path in Path("samples").glob("0*")} == {"0000.png", "0000-reconstruction.png"}


def test_a_failing_decoder_is_reported(trained: Trained, tmp_path: Path) -> None:
    config = changed(trained.config, tmp_path, f"vae.id={tmp_path / 'gone'}")
    with pytest.raises(encoder_process.DecodeError, match="exit code 2"):
        sample.run(config, "auto", None, tmp_path / "samples", 1)
    assert list((tmp_path / "samples").iterdir()) == []


def test_decode_refuses_what_is_no_latents_file(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "latents").write_bytes(b"not safetensors")
    for name in ("latents", "absent"):
        with pytest.raises(UserError, match=naming(tmp_path / name)):
            sample.decode(trained.config, tmp_path / name, tmp_path / "out")


# ----------------------------------------------------------------------------------------------------- sheet


def test_sheet_shows_every_picture(tmp_path: Path) -> None:
    colours = [(200, 10, 10), (10, 200, 10), (10, 10, 200), (200, 200, 10)]
    cards = [
        SheetRow("words " * 200, (Image.new("RGB", (64, 64), colours[0]), Image.new("L", (48, 80), 77))),
        SheetRow("漢字" * 300, (Image.new("RGB", (80, 48), colours[1]), None)),
        SheetRow("", (Image.new("RGB", (2000, 900), colours[2]), Image.new("RGBA", (1, 3000), (*colours[3], 255)))),
    ]
    contact_sheet(cards, ("photo", "drawn"), tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        result = {colour for _, colour in sheet.getcolors(1 << 24) or []}
    assert {*colours[:3], (77, 77, 77)} <= result
    assert [p.name for p in tmp_path.iterdir()] == ["sheet.png"]


def test_sheet_refuses_a_card_with_a_gap_too_many(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zip"):
        contact_sheet([SheetRow("x", (None,))], ("a", "b"), tmp_path / "sheet.png")
    with pytest.raises(ValueError, match="empty"):
        contact_sheet([], ("a",), tmp_path / "sheet.png")
