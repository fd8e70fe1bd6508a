"""The folder of an export: it appears whole by a rename, files of others in it stay, and a pipeline's parts are copied
without paths of this machine.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sana_pipe.base import hub
from sana_pipe.base.disk import sync_path
from sana_pipe.base.errors import ConfigError, UserError, writing
from sana_pipe.data.encoders.text import TOKENIZER_FILES
from sana_pipe.tools import outputs
from sana_pipe.tools.reporting.export_readme import TrainedModel, call_of

MARK = "sana_pipe.json"
"""Marks a folder as an export: what was exported, and the options that it depends on."""

TOKENIZER = (*TOKENIZER_FILES, "added_tokens.json")
"""Files of a tokenizer that a pipeline has."""


@dataclass(frozen=True)
class Parts:
    """The local folders that the encoders are copied from, and the VAE's compression."""

    vae: Path
    text: Path
    tokenizer: Path
    compression: int


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `out` once it is complete."""
    work = out.with_name(f".{out.name}.partial")
    try:
        with writing(out, "check the permissions, or give another --out"):
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            yield work
            if (out / MARK).is_file():
                for path, name in outputs.carry(out, work, outputs.foreign(out, recorded_files(out), MARK)):
                    print(f"{path} of the earlier export was changed since: it stays as {name}", flush=True)
            for path in [*work.rglob("*"), work]:
                if not path.is_symlink():
                    sync_path(path)
            _put_in_place(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def recorded_files(out: Path) -> dict[str, str]:
    """The digest of each file that an export wrote."""
    path = out / MARK
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path}: does not list the files of the export, so files of others cannot be told from them",
            fix="give another --out",
        ) from None


def write_parts(model: TrainedModel, parts: Parts, work: Path) -> None:
    """Write everything of a pipeline but its transformer and its README into a folder."""
    architecture = model.architecture
    solver = architecture.scheduler(model.flow_shift)  # the only import of diffusers here
    solver.save_pretrained(work / "scheduler")
    copy_model(parts.vae, work / "vae")
    copy_model(parts.text, work / "text_encoder")
    (work / "tokenizer").mkdir()
    for name in TOKENIZER:
        if (parts.tokenizer / name).is_file():
            copy = copy_settings if name.endswith("config.json") else shutil.copyfile
            copy(parts.tokenizer / name, work / "tokenizer" / name)
    write_json(
        work / "model_index.json",
        {
            "_class_name": architecture.pipeline,
            **architecture.pipeline_settings(call_of(model, parts.compression)),
            "scheduler": ["diffusers", type(solver).__name__],
            "text_encoder": class_of(parts.text, "text_encoder", architecture.libraries),
            "tokenizer": ["transformers", tokenizer_class(parts.tokenizer)],
            "transformer": ["diffusers", architecture.class_name],
            "vae": class_of(parts.vae, "vae"),
        },
    )


def class_of(folder: Path, part: str, libraries: Mapping[str, str] = {}) -> list[str]:
    """Name the library and the class of a pipeline's part as in the `model_index.json` that the folder belongs to, or
    else as its `config.json` does. A pipeline has no head of a language model. libraries: `ModelSpec.libraries`."""
    index = folder.parent / "model_index.json"
    entry = hub.read_json(index).get(part) if folder.name == part and index.is_file() else None
    if isinstance(entry, list) and len(entry) == 2 and entry[0] in ("diffusers", "transformers", *libraries.values()):
        return [str(each) for each in entry]
    values = hub.read_json(folder / "config.json")
    if "_class_name" in values:
        return ["diffusers", str(values["_class_name"])]
    names = values.get("architectures") or []
    if not names:
        raise ConfigError(
            f"{folder / 'config.json'} names no class, which a pipeline needs",
            expected="_class_name or architectures, as save_pretrained writes them",
            fix="save the model again with save_pretrained, or take the folder of a pipeline",
        )
    name = str(names[0]).replace("ForCausalLM", "Model")
    if name.endswith("ForConditionalGeneration"):
        raise ConfigError(
            f"{folder} holds an encoder with its decoder, and a pipeline has the encoder alone",
            found=name,
            fix="--set text.id=FOLDER with the text encoder of a pipeline of this model",
        )
    return [libraries.get(name, "transformers"), name]


def copy_settings(source: Path, target: Path) -> None:
    """Copy a JSON object without the local paths that libraries write into it, and without names of code."""
    values = hub.read_json(source)
    dropped = [
        name
        for name in ("_name_or_path", "name_or_path", "tokenizer_file", "auto_map")
        if (name == "auto_map" and name in values) or Path(str(values.get(name, ""))).is_absolute()
    ]
    if dropped:
        write_json(target, {name: value for name, value in values.items() if name not in dropped})
    else:
        shutil.copyfile(source, target)


def copy_model(source: Path, target: Path) -> None:
    """Copy a model's configuration and weights; file names lose the variant, since the copy has only one."""
    target.mkdir()
    for path in sorted(source.glob("*config.json")):
        copy_settings(path, target / path.name)
    chosen = hub.choose(source)
    middle = f".{chosen.variant}" if chosen.variant else ""
    plain = {name: name.replace(middle, "", 1) for name in chosen.files}
    for name in chosen.files:
        shutil.copyfile(source / name, target / plain[name])
    if chosen.index is not None:
        index = hub.read_json(source / chosen.index)
        index["weight_map"] = {name: plain[file] for name, file in index["weight_map"].items()}
        write_json(target / f"{chosen.index.partition('.')[0]}.safetensors.index.json", index)


def tokenizer_class(folder: Path) -> str:
    """Name the tokenizer's class. In transformers 4 `GemmaTokenizer` is the slow class, which reads another file than
    training did, and `TokenizersBackend` is called `PreTrainedTokenizerFast`, in 5, too."""
    path = folder / "tokenizer_config.json"
    name = hub.read_json(path).get("tokenizer_class") if path.is_file() else None
    both = {"GemmaTokenizer": "GemmaTokenizerFast", "TokenizersBackend": "PreTrainedTokenizerFast"}
    return both.get(name := str(name or "GemmaTokenizer"), name)


def write_json(path: Path, value: Any) -> None:
    """Write a value as a file of JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _put_in_place(work: Path, out: Path) -> None:
    """Rename the finished folder to its name, in place of an earlier one."""
    old = out.with_name(f".{out.name}.old")
    if out.exists():  # then what an earlier kill left of the old folder is in `out`, too
        shutil.rmtree(old, ignore_errors=True)
        os.rename(out, old)
    os.rename(work, out)
    sync_path(out.parent)
    shutil.rmtree(old, ignore_errors=True)
