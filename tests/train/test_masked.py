"""Masked training: what the mask leaves out reaches no gradient, and a sample's loss does not depend on its area."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
from sana_pipe.base.errors import ConfigError
from sana_pipe.base.launch import Launch
from sana_pipe.data.images import decoding, pillow_decoder
from sana_pipe.data.signals.mask import MaskEncoding
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.models.flow_matching import FlowMatching
from sana_pipe.train.parallel.microbatch import Outputs
from sana_pipe.train.training import metrics
from sana_pipe.train.training.assemble import objective_of
from sana_pipe.train.training.config import MaskConfig, PreserveConfig
from sana_pipe.train.training.objectives import visit_chosen
from sana_pipe.train.training.objectives.control import Controlled
from sana_pipe.train.training.objectives.preserve import Preserving
from sana_pipe.train.training.trainer import fit
from tests.support.launched import results_by_case
from tests.support.workers import masked, tiny_run

SHAPE = (3, 4, 6, 8)


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def values(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def half() -> torch.Tensor:
    """The left half of each sample; of the last one nothing."""
    mask = torch.zeros(3, 1, 6, 8)
    mask[:2, :, :, :4] = 1
    return mask


def _rgba(colour: tuple[int, int, int], alpha: np.ndarray) -> Image.Image:
    picture = Image.new("RGBA", alpha.shape[::-1], (*colour, 0))
    picture.putalpha(Image.fromarray(alpha))
    return picture


def _masks() -> dict[str, Image.Image]:
    """Files of one mask: the middle quarter of 64 x 64 pixels."""
    gray = np.zeros((64, 64), np.uint8)
    gray[16:48, 16:48] = 255
    ones, deep = gray // 255, gray.astype(np.uint16) * 257
    palette = Image.fromarray(ones, "P")
    palette.putpalette([0, 0, 0, 255, 255, 255])
    return {
        "gray": Image.fromarray(gray),
        "bits": Image.fromarray(gray).convert("1"),
        "rgb": Image.fromarray(gray).convert("RGB"),
        "palette": palette,
        "16 bits": Image.fromarray(deep),
        "0 and 1": Image.fromarray(ones),
        "0 and 1 in 16 bits": Image.fromarray(ones.astype(np.uint16)),
        "0 and 1 in rgb": Image.fromarray(ones).convert("RGB"),
        "alpha of white": _rgba((255, 255, 255), gray),
        "alpha of black": _rgba((0, 0, 0), gray),
        "alpha of gray": _rgba((128, 128, 128), gray).convert("LA"),
        "opaque": Image.fromarray(gray).convert("RGBA"),
    }


@pytest.mark.parametrize("name", _masks())
def test_a_mask_is_read_as_it_is_meant_in_every_form(name: str) -> None:
    sink = io.BytesIO()
    _masks()[name].save(sink, "PNG")
    encoding = MaskEncoding(decoder=pillow_decoder.DECODER, background=(255, 255, 255))
    pixels = encoding.pixels(sink.getvalue(), (64, 64), 10**6)
    expected = np.asarray(_masks()["rgb"])
    assert pixels.shape == (64, 64, 3) and np.abs(pixels.astype(int) - expected).max() == 0


def test_masks_of_classes_and_colours_are_refused_in_words() -> None:
    numbers = np.zeros((64, 64), np.uint8)
    numbers[:32], numbers[:, :20] = 1, 7
    classes = Image.fromarray(numbers, "P")
    classes.putpalette([0, 0, 0, 128, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 128, 0])
    red = Image.new("RGB", (64, 64))
    red.paste((255, 0, 0), (0, 0, 32, 64))
    encoding = MaskEncoding(decoder=pillow_decoder.DECODER, background=(255, 255, 255))
    for picture, word in ((Image.fromarray(numbers), "at most 7"), (classes, "colours"), (red, "colours")):
        sink = io.BytesIO()
        picture.save(sink, "PNG")
        with pytest.raises(decoding.ImageReject, match=word):
            encoding.pixels(sink.getvalue(), (64, 64), 10**6)


def test_bucket_counts_masks_that_say_nothing(
    make_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a picture without a mask nothing is said."""
    data = tmp_path / "data"
    data.mkdir()
    ramp = np.tile(np.linspace(0, 255, 96, dtype=np.uint8), (96, 1))
    masks = {"good": ramp, "white": ramp * 0 + 255, "black": ramp * 0, "dim": ramp // 3, "none": None}
    for number, (name, mask) in enumerate(masks.items()):
        Image.fromarray(np.stack([ramp.T, ramp, ramp * 0 + number], 2)).save(data / f"{name}.png")
        (data / f"{name}.txt").write_text("a cat")
        if mask is not None:
            Image.fromarray(mask).save(data / f"{name}.mask.png")
    config = make_config(tmp_path, "data.pictures.mask={suffix: .mask, required: false}")
    sana_pipe.stages.encode.run(config, str(data))
    capsys.readouterr()
    sana_pipe.stages.bucket.run(config, as_json=True)
    same_everywhere, dim = json.loads(capsys.readouterr().out)["notes"]
    assert "2 of 4 checked masks" in same_everywhere and {"white.png", "black.png"} <= set(
        re.split(r"[ ,;]+", same_everywhere)
    )
    assert "1 of 4 checked masks" in dim and "dim.png" in dim


def test_masked_cells_have_no_gradient_and_do_not_change_the_loss() -> None:
    flow, target, mask = FlowMatching(FlowConfig()), values(1), half()
    prediction = values(0).requires_grad_()
    loss = flow.loss(prediction, target, mask)
    loss.sum().backward()
    assert prediction.grad is not None
    assert torch.equal(prediction.grad != 0, (mask > 0).expand(SHAPE)), "also none of the sample without a mask"
    expected = flow.loss(prediction[:2, :, :, :4], target[:2, :, :, :4])
    torch.testing.assert_close(loss, torch.cat([expected, torch.zeros(1)]))
    other = torch.where(mask > 0, prediction.detach(), 1e10)
    assert torch.equal(flow.loss(other, target, mask), loss)


def test_the_level_of_the_loss_does_not_depend_on_the_area() -> None:
    flow, mask = FlowMatching(FlowConfig()), half()
    prediction, target = torch.full(SHAPE, 2.0), torch.zeros(SHAPE)
    assert flow.loss(prediction, target, 0.3 * mask)[:2].tolist() == pytest.approx([4, 4])
    torch.testing.assert_close(flow.loss(values(0), values(1), torch.ones(3, 1, 6, 8)), flow.loss(values(0), values(1)))
    with pytest.raises(ValueError, match="cells"):
        flow.loss(prediction, target, torch.ones(3, 1, 8, 6))


@pytest.mark.parametrize("outside", [0.0, 0.25, 1.0])
def test_cells_outside_have_the_weight_that_is_asked_for(outside: float) -> None:
    given = tiny_run.config(mask={"outside": outside}).train
    objective, batch = objective_of(given), tiny_run.global_batch(0)
    prediction = torch.zeros_like(batch.noise)
    for level in (None, 0.5):
        losses = objective.losses(
            Outputs(prediction, {}, {}), objective.prepare(batch, same, torch.float32, level).targets
        )
        errors = (batch.noise - batch.latents.float()).square().mean(1, keepdim=True).double()
        weights = outside + (1 - outside) * batch.pictures["mask"].double()
        expected = (errors * weights).sum((1, 2, 3)) / weights.sum((1, 2, 3))
        torch.testing.assert_close(losses["flow"].double(), expected.nan_to_num(0), rtol=1e-6, atol=0)
    assert objective.pictures == ("mask",) and objective_of(tiny_run.config().train).pictures == ()


def test_preservation_is_of_all_cells() -> None:
    objective = Preserving(FlowConfig(), PreserveConfig(share=0.5), mask=MaskConfig())
    batch = tiny_run.global_batch(0)
    chosen = visit_chosen(batch, "preserve", 0.5)
    targets = dict(objective.prepare(batch, same, torch.float32).targets)
    targets["reference"] = torch.zeros_like(batch.noise)[chosen]
    prediction = torch.zeros_like(batch.noise).requires_grad_()
    with torch.no_grad():
        prediction += 1
    losses = objective.losses(Outputs(prediction, {}, {}), targets)
    (losses["flow"] + losses["preserve"]).sum().backward()
    assert prediction.grad is not None
    learned = (batch.pictures["mask"] > 0) | chosen[:, None, None, None]
    assert torch.equal(prediction.grad != 0, learned.expand_as(prediction))


def test_controls_are_exchanged_and_masks_stay_with_their_samples() -> None:
    objective, batch = Controlled(FlowConfig(), mask=MaskConfig()), tiny_run.global_batch(0)
    assert objective.pictures == ("control", "mask")
    other = objective.contrasted(batch).pictures
    assert torch.equal(other["control"], batch.pictures["control"].roll(1, 0))
    assert torch.equal(other["mask"], batch.pictures["mask"])


def run(folder: Path, masks: torch.Tensor | None = None, **train: Any) -> dict[Any, list[dict[str, Any]]]:
    """The events of a run; masks: in place of those of the batches."""

    def touch(step: int) -> Any:
        batch = tiny_run.global_batch(step)
        return batch if masks is None else replace(batch, pictures={"mask": masks.expand_as(batch.pictures["mask"])})

    usual = {"steps": 3, "mask": {}, "validation": {"every": 3}}
    given = tiny_run.config(folder, **{**usual, **train})
    fit(given.train, tiny_run.task(given, touch=touch), Launch(), log=lambda line: None)
    return metrics.read_events(folder / "metrics.jsonl")


def test_a_run_is_masked_also_with_an_adapter_and_in_its_validation(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", mask=None)
    ones = run(tmp_path / "ones", torch.ones(1))
    masked_run = run(tmp_path / "masked", adapter={"rank": 2})
    in_pieces = run(tmp_path / "pieces", adapter={"rank": 2}, microbatch=3)

    def losses(events: Any) -> list[float]:
        return [row["loss"] for row in events[None]]

    assert losses(ones) == pytest.approx(losses(plain), rel=1e-5)
    assert losses(in_pieces) == pytest.approx(losses(masked_run), rel=1e-5)
    assert losses(masked_run)[0] != pytest.approx(losses(plain)[0], rel=1e-3)
    first = [events["validation"][0]["loss"] for events in (plain, masked_run)]
    assert first[0] != pytest.approx(first[1], rel=1e-3)


def test_nothing_is_learned_from_empty_masks(tmp_path: Path) -> None:
    rows = run(tmp_path, torch.zeros(1))[None]
    assert [(row["loss"], row["grad_norm"]) for row in rows] == [(0, 0)] * 3


def test_a_snapshot_without_masks_is_refused(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> None:
    import sana_pipe.stages.train

    options = ["train.device=cpu", "train.steps=1", "train.compile=none", "train.mask={}"]
    with pytest.raises(ConfigError, match="has no mask records"):
        sana_pipe.stages.train.run(make_config(tmp_path, f"cache={small_cache_copy}", *options), log=lambda line: None)


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_every_strategy_gives_what_one_process_gives(tmp_path: Path) -> None:
    for name, row in results_by_case(masked, tmp_path).items():
        assert row["loss"] <= 2e-6 and row["norm"] <= 2e-6 and row["gradient"] <= 2e-6, name
