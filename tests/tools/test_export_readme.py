"""The README of an exported adapter: its call, and the pictures of its run up to its step."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image

from sana_pipe.config import load
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.stages.export import described, first_drawing
from sana_pipe.tools.reporting.export_readme import copy_pictures, readme
from sana_pipe.tools.reporting.run_pictures import DECODED
from sana_pipe.train.models.adapters.lora import LoRA
from sana_pipe.train.models.prx import PRX
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.models.zimage_config import ZImageConfig
from sana_pipe.train.training.checkpoint import Document
from tests.support.drawings import draw, paint
from tests.support.hub_layouts import SMALL

ENCODING = LatentEncoding(compression=8, channels=4)


def written(run: Path, folder: Path, step: int, *overrides: str) -> str:
    config = load("tiny", [f"cache={run}", "data.caption_prefix='sks cat, '", *overrides])
    folder.mkdir()
    return readme(
        "adapter",
        described(config, replace(SMALL, sample_size=8)),
        form="diffusers",
        adapter=LoRA(2, 2.0, ["transformer_blocks.0.attn1.to_q"]),
        base="`owner/base`",
        place="owner/base",
        weights="last weights",
        state=SimpleNamespace(step=step, snapshot="0" * 32, seed=3),
        **asdict(copy_pictures(run, step, folder)),
        before="base",
    )


def test_pictures_of_the_base_and_of_the_last_drawing_up_to_the_step(tmp_path: Path) -> None:
    for step in (0, 100, 200):
        paint(draw(tmp_path / "run", step, ENCODING, ("a red cube", "a | b")), shade=step)
    text = written(tmp_path / "run", tmp_path / "export", 150)
    assert "| prompt | base | adapter, step 100 |" in text
    assert r"| a \| b | ![](pictures/1-base.png) | ![](pictures/1-adapter.png) |" in text
    red = [Image.open(tmp_path / f"export/pictures/0-{kind}.png").getpixel((0, 0))[0] for kind in ("base", "adapter")]  # type: ignore[index]
    assert red == [0, 100]
    assert '"sks cat, a caption",' in text and 'from_pretrained("owner/base"' in text and "`sks cat, `" in text


def test_foreign_text_is_no_markup_in_a_readme(tmp_path: Path) -> None:
    prefix = "---\nsks: [x](http://evil) `a` | <img src=x> \\'q\\ # {{ 7 * 7 }}, "
    for step in (0, 100):
        paint(draw(tmp_path / "run", step, ENCODING, ("**a** <b> [l](u) | `c`\n\n# head\n---", "b")), shade=step)
    text = written(tmp_path / "run", tmp_path / "export", 150, f"data.caption_prefix={json.dumps(prefix)}")
    head = text.split("\n---\n")[0]
    values = yaml.safe_load(head.removeprefix("---\n"))
    assert values["instance_prompt"] == " ".join(prefix.split()).strip(" ,")
    assert values["base_model"] == "owner/base" and "lora" in values["tags"] and values["library_name"] == "diffusers"
    code = text.partition("```python\n")[2].partition("```")[0]
    (said,) = [line.strip() for line in code.splitlines() if "a caption" in line]
    assert ast.literal_eval(said)[0] == f"{prefix}a caption"
    table = text.partition("| | |")[2]
    assert r"\*\*a\*\* &lt;b&gt; \[l\]\(u\) \| \`c\` \# head \-\-\- |" in table
    shown = next(line for line in table.splitlines() if line.startswith("| text in front"))
    assert shown.endswith(" |") and "``" in shown and r" \| <img" in shown and "\n# head" not in table


def test_a_controlnet_shows_the_control_next_to_its_pictures(tmp_path: Path) -> None:
    for step in (0, 100):
        path = draw(tmp_path / "run", step, ENCODING, ("a", "b"), controls=[])
        paint(path, shade=step)
        document = json.loads((path.with_suffix("") / DECODED).read_text())
        document["files"] |= {f"{name[:4]}-control": name for name in document["files"].values()}
        (path.with_suffix("") / DECODED).write_text(json.dumps(document))
    (tmp_path / "export").mkdir()
    made = copy_pictures(tmp_path / "run", 100, tmp_path / "export")
    files = sorted(path.name for path in (tmp_path / "export/pictures").iterdir())
    assert files == sorted(f"{number}-{kind}.png" for number in (0, 1) for kind in ("adapter", "base", "control"))
    assert made.controls and all(name in str(made.pictures) for name in files)


def test_without_a_drawing_of_the_base_it_says_how_to_get_pictures(tmp_path: Path) -> None:
    paint(draw(tmp_path / "run", 100, ENCODING))
    assert "sample --watch RUN --once" in written(tmp_path / "run", tmp_path / "export", 100)
    assert not (tmp_path / "export/pictures").exists()


def test_the_call_defines_the_instruction_that_it_passes(tmp_path: Path) -> None:
    text = written(tmp_path / "run", tmp_path / "export", 100, "text.instruction='Draw this: '")
    code = text.partition("```python\n")[2].partition("pipe = ")[0]
    names: dict[str, Any] = {}
    exec(code.replace("from diffusers import SanaPipeline\n", ""), names)
    assert "complex_human_instruction=json.loads(INSTRUCTION)," in text
    assert names["json"].loads(names["INSTRUCTION"]) == ["Draw this: "]


def test_a_run_that_continued_an_adapter_did_not_first_draw_the_base() -> None:
    def drawn(began: dict[str, Any] | None, start: str | None) -> str:
        config = {"train": {"adapter": {"start": start}}}
        return first_drawing(Document(SimpleNamespace(), SMALL, config, {}, began))  # type: ignore[arg-type]

    assert drawn(None, None) == "base"
    assert drawn({"total": 3}, None) == drawn(None, "lora.safetensors") == "before this run"


@pytest.mark.parametrize(("spec", "parts"), [(ZImageConfig(), "inside the transformer"), (PRX(), "and the VAE")])
def test_other_models_say_where_the_call_cannot_draw_as_sample_does(spec: ModelSpec, parts: str) -> None:
    """Their pipelines guide away from the empty caption alone; float16 overflows in them."""
    state = SimpleNamespace(step=3, snapshot="abc", seed=0)
    facts = {"weights": "last weights", "dtype": "float32", "vae": "a", "text_encoder": "b", "state": state}
    for guidance in (0.5, 1.0, 4.5):
        model = described(load("tiny", [f"sample.guidance={guidance}"]), spec)
        text = readme(spec.readme, model, 8, **facts)
        assert (f"{spec.pipeline}` cannot guide" in text) == (guidance < 1)
        assert f"Not float16: {'values ' * ('inside' in parts)}" in text and f"{parts} overflow in it" in text
