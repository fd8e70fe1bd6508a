"""Small real models, made locally, on which the demonstration and the tests run instead of a download.

A 4-stage (f8) `AutoencoderDC` fitted to a few pictures in a minute, a randomly initialised `Gemma2Model` with a
tokenizer trained on the captions, and a scheduler, saved by `save_pretrained` in the layout of a diffusers Sana
repository. Classes and code paths are those of the full-size models, without network and GPU. The VAE reconstructs
little beyond its training pictures, and the text encoder distinguishes captions without understanding them: neither
says anything about quality at full size.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sana_pipe.base.hub import no_progress_bars
from sana_pipe.train.models.sampler import scheduler

if TYPE_CHECKING:
    from diffusers import AutoencoderDC

COMPRESSION = 8
LATENT_CHANNELS = 16
TEXT_WIDTH = 128
SIZES = ((64, 64), (48, 80), (80, 48))
"""(height, width) of the pictures that the VAE is fitted to, one per aspect ratio."""

_WIDTHS = (16, 32, 64, 256)
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
_SPACE = "▁"


# ---------------------------------------------------------------- image autoencoder


def make_vae(
    folder: Path,
    images: Sequence[np.ndarray],
    *,
    steps: int = 400,
    seed: int = 0,
    sizes: Sequence[tuple[int, int]] = SIZES,
    batch: int = 4,
    lr: float = 1.5e-3,
) -> dict[str, float]:
    """Make an f8 `AutoencoderDC`, fit it to `images`, and save it in `folder`.

    Each picture is cover-resized and centre-cropped to the size of nearest aspect ratio, with a little jitter of scale,
    position and flips, so that it learns more than single arrays. The loss is L1 on pixels and on
    their differences to the neighbours (edges). Latents are drawn towards zero mean, unit deviation and short tails,
    and the decoder sees them with noise, since generated latents are never exact. The scaling factor is 1 / root mean
    square of the latents, as DC-AE defines it.

    Args:
        images: uint8 (H, W, 3) pictures of any size; may be empty only when `steps` is 0.
        steps: optimizer steps; 0 leaves the random initialisation (scaling factor measured on noise if there are no
            images).
        sizes: (height, width), multiples of 8.

    Returns:
        parameters, scaling_factor, psnr (dB, mean over the pictures, at their size; nan without images).
    """
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        model = _new_vae()
        if steps:
            groups = [group for group in (_crops(images, size, sizes) for size in sizes) if len(group)]
            _start_linear(model, groups)
            _fit(model, groups, steps, batch, lr, seed)
        exact = [_crops(images, size, sizes, jitter=0) for size in sizes]
        inputs = [_signal(group[:, 0]) for group in exact if len(group)]
        if not inputs:
            inputs = [torch.rand(8, 3, *size) * 2 - 1 for size in sizes]
        psnr = _set_scaling_factor(model, inputs)
    _save(model, folder)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "scaling_factor": float(model.config.scaling_factor),
        "psnr": psnr if images else math.nan,
    }


def _set_scaling_factor(model: AutoencoderDC, inputs: list[torch.Tensor]) -> float:
    """Measure it on inputs (N, 3, H, W) in -1..1; gives the mean PSNR of their reconstructions, in dB."""
    model.eval()
    with torch.inference_mode():
        latents = [model.encode(x).latent for x in inputs]
        square = sum(float(z.square().sum()) for z in latents) / sum(z.numel() for z in latents)
        model.register_to_config(scaling_factor=1.0 / math.sqrt(square))
        errors = [
            (model.decode(z).sample.clamp(-1, 1) - x).square().mean(dim=(1, 2, 3))
            for x, z in zip(inputs, latents, strict=True)
        ]
    return float((10 * torch.log10(4 / torch.cat(errors))).mean())


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: the same bits, and so the same encoding, on any number of cores.

    Two idle cores would be a third faster; two busy ones several times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _new_vae() -> AutoencoderDC:
    """The kinds of blocks of Sana's DC-AE (residual, then EfficientViT), four stages instead of six.

    Widths are at least 3, 12, 48, 192, the values of 1, 2x2, 4x4 and 8x8 pixels: see `_start_linear`.
    """
    from diffusers import AutoencoderDC

    blocks = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock")
    return AutoencoderDC(
        in_channels=3,
        latent_channels=LATENT_CHANNELS,
        attention_head_dim=32,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=_WIDTHS,
        decoder_block_out_channels=_WIDTHS,
        encoder_layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        encoder_qkv_multiscales=((), (), (), (5,)),
        decoder_qkv_multiscales=((), (), (), (5,)),
        upsample_block_type="pixel_shuffle",
        downsample_block_type="conv",
    )


@torch.no_grad()
def _start_linear(model: AutoencoderDC, groups: Sequence[torch.Tensor]) -> None:
    """Initialise the network as the best linear code of 8x8 pixels: their principal components (PCA).

    From a random start, a minute of training gives blurs (21 dB on a dozen pictures; plain PCA has 25). So blocks start
    as the identity (their last norm's weight is 0), each downsampling as pixel-unshuffle and each upsampling as
    pixel-shuffle, minus the block's shortcut; the ends hold the components. The decoder's last norm would erase the
    amplitude, so a fourth channel holds a large constant that fixes the norm, and a bias keeps the colours positive
    through the ReLU. Unused channels keep their random values, which are not read at first.
    """
    patches = [_signal(group.flatten(0, 1)) for group in groups]
    for _ in range(3):  # three times by 2 like the network: once by 8 would order the channels differently
        patches = [torch.nn.functional.pixel_unshuffle(patch, 2) for patch in patches]
    data = torch.cat([patch.permute(0, 2, 3, 1).reshape(-1, patch.shape[1]) for patch in patches])
    mean = data.mean(dim=0)
    components = torch.linalg.svd(data - mean, full_matrices=False)[2][:LATENT_CHANNELS]
    deviation = ((data - mean) @ components.T).std(dim=0).clamp_min(1e-3)
    # Between plain components (nearly all of the variance in the first) and white ones (noise as loud as shapes).
    gain = deviation.rsqrt()
    gain = gain / ((deviation * gain).square().mean()).sqrt()

    for name, parameter in model.named_parameters():
        if ".norm" in name and "decoder.norm_out" not in name:
            parameter.zero_()

    encoder, decoder = model.encoder, model.decoder
    _place(encoder.conv_in, torch.eye(3))
    for stage, used in enumerate((3, 12, 48)):
        conv = encoder.down_blocks[stage][-1].conv
        group = encoder.down_blocks[stage][-1].group_size
        conv.bias[: 4 * used] = 0
        conv.weight[: 4 * used] = 0
        for row in range(4 * used):
            conv.weight[row, row // 4, 1 + row % 4 // 2, 1 + row % 2] += 1
            for source in range(row * group, (row + 1) * group):
                conv.weight[row, source // 4, 1 + source % 4 // 2, 1 + source % 2] -= 1 / group
    _place(encoder.conv_out, gain[:, None] * components, -gain * (components @ mean))
    repeats = encoder.out_shortcut_average_group_size
    for row in range(LATENT_CHANNELS):
        encoder.conv_out.weight[row, row * repeats : (row + 1) * repeats, 1, 1] -= 1 / repeats

    _place(decoder.conv_in, (components / gain[:, None]).T, mean)
    for row in range(len(mean)):
        decoder.conv_in.weight[row, row // decoder.in_shortcut_repeats, 1, 1] -= 1
    for stage, used in enumerate((3, 12, 48)):
        up = decoder.up_blocks[stage][0]
        up.conv.weight *= 0.25
        _place(up.conv, torch.eye(4 * used))
        for row in range(len(up.conv.weight)):
            up.conv.weight[row, row // up.repeats, 1, 1] -= 1
    constant, lift = 8.0, 2.0
    last = decoder.up_blocks[0][0]
    last.conv.weight[12:16] = 0
    for row in range(12, 16):
        last.conv.weight[row, row // last.repeats, 1, 1] = -1
    last.conv.bias[12:16] = constant
    decoder.norm_out.weight[:3] = constant / _WIDTHS[0] ** 0.5
    decoder.norm_out.bias[:3] = lift
    _place(decoder.conv_out, torch.eye(3), torch.full((3,), -lift))


def _place(conv: torch.nn.Conv2d, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Set the first outputs of a convolution to `matrix` @ (the first inputs) + `bias`."""
    rows, columns = matrix.shape
    conv.weight[:rows] = 0
    conv.weight[:rows, :columns, 1, 1] = matrix
    if conv.bias is not None:
        conv.bias[:rows] = 0 if bias is None else bias


def _nearest(shape: tuple[int, ...], sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min(sizes, key=lambda size: abs(math.log(size[0] / size[1]) - math.log(shape[0] / shape[1])))


def _crops(
    images: Sequence[np.ndarray], size: tuple[int, int], sizes: Sequence[tuple[int, int]], jitter: int = 8
) -> torch.Tensor:
    """uint8 (pictures of this size, 1 + jitter, 3, H, W): the centred cover crop, then ones zoomed by up to 15 %."""
    from PIL import Image

    height, width = size
    generator = np.random.default_rng((height, width, len(images)))
    stacks = []
    for image in images:
        if _nearest(image.shape, sizes) != size:
            continue
        picture = Image.fromarray(image)
        scale = max(width / picture.width, height / picture.height)
        views = []
        for view in range(1 + jitter):
            zoom = 1.0 if view == 0 else 1 + 0.15 * generator.random()
            x, y = (0.5, 0.5) if view == 0 else generator.random(2)
            box_width, box_height = width / scale / zoom, height / scale / zoom
            left, top = x * (picture.width - box_width), y * (picture.height - box_height)
            box = (
                max(left, 0.0),
                max(top, 0.0),
                min(left + box_width, picture.width),
                min(top + box_height, picture.height),
            )
            crop = np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS, box=box))
            views.append(crop[:, ::-1] if view % 2 == 0 and view else crop)
        stacks.append(np.stack(views))
    if not stacks:
        return torch.zeros((0, 1 + jitter, 3, height, width), dtype=torch.uint8)
    return torch.from_numpy(np.ascontiguousarray(np.stack(stacks).transpose(0, 1, 4, 2, 3)))


def _signal(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.float() / 127.5 - 1


def _fit(model: AutoencoderDC, groups: list[torch.Tensor], steps: int, batch: int, lr: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor([float(len(group)) for group in groups])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    warmup = max(1, steps // 20)
    model.train()
    for step in range(steps):
        rise, fall = min(1.0, (step + 1) / warmup), 0.5 * (1 + math.cos(math.pi * step / steps))
        for options in optimizer.param_groups:
            options["lr"] = lr * rise * (0.02 + 0.98 * fall)
        group = groups[int(torch.multinomial(weights, 1, generator=generator))]
        rows = torch.randperm(len(group), generator=generator)[:batch]
        views = torch.randint(group.shape[1], (len(rows),), generator=generator)
        views = torch.where(torch.rand(len(rows), generator=generator) < 0.5, 0, views)
        x = _signal(group[rows, views])
        latent = model.encode(x).latent
        noise = torch.randn(latent.shape, generator=generator)
        y = model.decode(latent + 0.05 * noise).sample
        moments = latent.mean(dim=(0, 2, 3)).square().mean() + (latent.square().mean() - 1).square()
        tails = (latent.abs() - 3).relu().square().mean()
        loss = (y - x).abs().mean() + 0.5 * _edges(y - x) + 0.1 * (moments + tails)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _edges(error: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference between neighbours of (b, 3, H, W), which penalises blur."""
    return error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()


# ---------------------------------------------------------------- text encoder


def make_text(
    folder: Path,
    captions: Sequence[str],
    *,
    instruction: str = "",
    seed: int = 0,
    layers: int = 3,
    heads: int = 4,
) -> dict[str, float]:
    """Make a small random `Gemma2Model` and a tokenizer trained on the captions. Save both, the tokenizer in
    `tokenizer` next to `folder`.

    The tokenizer is like Gemma's: BPE with byte fallback over text whose spaces became "▁", pieces begin with "▁",
    <bos> comes first; so the trailing space of Sana's instruction merges with the caption's first word when that word
    is known. The model has Gemma-2's parts in small: softcapped logits, a sliding window (shorter than the instruction)
    in every other layer, grouped queries. The embedding's deviation is raised so that token identity survives the
    unit-size outputs of the random layers: a small Sana can then distinguish a dozen captions.

    Args:
        captions: training texts of the tokenizer, normalised and raw.
        instruction: text before the captions; also a training text.
        layers, heads: of the model; an even number of heads, since two share a key.

    Returns:
        parameters, vocabulary.
    """
    from transformers import Gemma2Config, Gemma2Model

    tokenizer = new_tokenizer([*captions, *(text.lower() for text in captions), *instruction.split("\n")], 2048)
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Gemma2Model(config).eval()
        with torch.no_grad():
            embedding = model.embed_tokens.weight
            embedding.normal_(0.0, 4.0 / TEXT_WIDTH**0.5)
            embedding[tokenizer.pad_token_id].zero_()
    with no_progress_bars():
        _save(model, folder)
    tokenizer.save_pretrained(folder.parent / "tokenizer")
    return {"parameters": sum(p.numel() for p in model.parameters()), "vocabulary": len(tokenizer)}


def new_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """A tokenizer like Gemma's (see `make_text`) with at most `vocabulary` learnt pieces."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", _SPACE)
    # Pieces must not cross words while learning; in use the text is one run of characters, as in Gemma.
    learner.pre_tokenizer = pre_tokenizers.Split(_SPACE, behavior="merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=1, show_progress=False, initial_alphabet=[_SPACE]
    )
    learner.train_from_iterator([f" {text}" for text in texts], trainer)
    model = json.loads(learner.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    names = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [tuple(pair) for pair in model["merges"]]
    return GemmaTokenizer(
        vocab={name: i for i, name in enumerate(names)}, merges=merges, add_bos_token=True, padding_side="right"
    )


def _save(model: Any, folder: Path) -> None:
    """`save_pretrained`, and files with the mode that the umask says: safetensors lets only their owner read them."""
    model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        shutil.copyfile(path, copy := path.with_suffix(".copy"))
        copy.replace(path)


# ---------------------------------------------------------------- a whole repository


def make_all(
    folder: Path,
    images: Sequence[np.ndarray],
    captions: Sequence[str],
    *,
    instruction: str = "",
    steps: int = 400,
    sizes: Sequence[tuple[int, int]] = SIZES,
    flow_shift: float = 3.0,
) -> dict[str, dict[str, float]]:
    """Make `vae/`, `text_encoder/`, `tokenizer/` and `scheduler/` in `folder`, so that `id: FOLDER` names them all.

    Returns:
        What `make_vae` and `make_text` report, under "vae" and "text".
    """
    folder.mkdir(parents=True, exist_ok=True)
    vae = make_vae(folder / "vae", images, steps=steps, sizes=sizes)
    text = make_text(folder / "text_encoder", captions, instruction=instruction)
    scheduler(flow_shift).save_pretrained(folder / "scheduler")
    return {"vae": vae, "text": text}
