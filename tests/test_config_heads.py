"""Every number in the head of a shipped configuration is derived here or stands next to its source."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sana_pipe.cli import cli
from sana_pipe.config import load, shipped
from sana_pipe.stages import demo
from sana_pipe.train.models.zimage_config import ZImageConfig
from sana_pipe.train.training import optimizers
from tests.support import hub_layouts
from tests.support.sana_shapes import SHAPES

RELEASED = [path.stem for path in shipped() if path.stem != "tiny"]
LORA, SCRATCH = "sana_1600m_1024_lora", "sana_600m_512_scratch"
ZIMAGE, PRX, PREFER = "zimage_1024_lora", "prx_512", "sana_1600m_1024_prefer"
CONTROLNETS = {  # configuration: (card, seconds of a step, microbatch of the least memory, peaks in GiB)
    "controlnet_24gb": ("4090", 2.15, 1, (19.3, 17.3)),
    "controlnet_80gb": ("h100", 1.59, 8, (65.6, 20.1)),
}
CHOSEN = {  # what `auto` chooses there
    "controlnet_24gb": {"microbatch": 2, "activation_checkpointing": "none", "parallel.reduce_each_microbatch": True},
    "controlnet_80gb": {"microbatch": 22, "activation_checkpointing": "none", "parallel.reduce_each_microbatch": False},
}
GPUS = 8
NVLABS = {  # configuration: (its name in NVlabs/Sana, lr, train_batch_size, num_warmup_steps)
    "sana_600m_512": ("Sana_600M_img512", 1e-4, 128, 2000),
    "sana_1600m_1024": ("Sana_1600M_img1024_AdamW", 1e-4, 64, 2000),
    "sana15_1600m_1024": ("Sana_1600M_1024px_AdamW_fsdp", 2e-5, 32, 1000),
    "sana15_4800m_1024": ("SANA1.5 4.8B, CAME in 8 bits", 2e-5, 2, 2000),
}
ON_EIGHT = {  # configuration: (GiB of each of 8 cards of 24 GB, activation checkpointing, microbatch)
    "sana15_1600m_1024": ("13.1", "selective", 8),
    "sana15_4800m_1024": ("16.9", "full", 8),
}
NAMES = (
    r"SANA-1\.5|Sana 1\.0|\d\.\dB|DC-AE 1\.\d \(1\.0\)|DC-AE 1\.1|Gemma-2-2b|HF_HUB_OFFLINE=1|`sana-pipe check[^`]*`|"
    r"fp32|bf16|fp16|\d+ px"
)
"""Names with digits."""
SOURCED = {
    "sana_1600m_1024": [
        "1e-4 for new concepts",
        "about 0.7 from the first steps",
        "0.667-0.679 with gradient norms of 0.14-0.16 (NVlabs/Sana #206)",
    ],
    "sana_600m_512": [
        "1e-4 for new concepts",
        "about 0.8 from the first steps, with little change (reported by people",
        "(NVlabs/Sana #47, #109)",
    ],
    "sana15_1600m_1024": ["1e-4 for new concepts", "that of Sana 1.0 (1.0), with the same encoder, as its authors say"],
    "sana15_4800m_1024": ["1e-4 for new concepts"],
    LORA: [
        "4.4 GiB at 1024 x 1024 (measured on an H100, docs/measurements.md)",
        "0.33 s a step on a 4090 (estimated by sana-pipe plan)",
        "(predicted by sana-pipe plan --gpu 3060)",
        "some forty pictures, on one GPU of 24 or 12 GB",
    ],
    ZIMAGE: [
        "some forty pictures, on one GPU of 24 or 16 GB",
        "16 GB: --set train.activation_compression=int8 as well (14.4 GiB; predicted, docs/training.md)",
        "LoRA of Z-Image (6B) at 1024 px",
    ],
    PRX: ["PRX (1.3B)", "on one GPU of 80 or 24 GB", "T5Gemma"],
    PREFER: ["on one GPU of 24 GB", "as sana_1600m_1024 states"],
    SCRATCH: [
        "13.5 GiB in microbatches of 4, as train chooses on a card of 15 GiB",
        "as sana_600m_512 states",
    ],
    **{
        name: [
            f"on one GPU of {name[-4:-2]} GB",
            "1e-5 constant after 500 steps, clipping at 1.0: the rate of diffusers' ControlNet example, and the "
            "defaults of its script",
            "diffusers' example shows what it learned after 6,000 steps at a batch of 8",
            f"{seconds} s a step on {'an H100' if card == 'h100' else 'a 4090'} (estimated by sana-pipe plan)",
        ]
        for name, (card, seconds, *_) in CONTROLNETS.items()
    },
}
"""Quoted numbers, with the words that name their source."""


def head(name: str) -> str:
    """Without the commands, in one line."""
    path = next(path for path in shipped() if path.stem == name)
    lines = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    prose = [line for line in lines if not re.match(r"#   (sana-pipe|torchrun)", line)]
    return re.sub(r"\s+", " ", " ".join(line.removeprefix("#") for line in prose))


def rate(value: float) -> str:
    """5e-5, 1.41e-4."""
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def derived(name: str) -> list[str]:
    """Fragments of the head, numbers worked out."""
    config, shape, (source, lr, each, warmup) = load(name), SHAPES[name], NVLABS[name]
    train, batch = config.train, config.bucket.batch
    side = config.data.resolution // 32
    latent, row = 32 * side * side * 2, shape.caption_channels * 2
    parameters = sum(_size(sizes) for sizes in shape.shapes().values())
    state = 16 * parameters / 1e9
    inputs = shape.num_layers * side * side * shape.inner_dim * 4 / 1e9
    rate_on_gpus, rate_at_batch = (lr * math.sqrt(size / 256) for size in (GPUS * each, batch))
    assert train.optim.lr in (lr, rate_at_batch) and train.optim.warmup_steps == warmup
    fragments = [
        f"{latent // 1024} KiB a picture for the latent (32 x {side} x {side} bf16; arithmetic): "
        f"{latent * 1000 / 2**20 + 0.01:.0f} MiB for 1000 pictures",
        f"{row / 1024:g} KiB a caption token ({shape.caption_channels} bf16; arithmetic)",
        f"about {round(row * 100 * 1000 / 2**20, -1):.0f} MiB for 1000 captions of 100 tokens",
        f"of {parameters:,} parameters are {state:.1f} GB (16 bytes each; arithmetic)",
        f"keeps {shape.num_layers} block inputs, {inputs:.2f} GB a sample of "
        f"{config.data.resolution} x {config.data.resolution}",
        "lr x sqrt(batch / 256)",
        f"Their configuration ({source}) has lr {rate(lr)} and a batch of {each} a GPU: {rate(rate_on_gpus)} on {GPUS} "
        f"GPUs, {rate(rate_at_batch)} at our batch of {batch}",
        f"come slowly below {rate(optimizers.NEW_CONCEPTS)}",
        f"About {train.steps:,} steps are needed before a first concept shows (reported by people who fine-tune Sana): "
        f"{train.steps * batch:,} pictures. The",
        f"a run of at least {2 * warmup:,} steps",
        f"A run of 4,000 pictures x 4 epochs / {batch} = {16000 // batch} steps",
        f"--set train.optim.warmup_steps={16000 // batch // 10}",
    ]
    assert config.model.weights is not None
    sets = hub_layouts.RELEASED[config.model.weights.id]["transformer"]
    each_byte = max(weights.dtype.itemsize for weights in sets)
    sizes = [count / 1e9 for count in (parameters * each_byte, *_encoders())]
    fragments.append(
        f"{sum(sizes):.1f} GB are fetched: {sizes[0]:.1f} of the transformer ({'fp32' if each_byte == 4 else 'bf16'}), "
        f"{sizes[1]:.1f} of Gemma-2-2b (bf16), {sizes[2]:.1f} of the VAE (fp32) (parameters times bytes)"
    )
    if train.optim.lr == lr:
        times = lr / rate_at_batch
        fragments.append(f"Ours is {rate(lr)}, {'twice' if round(times, 2) == 2 else f'{times:.2f} times'} their rule")
        fragments.append(f"With their rule: --set train.optim.lr={rate(rate_at_batch)}")
    else:
        fragments.append(f"{rate(rate_at_batch)} at our batch of {batch}, which is used here")
    for gpus in (4, 8):
        text = f"{state / gpus:.1f} GB on each of {gpus}"
        fragments += [text] if text in head(name) else []
    inputs_of_batch = f"GB a sample of 1024 x 1024, {inputs * 8:.1f} GB at microbatch 8 (arithmetic)"
    fragments += [inputs_of_batch] if "at microbatch" in head(name) else []
    fragments += [f"{shape.num_layers} blocks"] if " blocks with" in head(name) else []
    if name in ON_EIGHT:
        gib, checkpointing, microbatch = ON_EIGHT[name]
        fragments.append(
            f"8 cards of 24 GB need {gib} GiB each ({checkpointing} checkpointing, microbatch {microbatch}; "
            "predicted by sana-pipe plan --gpu 4090 --gpus 8)"
        )
    return fragments


PLANNED = {
    "24 GB: 10.5 GiB": (),
    "12 GB: 7.3 GiB in microbatches of 2": (),
    "--set train.activation_checkpointing=full 5.2 GiB (predicted)": ("train.activation_checkpointing=full",),
    "--set train.microbatch=1 as well: 4.3 GiB (predicted)": (
        "train.activation_checkpointing=full",
        "train.microbatch=1",
    ),
}
"""Fragments of the head of `LORA`, and the settings with which they are predicted."""


def derived_lora(name: str) -> list[str]:
    """As `derived`."""
    config, shape, pictures = load(LORA), SHAPES["sana_1600m_1024"], 40
    train, adapter = config.train, config.train.adapter
    assert adapter is not None and adapter.targets == "attention" and adapter.alpha is None and train.epochs is not None
    parameters = shape.num_layers * 8 * adapter.rank * 2 * shape.inner_dim
    trained = round(pictures * (1 - config.bucket.heldout))
    steps = train.epochs * trained // config.bucket.batch
    return [
        *PLANNED,
        "(predicted by sana-pipe plan --gpu 4090; bf16 base, batch of 4)",
        f"{parameters:,} parameters of the adapter: {2 * parameters / 1e6:.1f} MB exported in bf16, checkpoints of "
        f"{12 * parameters / 2**20 - 0.05:.1f} MiB (fp32, with two moments; arithmetic)",
        f"{train.epochs} epochs are {train.epochs // config.bucket.batch} steps a picture at a batch of "
        f"{config.bucket.batch}: {steps:,} steps of the {trained} pictures of {pictures} that are not held out",
        f"{0.33 * steps / 60:.0f} minutes for {steps:,} steps",
        "sana_1600m_1024",
    ]


def planned(name: str, gpu: list[str], settings: tuple[str, ...]) -> tuple[str, str]:
    """GiB and seconds of a step that `plan` predicts."""
    sets = [word for setting in settings for word in ("--set", setting)]
    result = CliRunner().invoke(cli, ["plan", "--config", name, *gpu, *sets])
    assert result.exit_code == 0, result.output
    peak, seconds = (re.search(p, result.output) for p in (r"peak \(.*\) +([\d.]+)", r"([\d.]+) s a step"))
    assert peak is not None and seconds is not None
    return f"{float(peak[1]):.1f}", seconds[1]


@pytest.mark.slow
@pytest.mark.parametrize(("fragment", "settings"), PLANNED.items())
def test_the_memory_of_a_lora_is_predicted(fragment: str, settings: tuple[str, ...]) -> None:
    gpu = ["--gpu", "4090" if fragment.startswith("24") else "3060"]
    said = re.search(r"([\d.]+) GiB", fragment)
    assert said is not None and planned(LORA, gpu, settings)[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_EIGHT)
def test_the_memory_of_eight_cards_is_predicted(name: str) -> None:
    """With the values that `auto` chooses there, given, so that nothing is searched."""
    gib, checkpointing, microbatch = ON_EIGHT[name]
    given = f"train.activation_checkpointing={checkpointing}", f"train.microbatch={microbatch}"
    assert planned(name, ["--gpu", "4090", "--gpus", "8"], given)[0] == gib


def recomputed(name: str) -> tuple[str, ...]:
    return "train.activation_checkpointing=full", f"train.microbatch={CONTROLNETS[name][2]}"


def derived_controlnet(name: str) -> list[str]:
    """As `derived`."""
    config, (card, seconds, _, peaks) = load(name), CONTROLNETS[name]
    train, batch = config.train, config.bucket.batch
    assert train.controlnet is not None and train.steps is not None
    shape = SHAPES["sana_1600m_1024"].controlnet(train.controlnet.layers)
    parameters = sum(_size(sizes) for sizes in shape.shapes().values())
    assert (train.optim.lr, train.optim.warmup_steps, train.optim.clip) == (1e-5, 500, 1.0)
    return [
        f"{peaks[0]} GiB, nothing recomputed (predicted by sana-pipe plan --gpu {card}; bf16 base, batch of {batch})",
        " ".join(f"--set {setting}" for setting in recomputed(name)) + f" {peaks[1]} GiB (predicted)",
        f"{parameters:,} parameters of a ControlNet of {shape.num_layers} blocks: {2 * parameters / 1e9:.1f} GB "
        f"exported in bf16, checkpoints of {12 * parameters / 2**30:.1f} GiB (fp32, with two moments; arithmetic)",
        f"which are {6000 * 8:,} pictures: {train.steps:,} steps at a batch of {batch} are {train.steps * batch:,}",
        f"{seconds * train.steps / 3600:.1f} hours for {train.steps:,} steps",
        "sana_1600m_1024",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLNETS)
def test_memory_and_time_of_a_controlnet_are_predicted(name: str) -> None:
    """With the values of `CHOSEN`, so that nothing is searched."""
    card, seconds, _, peaks = CONTROLNETS[name]
    values = tuple(f"train.{option}={value}" for option, value in CHOSEN[name].items())
    chosen, least = (planned(name, ["--gpu", card], settings) for settings in (values, recomputed(name)))
    assert (float(chosen[0]), float(least[0])) == peaks
    assert float(chosen[1]) == pytest.approx(seconds, rel=0.02)


@pytest.mark.nightly  # nine and eleven traces; the search itself is the subject of tests/tools/test_planning.py
@pytest.mark.parametrize("name", CONTROLNETS)
def test_auto_chooses_for_a_controlnet_what_its_head_says(name: str) -> None:
    result = CliRunner().invoke(cli, ["plan", "--config", name, "--gpu", CONTROLNETS[name][0], "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["decided"].items() <= CHOSEN[name].items()
    assert round(plan["prediction"]["total"] / 2**30, 1) == CONTROLNETS[name][3][0]


OF_OTHERS = {  # configuration: [(GiB, card, settings)], seconds of a step, card
    ZIMAGE: (
        [("20.3", "4090", ()), ("15.0", "4090", ("train.activation_checkpointing=full", "train.microbatch=1"))],
        "13",
        "4090",
    ),
    PRX: ([("59.5", "a100-80", ()), ("21.4", "4090", ())], "0.842", "a100-80"),
    PREFER: ([("17.1", "4090", ())], "3.85", "4090"),
}


@pytest.mark.nightly  # traces of 6B parameters, and searches
@pytest.mark.parametrize("name", OF_OTHERS)
def test_memory_and_time_of_other_models_are_predicted(name: str) -> None:
    memory, seconds, card = OF_OTHERS[name]
    for gib, of_card, settings in memory:
        assert planned(name, ["--gpu", of_card], settings)[0] == gib
    assert planned(name, ["--gpu", card], ())[1] == seconds


def derived_zimage(name: str) -> list[str]:
    """As `derived`."""
    config, shape, pictures = load(name), ZImageConfig(), 40
    train, adapter, side = config.train, config.train.adapter, config.data.resolution // 8
    assert adapter is not None and adapter.targets == "attention" and train.epochs is not None
    parameters = (shape.n_layers + 2 * shape.n_refiner_layers) * 4 * adapter.rank * 2 * shape.dim
    trained = round(pictures * (1 - config.bucket.heldout))
    steps = train.epochs * trained // config.bucket.batch
    channels, width, (chosen, full) = shape.in_channels, shape.cap_feat_dim, OF_OTHERS[name][0]
    return [
        f"{channels * side * side * 2 // 1024} KiB a picture for the latent ({channels} x {side} x {side} bf16; "
        f"arithmetic), {width * 2 // 1024} KiB a caption token ({width} bf16; arithmetic)",
        f"24 GB: {chosen[0]} GiB in microbatches of 1, which train chooses (predicted by sana-pipe plan --gpu 4090; "
        f"bf16 base, batch of {config.bucket.batch})",
        f"--set train.activation_checkpointing=full --set train.microbatch=1 {full[0]} GiB (predicted)",
        f"{parameters:,} parameters of the adapter: {2 * parameters / 1e6:.1f} MB exported in bf16, checkpoints of "
        f"{12 * parameters / 2**20 - 0.05:.1f} MiB (fp32, with two moments; arithmetic)",
        f"{train.epochs} epochs are {train.epochs // config.bucket.batch} steps a picture at a batch of "
        f"{config.bucket.batch}: {steps:,} steps of the {trained} pictures of {pictures} that are not held out",
        f"13 s a step on a 4090 (estimated by sana-pipe plan): {13 * steps / 3600:.1f} hours for {steps:,} steps",
    ]


def derived_prx(name: str) -> list[str]:
    """As `derived`."""
    config = load(name)
    batch, steps, side = config.bucket.batch, config.train.steps or 0, config.data.resolution // 32
    return [
        f"{32 * side * side * 2 // 1024} KiB a picture for the latent (32 x {side} x {side} bf16; arithmetic), "
        f"{2304 * 2 / 1024:g} KiB a caption token (2304 bf16; arithmetic)",
        f"80 GB: 59.5 GiB, nothing recomputed (predicted by sana-pipe plan --gpu a100-80; batch of {batch})",
        "24 GB: 21.4 GiB with full checkpointing in microbatches of 1, which train chooses (predicted by sana-pipe "
        "plan --gpu 4090)",
        f"{steps:,} steps are {steps * batch:,} pictures",
        "0.842 s a step on an A100 (estimated by sana-pipe plan): "
        f"{0.842 * steps / 3600:.1f} hours for {steps:,} steps",
    ]


def derived_prefer(name: str) -> list[str]:
    """As `derived`."""
    config, shape = load(name), SHAPES["sana_1600m_1024"]
    adapter, batch, steps = config.train.adapter, config.bucket.batch, config.train.steps or 0
    assert adapter is not None and adapter.targets == "attention" and config.train.prefer is not None
    parameters = shape.num_layers * 8 * adapter.rank * 2 * shape.inner_dim
    return [
        "24 GB: 17.1 GiB in microbatches of 4 pairs, which train chooses, nothing recomputed (predicted by sana-pipe "
        f"plan --gpu 4090; bf16 base, batch of {batch} pairs)",
        f"{parameters:,} parameters of the adapter: {2 * parameters / 1e6:.1f} MB exported in bf16, checkpoints of "
        f"{12 * parameters / 2**20 - 0.05:.1f} MiB (fp32, with two moments; arithmetic)",
        f"{steps:,} steps are {steps * batch:,} visits of pairs, as in diffusers' example for SDXL",
        f"3.85 s a step on a 4090 (estimated by sana-pipe plan): {3.85 * steps / 3600:.1f} hours for {steps:,} steps",
        f"{math.log(2):.3f} at first (log 2; arithmetic)",
        "Preference pairs for Sana 1.6B at 1024 px",
    ]


OTHERS = {
    LORA: derived_lora,
    SCRATCH: lambda name: [],
    ZIMAGE: derived_zimage,
    PRX: derived_prx,
    PREFER: derived_prefer,
}
"""Heads with other figures than those of the released models."""


@pytest.mark.slow
def test_the_memory_from_scratch_is_predicted() -> None:
    settings = tuple(re.findall(r"--set (train\.\S+=\w+)", head(SCRATCH)))
    assert len(settings) == 3 and planned(SCRATCH, ["--gpu", "4090"], settings)[0] == "13.5"


@functools.cache
def _encoders() -> tuple[int, int]:
    """Bytes of Gemma-2-2b's decoder stack in bf16 and of Sana's DC-AE in fp32, as the libraries build them."""
    import torch
    from diffusers import AutoencoderDC
    from transformers import Gemma2Config, Gemma2Model

    from benchmarks.gpu.encoders import VAE

    with torch.device("meta"):
        vae = AutoencoderDC(**VAE)
        text = Gemma2Model(Gemma2Config())
    return 2 * sum(p.numel() for p in text.parameters()), 4 * sum(p.numel() for p in vae.parameters())


def _size(sizes: Any) -> int:
    total = 1
    for side in sizes:
        total *= side
    return total


@pytest.mark.parametrize("name", RELEASED)
def test_every_number_in_a_head_is_derived_or_has_a_source(name: str) -> None:
    text, covered = head(name), set[int]()
    made = derived_controlnet(name) if name in CONTROLNETS else OTHERS.get(name, derived)(name)
    for fragment in [*made, *SOURCED[name]]:
        assert fragment in text, fragment
        covered.update(i for match in re.finditer(re.escape(fragment), text) for i in range(*match.span()))
    for pattern in (NAMES, r"--set [a-z_.]+=\S+"):
        covered.update(i for match in re.finditer(pattern, text) for i in range(*match.span()))
    rest = "".join(" " if i in covered else character for i, character in enumerate(text))
    assert not re.findall(r"\S*\d\S*", rest)


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_every_setting_in_a_configuration_is_a_setting(path: Path) -> None:
    text = re.sub(r"\s+#?\s*", " ", path.read_text(encoding="utf-8"))
    for setting in re.findall(r"--set ([a-z_.0-9]+=[^\s.;,]+(?:\.\d+)?)", text):
        load(path, [setting])


def test_the_figures_of_the_demonstration_name_their_source() -> None:
    text = head("tiny")
    config = load("tiny")
    assert "(measured with `make demo` on two CPU cores; `sana-pipe demo` prints those of your machine)" in text
    assert f"the {config.train.steps} steps" in text and config.train.steps == sum(demo.ROUND_STEPS.values())
    assert "2 KiB a picture for the latent (16 x 8 x 8 bf16; arithmetic), 256 bytes a caption token (128 bf16)" in text
    assert (16 * 8 * 8 * 2, 128 * 2) == (2048, 256)
