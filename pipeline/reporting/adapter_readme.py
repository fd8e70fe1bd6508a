"""The README beside an exported adapter, with pictures of the base and of the adapter from the run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.resources import files as resources
from pathlib import Path
from string import Template
from typing import Any

from pipeline.config import Config
from pipeline.models.adapters import Adapter
from pipeline.reporting import pictures

SHOWN = 5
_READERS = {
    "diffusers": "diffusers 0.33 or newer reads it with peft.",
    "comfyui": "ComfyUI's LoraLoader reads it (`models/loras`); its Sana nodes load the base.",
}


def adapter_readme(
    config: Config,
    adapter: Adapter,
    form: str,
    run: Path,
    folder: Path,
    base: str,
    facts: Mapping[str, Any],
    call: Mapping[str, str],
) -> str:
    """The text; the pictures it shows are copied into `folder`.

    Args:
        form: one of `adapter.formats`.
        run: the run's folder, whose pictures are taken.
        base: in words.
        facts: `weights`, `step`, `snapshot`, `seed`.
        call: arguments of the pipeline's call, as Python source.
    """
    trigger = config.data.caption_prefix
    return Template(resources("pipeline.reporting").joinpath("templates/adapter.md").read_text("utf-8")).substitute(
        facts,
        title=f"{adapter} of {base}",
        reader=_READERS.get(form, ""),
        call=_call(base, trigger, call) if form == "diffusers" else "",
        base=base,
        trigger=f"`{trigger}`" if trigger else "none; see the captions below",
        resolution=config.data.resolution,
        shift=f"{config.train.flow.shift:g}",
        recipe=config.text.recipe,
        pictures=_pictures(run, int(facts["step"]), folder),
    )


def _call(base: str, trigger: str, arguments: Mapping[str, str]) -> str:
    place = base.strip("`") if base.startswith("`") else "THE/BASE"
    return "\n".join(
        [
            "",
            "```python",
            "import torch",
            "from diffusers import SanaPipeline",
            "",
            f'pipe = SanaPipeline.from_pretrained("{place}", torch_dtype=torch.bfloat16)',
            'pipe.load_lora_weights("PATH/OF/THIS/FOLDER")',
            "image = pipe(",
            f'    "{trigger}a caption",',
            *(f"    {name}={value}," for name, value in arguments.items()),
            ").images[0]",
            "```",
            "",
        ]
    )


def _pictures(run: Path, step: int, folder: Path) -> str:
    """A table of what the run drew before its first step, which is the base, and last up to this step."""
    drawn = [drawing for path in pictures.files(run) if (drawing := pictures.Drawing.read(path)).facts["step"] <= step]
    shown = [(drawing, made) for drawing in drawn if (made := drawing.pictures())]
    if len(shown) < 2 or shown[0][0].facts["step"] != 0:
        return (
            "\nPictures of the base and of the adapter stand here after a run with `train.pictures` whose drawings are "
            "decoded (`sana-pipe sample --watch RUN --once`).\n"
        )
    (_, before), (last, after) = shown[0], shown[-1]
    lines = ["", f"| prompt | base | adapter, step {last.facts['step']} |", "|---|---|---|"]
    for number, prompt in enumerate(last.facts["prompts"][:SHOWN]):
        cells = []
        for kind, made in (("base", before), ("adapter", after)):
            if (source := made.get(f"{number:04d}")) is not None:
                name = f"pictures/{number}-{kind}.png"
                (folder / "pictures").mkdir(exist_ok=True)
                shutil.copyfile(source, folder / name)
                cells.append(f"![]({name})")
        lines.append(f"| {' | '.join([str(prompt).replace('|', chr(92) + '|'), *cells])} |")
    return "\n".join([*lines, ""])
