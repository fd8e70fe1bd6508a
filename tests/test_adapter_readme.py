"""The README beside an exported adapter shows the pictures of its run, up to its step."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from pipeline.cache import layout
from pipeline.config import load
from pipeline.models.adapters.lora import LoRA
from pipeline.reporting.adapter_readme import adapter_readme
from tests.support.drawings import draw, paint

RECIPE = layout.LatentRecipe(compression=8, channels=4)


def written(run: Path, folder: Path, step: int) -> str:
    config = load("tiny", [f"cache={run}", "data.caption_prefix='sks cat, '"])
    folder.mkdir()
    facts = {"weights": "last weights", "step": step, "snapshot": "0" * 32, "seed": 3}
    return adapter_readme(
        config,
        LoRA(2, 2.0, ["transformer_blocks.0.attn1.to_q"]),
        "diffusers",
        run,
        folder,
        "`owner/base`",
        facts,
        {"num_inference_steps": "20"},
    )


def test_pictures_of_the_base_and_of_the_last_drawing_up_to_the_step(tmp_path: Path) -> None:
    for step in (0, 100, 200):
        paint(draw(tmp_path / "run", step, RECIPE, ("a red cube", "a | b")), shade=step)
    text = written(tmp_path / "run", tmp_path / "export", 150)
    assert "| prompt | base | adapter, step 100 |" in text
    assert r"| a \| b | ![](pictures/1-base.png) | ![](pictures/1-adapter.png) |" in text
    red = [Image.open(tmp_path / f"export/pictures/0-{kind}.png").getpixel((0, 0))[0] for kind in ("base", "adapter")]  # type: ignore[index]
    assert red == [0, 100]
    assert '"sks cat, a caption",' in text and 'from_pretrained("owner/base"' in text and "`sks cat, `" in text


def test_without_a_drawing_of_the_base_it_says_how_to_get_pictures(tmp_path: Path) -> None:
    paint(draw(tmp_path / "run", 100, RECIPE))
    assert "sample --watch RUN --once" in written(tmp_path / "run", tmp_path / "export", 100)
    assert not (tmp_path / "export/pictures").exists()
