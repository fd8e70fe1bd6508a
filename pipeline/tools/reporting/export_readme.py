"""README.md of an export: the call that the model needs, why it has each argument, and an adapter's pictures."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sana_pipe.base.yaml_text import as_yaml
from sana_pipe.data.encoders.config import TextConfig
from sana_pipe.data.sources.caption_rules import INSTRUCTIONS, instruction
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.tools.reporting.page import render
from sana_pipe.tools.reporting.run_pictures import Drawing, files
from sana_pipe.train.models.config import SampleConfig, StartWeights
from sana_pipe.train.models.spec import Call, ModelSpec

PICTURES = 5
"""Limit on the prompts whose pictures an adapter's README shows."""


@dataclass(frozen=True)
class TrainedModel:
    """The content of a README about a model: its architecture, and the options that its pictures depend on.

    Attributes:
        weights: that the training began from; None: random values.
    """

    architecture: ModelSpec
    weights: StartWeights | None
    data: DataConfig
    text: TextConfig
    flow_shift: float
    sample: SampleConfig


def readme(
    template: str,
    model: TrainedModel,
    compression: int | None = None,
    *,
    place: str = "PATH/OF/THIS/FOLDER",
    adapter: object = None,
    **facts: Any,
) -> str:
    """The text by `templates/TEMPLATE.md`.

    Args:
        compression: of the VAE; None: not known.
        place: of the pipeline that the call loads.
        facts: other values that the template names: `weights` in words, `state` of the data (`step`, `snapshot`,
            `seed`), `dtype` and others.
    """
    prefix, arguments = model.data.caption_prefix, call_arguments(model, compression)
    quoted = json.dumps(json.dumps(instruction(model.text).split("\n")))
    values = {
        "head": _head(model.architecture, template, place, trigger_of(prefix) if adapter is not None else "", adapter),
        "prefix": code(prefix) if prefix else None,
        "prompt": json.dumps((prefix if adapter else "") + "a caption", ensure_ascii=False),
        "model": model,
        "architecture": model.architecture,
        "compression": compression,
        "place": place,
        "adapter": adapter,
        "controlnet": template == "controlnet",
        "arguments": arguments,
        "quoted": quoted if arguments.get("complex_human_instruction", "None") != "None" else None,
    }
    return render(f"{template}.md", **values, **facts) + "\n"


def trigger_of(caption_prefix: str) -> str:
    """The text in front of every caption in training, without the comma that parts it from them; "": none."""
    return " ".join(caption_prefix.split()).strip(" ,;:.")


def _head(architecture: ModelSpec, template: str, place: str, trigger: str, adapter: object) -> str:
    """The YAML that the hub reads at the top of a model's README."""
    kind = {"lora": ["lora"], "dora": ["lora", "dora"], "controlnet": ["controlnet"]}.get(
        getattr(adapter, "kind", ""), []
    )
    values: dict[str, Any] = {"license": "other", "library_name": "diffusers"}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", place) and adapter is not None:
        values["base_model"] = place
    if trigger:
        values["instance_prompt"] = trigger
    if template != "controlnet":
        values["pipeline_tag"] = "text-to-image"
    family = [architecture.family] if architecture.family else []
    values["tags"] = ["text-to-image", "diffusers", *family, *kind]
    text = as_yaml(values, sort_keys=False, allow_unicode=True, width=10**6)
    remark = "license: other  # fill in: that of the base, and the rights of the pictures"
    return f"---\n{text.replace('license: other', remark, 1)}---\n"


def code(text: str) -> str:
    """Foreign text as a code span of Markdown, also in a table."""
    text = re.sub(r"[\r\n]+", " ", text).replace("|", r"\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") or not text.strip() else ""
    return f"{fence}{space}{text}{space}{fence}"


def plain(text: str) -> str:
    """Foreign text that Markdown shows as it is, also in a table: no markup, no link, no line break."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~$-])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def call_arguments(model: TrainedModel, compression: int | None) -> dict[str, str]:
    """Return what the pipeline's call must be given for this model, as Python source by argument."""
    return model.architecture.call_arguments(call_of(model, compression))


def call_of(model: TrainedModel, compression: int | None) -> Call:
    used = instruction(model.text)
    return Call(
        resolution=model.data.resolution,
        compression=compression,
        table=model.data.buckets == "sana",
        steps=model.sample.steps,
        guidance=model.sample.guidance,
        max_length=model.text.max_length,
        instruction=None if used == INSTRUCTIONS["diffusers"] else used,
    )


@dataclass(frozen=True)
class ReadmePictures:
    """The pictures of an adapter's README, which its templates name.

    Attributes:
        pictures: the cells of each row of the table; none without both drawings.
        drawn_after: the step of the second drawing.
        controls: whether the second cell is a control picture.
    """

    pictures: list[list[str]]
    drawn_after: int = 0
    controls: bool = False


def copy_pictures(run: Path, step: int, folder: Path) -> ReadmePictures:
    """Copy what a run drew before its first step and last up to `step` into `folder`/pictures. The first is the base,
    unless the run continued an adapter."""
    drawn = [drawing for path in files(run) if (drawing := Drawing.read(path)).facts.step <= step]
    shown = [(drawing, made) for drawing in drawn if (made := drawing.pictures())]
    if len(shown) < 2 or shown[0][0].facts.step != 0:
        return ReadmePictures([])
    (_, before), (last, after) = shown[0], shown[-1]
    rows, controls = [], any(name.endswith("-control") for name in after)
    columns = [("control", after, "-control")] * controls + [("base", before, ""), ("adapter", after, "")]
    for number, prompt in enumerate(last.facts.prompts[:PICTURES]):
        cells = [plain(prompt)]
        for kind, made, ending in columns:
            cells.append("")  # one that could not be decoded
            if (source := made.get(f"{number:04d}{ending}")) is not None:
                (folder / "pictures").mkdir(exist_ok=True)
                shutil.copyfile(source, folder / f"pictures/{number}-{kind}.png")
                cells[-1] = f"![](pictures/{number}-{kind}.png)"
        rows.append(cells)
    return ReadmePictures(rows, last.facts.step, controls)
