"""`sana-pipe export`: a checkpoint to a folder for diffusers' `SanaPipeline.from_pretrained`, or to files for others.

A pipeline's folder has copies of VAE, text encoder and tokenizer (about 6 GB), so it is complete, and no paths of this
machine, so it can be published. Of a run with an adapter it is the adapter's file, for diffusers or ComfyUI, or the
adapter in its base; of a ControlNet its folder. What training used and a pipeline cannot guess (flow shift, resolution,
text encoding) must be as in the checkpoint. The folder appears whole, by a rename. Weights pass through memory one
parameter at a time, for any number of processes that wrote the checkpoint.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sana_pipe.base import hub
from sana_pipe.base.config import Weights
from sana_pipe.base.errors import ConfigError, UserError, writing
from sana_pipe.base.options import value_at
from sana_pipe.base.urls import strip_credentials
from sana_pipe.config import Config, written
from sana_pipe.data.encoders.text import text_width
from sana_pipe.data.encoders.text_kind import kind_at, max_length
from sana_pipe.data.encoders.vae import vae_shape
from sana_pipe.data.encoders.vae_kind import vae_at
from sana_pipe.tools import outputs
from sana_pipe.tools.reporting.export_folder import (
    MARK,
    TOKENIZER,
    Parts,
    published,
    recorded_files,
    write_json,
    write_parts,
)
from sana_pipe.tools.reporting.export_readme import TrainedModel, copy_pictures, readme, trigger_of
from sana_pipe.train.models.adapters import Adapter, Merged, adapter_from, files
from sana_pipe.train.models.spec import TEXT_KIND, ModelSpec
from sana_pipe.train.training import checkpoint as checkpoints
from sana_pipe.train.training.base_weights import whole_weights

_FILES = (".safetensors", ".sft", ".pth", ".pt", ".ckpt", ".bin")
"""Endings of weights: `--out lora.safetensors` would be a folder of this name."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_SAME = (
    *("train.flow.shift", "data.resolution"),
    *("text.prompting", "text.instruction", "text.max_length"),
)
"""Options that must be as in training."""
_PLACES = "vae.id", "vae.revision", "text.id", "text.revision"
_MODEL = "model.weights.id", "model.weights.revision", "model.arch", "train.seed"


def run(
    config: Config,
    checkpoint: str,
    out: Path,
    *,
    best: bool = False,
    ema: bool = False,
    overwrite: bool = False,
    dtype: str | None = None,
    form: str = "diffusers",
) -> Path:
    """Write the folder.

    Args:
        checkpoint: `auto` (the newest of `train.output`) or a checkpoint folder.
        best: take the checkpoint with the lowest held-out loss of the run that `checkpoint` names.
        out: must not exist, or be empty; no input of the configuration.
        ema: export the EMA weights instead of the last weights.
        overwrite: `out` may hold an export, which is replaced. Files that were added to it or changed stay.
        dtype: of the transformer's files: fp32, bf16 or fp16; None: bf16 for what was trained next to a base in bf16,
            fp32 for a whole model.
        form: `diffusers` (a whole pipeline, an adapter's file, or a ControlNet's folder), `merged` (the whole pipeline
            of an adapter), `nvlabs` (the transformer) or `comfyui` (an adapter's file).

    Returns:
        `out`.

    Raises:
        UserError: no checkpoint, another configuration than the checkpoint's, `out` holds something else, encoders
            that do not fit the model, a precision that breaks the weights or whose range they exceed.
    """
    out = Path(out).absolute()
    _check_dtype(config, dtype or "fp32")
    if best:
        folder, loss = checkpoints.find_best(config.train.output, checkpoint, ema=ema)
        print(f"lowest held-out loss of the checkpoints: {loss:.4f}, {folder}", flush=True)
    else:
        folder = checkpoints.find(config.train.output, checkpoint)
    document = checkpoints.read_document(folder)
    name = checkpoints.EMA_WEIGHTS if ema else checkpoints.LAST_WEIGHTS
    state = {"weights": name, **document.state.as_dict()}
    check_target(config, out, overwrite)
    check_same(config, document.config, folder)
    config = _as_trained(config, document.config)
    architecture, adapter = document.architecture, adapter_from(document.adapter)
    form = _form(form, architecture, adapter)
    of_adapter = adapter is not None and form in adapter.formats
    whole = form in ("diffusers", "merged") and not of_adapter and architecture.pipeline is not None
    dtype = dtype or default_dtype(config, of_adapter)
    stored = checkpoints.ModelTensors(folder, ema=ema)  # refused before encoders are fetched
    parts = _parts(config, architecture, document.text_kind) if whole else None
    if parts is not None:
        architecture = architecture.with_sample_size(config.data.resolution // parts.compression)
    weights = whole_weights(config.model.weights, config.train.seed, stored)

    ending = f"_step_{document.state.step}{'_ema' if ema else ''}"
    about: dict[str, Any] = {"weights": name, "state": document.state, "dtype": dtype}
    with published(out) as work:
        if parts is not None:
            architecture.save(weights, work / "transformer", DTYPES[dtype])
            write_parts(described(config, architecture), parts, work)
            about |= {"dtype": str(DTYPES[dtype]).removeprefix("torch."), "compression": parts.compression}
            about |= {"vae": _origin(config.vae), "text_encoder": _origin(config.text)}
            text = readme(architecture.readme, described(config, architecture), **about)
        elif form == "nvlabs":
            architecture.save(weights, work, DTYPES[dtype], form, f"sana{ending}", max_length(config.text))
            text = readme("nvlabs", described(config, architecture), **about)
        elif of_adapter:
            assert adapter is not None and isinstance(weights, Merged)
            run = folder.resolve().parents[1]
            stem = re.sub(r"[^\w.-]+", "_", run.name) + ending
            adapter.save(form, weights, work, DTYPES[dtype], _header(config, adapter, document, stem), stem)
            pictures = asdict(copy_pictures(run, document.state.step, work))
            about |= {"form": form, "adapter": adapter, "file": f"{stem}.safetensors", **_base(config), **pictures}
            about["before"] = first_drawing(document)
            text = readme(adapter.readme, described(config, architecture), **about)
        else:
            architecture.save(weights, work / "transformer", DTYPES[dtype])
            text = readme("transformer", described(config, architecture), **about)
        if (work / "transformer").is_dir() and document.text_kind not in (None, architecture.text_kind):
            path = work / "transformer" / "config.json"
            write_json(path, {**hub.read_json(path), TEXT_KIND: document.text_kind})
        (work / "README.md").write_text(text, encoding="utf-8")
        record = outputs.recorded(work)
        write_json(work / MARK, {"state": state, "config": _shown(config), "files": record})
    print(f"exported {stored} in {dtype} to {out}; the call is in its README.md", flush=True)
    if form in ("comfyui", "nvlabs") and (warning := architecture.comfyui_warning):
        print(f"warning: {warning}", flush=True)
    return out


def described(config: Config, architecture: ModelSpec) -> TrainedModel:
    """Collect the content of the README."""
    shift = config.train.flow.shift
    return TrainedModel(architecture, config.model.weights, config.data, config.text, shift, config.sample)


def _header(config: Config, adapter: Adapter, document: checkpoints.Document, title: str) -> dict[str, str]:
    """Make the header of an adapter's file."""
    base, rank = _base(config)["base"].strip("`"), getattr(adapter, "rank", None)
    return files.header(
        title,
        base,
        trigger_of(config.data.caption_prefix),
        config.data.resolution,
        document.state.step,
        rank,
        document.architecture.family,
    )


def first_drawing(document: checkpoints.Document) -> str:
    """Say what a run drew before its first step, in words: the base, unless it continued an adapter."""
    continued = document.began_from is not None or value_at(document.config, "train.adapter.start") is not None
    return "before this run" if continued else "base"


def _form(form: str, architecture: ModelSpec, adapter: Adapter | None) -> str:
    """Choose what is written: one of the adapter's formats, of the architecture's, or `merged`, a whole pipeline.

    Raises:
        ConfigError: the checkpoint has no such form.
    """
    offered = architecture.formats
    if adapter is not None:
        read = tuple(name for name in adapter.formats if name not in architecture.unread)
        others = () if adapter.stays else ("merged", *offered)
        offered = tuple(dict.fromkeys((*read, *others)))
        if form == "diffusers" and form not in read:
            return "merged"
    if form not in offered:
        what = f"a whole {architecture.class_name}" if adapter is None else str(adapter)
        way = " (ComfyUI reads it)" if form == "comfyui" and "nvlabs" in offered else ""
        raise ConfigError(
            f"--format {form} is not a format of {what}", fix=f"--format {offered[-1 if way else 0]}{way}"
        )
    return form


def _base(config: Config) -> dict[str, str]:
    """The base of an adapter for its README: in words, and the place that the call loads."""
    weights = config.model.weights
    if weights is None:
        return {"base": f"a model from scratch with seed {config.train.seed}", "place": "THE/BASE"}
    if hub.is_local(weights):
        return {"base": _name(weights), "place": "THE/BASE"}
    return {"base": f"`{_origin(weights)}`", "place": weights.id}


# ---------------------------------------------------------------------------------------------------- checks


def check_target(config: Config, out: Path, overwrite: bool) -> None:
    """Refuse a folder that is an input of the configuration, or that holds anything but an export.

    Raises:
        UserError: it is one.
    """
    if out.suffix in _FILES:
        what = f"--out {out}: an export is a folder, not a file"
        raise UserError(what, fix=f"--out {shlex.quote(str(out.with_suffix('')))}")
    earlier = out.with_name(f".{out.name}.old")
    if not os.path.lexists(out) and (earlier / MARK).is_file():  # a kill between the two renames of `_put_in_place`
        with writing(out, "check the permissions, or give another --out"):
            os.rename(earlier, out)
    outputs.check(config, out, whole=True)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MARK).is_file():
        what, fix = f"{out} exists and is not an export of sana-pipe", "give another --out"
    elif not overwrite:
        what, fix = f"{out} holds an export", "--overwrite, or another --out"
    else:
        recorded_files(out)
        return
    raise UserError(what, expected="a folder that is new or empty", fix=fix)


def default_dtype(config: Config, of_adapter: bool) -> str:
    """bf16 for what was trained next to a base in bf16: it is never more exact than that when it draws."""
    weights = config.model.weights
    in_bf16 = config.train.precision.startswith("bf16") and (weights is None or weights.supports("bf16"))
    return "bf16" if of_adapter and in_bf16 else "fp32"


def _check_dtype(config: Config, dtype: str) -> None:
    weights = config.model.weights
    if weights is not None and not weights.supports(dtype) and dtype != "fp32":
        raise ConfigError(
            f"--dtype {dtype} breaks these weights, which run in {' and '.join(weights.runs_in or [])}",
            expected="a precision of model.weights.runs_in, or fp32",
            fix="--dtype fp32",
        )


def check_same(config: Config, trained: dict[str, Any], folder: Path) -> None:
    """Refuse a configuration whose values differ from those that the checkpoint was trained with."""
    current = config.model_dump(mode="json")
    before = {name: value_at(trained, name) for name in (*_SAME, *_PLACES)}
    now = {name: value_at(current, name) for name in before}
    if None in (lengths := {each["text.max_length"] for each in (before, now)}) and len(lengths) > 1:
        usual = max_length(config.text.model_copy(update={"max_length": None}))
        for each in (before, now):
            each["text.max_length"] = each["text.max_length"] or usual
    differences = [
        f"{name}: the checkpoint has {before[name]!r}, the configuration {now[name]!r}"
        for name in _SAME
        if before[name] != now[name]
    ]
    if differences:
        raise ConfigError(
            f"{folder} was trained with another configuration\n  " + "\n  ".join(differences),
            fix="--config with the config.yaml of its run directory",
        )
    for name in _PLACES:
        if before[name] != now[name]:
            what = f"{name} was {before[name]!r} in training and is {now[name]!r} now"
            print(f"note: {what}: the export takes the current one", flush=True)


def _as_trained(config: Config, trained: dict[str, Any]) -> Config:
    """The configuration with the text in front of the captions of the training, whatever the file says now."""
    before, now = str(value_at(trained, "data.caption_prefix") or ""), config.data.caption_prefix
    if before == now:
        return config
    print(f"note: the captions of the training began with {before!r}; data.caption_prefix is {now!r} now", flush=True)
    return config.model_copy(update={"data": config.data.model_copy(update={"caption_prefix": before})})


def _parts(config: Config, architecture: ModelSpec, text_kind: str | None) -> Parts:
    """Fetches them; those that do not fit the model are refused. text_kind: of the training's rows."""
    vae, text = hub.resolve(config.vae), hub.resolve(config.text)
    compression, channels = vae_shape(vae)
    fix = "give the encoders that the model was trained with"
    architecture.check_widths(f"the VAE {config.vae.id}", fix, channels=channels)
    of_text = f"the text encoder {config.text.id}"
    architecture.check_widths(of_text, fix, text_width=text_width(text))
    architecture.check_text_kind(of_text, fix, kind_at(text).name, text_kind)
    if config.model.weights is not None:
        kind = vae_at(vae)
        architecture.check_factors(f"the VAE {config.vae.id}", fix, kind.scaling_factor, kind.shift_factor)
    return Parts(vae, text, hub.resolve(config.text.tokenizer, TOKENIZER), compression)


def _shown(config: Config) -> dict[str, Any]:
    """The options that an export depends on, by name, without paths of this machine."""
    tree = written(config)
    ids = {"vae.id": _name(config.vae), "text.id": _name(config.text)}
    if config.model.weights is not None:
        ids["model.weights.id"] = _name(config.model.weights)
    names = (*_SAME, *_PLACES, *_MODEL, "sample.steps", "sample.guidance")
    return {name: ids.get(name, value_at(tree, name)) for name in names}


def _name(weights: Weights) -> str:
    """A hub id; a local folder stays unnamed."""
    return "a local folder" if Path(weights.id).exists() else weights.id


def _origin(weights: Weights) -> str:
    return strip_credentials(_name(weights) + (f" at {weights.revision}" if weights.revision else ""))
