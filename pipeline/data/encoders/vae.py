"""The frozen networks of pictures: to latents, and back.

Latents and rows are computed once and read for weeks, so each value has one definition, nothing is tiled or padded
unnecessarily, and an encoding changes exactly when a value could change.
Price: describing a model reads all of its weights to digest them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sana_pipe.base.errors import is_out_of_memory
from sana_pipe.base.hub import ModelError, open_tensors, resolve, weight_files
from sana_pipe.data.encoders.config import VaeConfig
from sana_pipe.data.encoders.frozen import DTYPES, NonFiniteOutputError, digest, finite_bits, from_bits
from sana_pipe.data.encoders.vae_kind import VaeKind, decoder_at, vae_at

# ---------------------------------------------------------------- encodings, from files alone


def describe_vae(config: VaeConfig) -> dict[str, Any]:
    """Describe what decides the value of a latent, from files, without building the module. weights: 32 hex digits over
    the encoder's tensors and architecture; compression: pixels per latent side.

    Raises:
        ModelError: no such model, another class of model, weights that cannot be read.
    """
    folder = resolve(config)
    kind = vae_at(folder)
    return {
        "weights": digest(weight_files(folder), partial(kind.tensor_name, half="encoder"), kind.architecture),
        **kind.described,
        "dtype": config.dtype,
        "tiling": False,
    }


def vae_shape(folder: Path) -> tuple[int, int]:
    """Pixels per latent side, and latent channels, of the VAE whose `config.json` is in a folder."""
    kind = vae_at(folder)
    return kind.compression, kind.channels


def decoder_shape(folder: Path) -> tuple[int, int]:
    """The same of a decoder."""
    kind = decoder_at(folder)
    return kind.decoder_compression, kind.channels


@contextlib.contextmanager
def _arithmetic(dtype: str) -> Iterator[None]:
    """Allow TF32 for tf32 alone, so that fp32 means fp32, and use a fixed algorithm in cuDNN, so that a second run
    gives the same bits."""
    before, allowed = torch.backends.cuda.matmul.allow_tf32, dtype == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=allowed):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# ---------------------------------------------------------------- pictures


def _half(kind: VaeKind, half: str, dtype: str, device: Any) -> Any:
    """diffusers' module with only its `encoder` or its `decoder`, and that half's weights."""
    model = kind.on_meta(half)
    state = {}
    for path in weight_files(kind.folder):
        with open_tensors(path) as handle:
            for stored in handle.keys():
                if (name := kind.tensor_name(stored, half)) is not None:
                    state[name] = handle.get_tensor(stored).to(DTYPES[dtype])
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise ModelError(
            f"the weights in {kind.folder} do not fit its config.json",
            found=" ".join(str(error).split())[:600],
            fix="fetch the folder again",
        ) from None
    return model.to(device).eval().requires_grad_(False)


@dataclass(frozen=True)
class Footprint:
    """The memory that the encoder of pictures needs. weights: bytes. picture: bytes of one picture's tensors at their
    peak. largest: values of the largest of them."""

    weights: int
    picture: int
    largest: int


def footprint(config: VaeConfig, height: int, width: int) -> Footprint:
    """Measure an encoding of height x width pixels on the meta device: no weights are read, no memory is used.
    Workspaces of cuDNN are not in it."""
    kind = vae_at(resolve(config))
    model = torch.nn.Module.to(kind.on_meta("encoder"), DTYPES[config.dtype])
    parameters = sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    with torch.inference_mode(), _LiveTensors() as live:
        pixels = torch.empty(1, height, width, 3, dtype=torch.uint8, device="meta")
        x = pixels.permute(0, 3, 1, 2).to(torch.int32).to(DTYPES[config.dtype])
        kind.encode(model, x)
    return Footprint(parameters, live.peak, live.largest)


class _LiveTensors(TorchDispatchMode):
    """Sums the storages that operations make, while they exist. peak: bytes. largest: values of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = self._bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        before = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            address, known = storage._cdata, self._known.get(storage._cdata)
            if address in before or (known is not None and known() is storage):
                continue
            size = storage.nbytes()
            self._known[address] = weakref.ref(storage)
            weakref.finalize(storage, self._free, size)
            self._bytes += size
            self.peak, self.largest = max(self.peak, self._bytes), max(self.largest, tensor.numel())
        return result

    def _free(self, size: int) -> None:
        self._bytes -= size


class LatentEncoder:
    """A VAE's encoder: pictures to normalised latents. compression: pixels per latent side. channels: of a latent."""

    def __init__(self, model: Any, kind: VaeKind, dtype: str):
        self.model, self.kind, self.dtype = model, kind, dtype
        self.compression, self.channels = kind.compression, kind.channels
        self.device = next(model.parameters()).device
        # x / 255 * 2 - 1 for each of the 256 values, computed on the CPU: a GPU multiplies by the reciprocal instead
        # of dividing, which changes the last bit.
        levels = torch.arange(256, dtype=torch.float32) / 255 * 2 - 1
        self._levels = levels.to(self.device, DTYPES[dtype])

    @classmethod
    def load(cls, config: VaeConfig, device: str | torch.device) -> LatentEncoder:
        """Read the encoder's weights alone. Raises ModelError where they do not fit."""
        kind = vae_at(resolve(config))
        return cls(_half(kind, "encoder", config.dtype, device), kind, config.dtype)

    @torch.inference_mode()
    def encode(self, images: np.ndarray) -> np.ndarray:
        """One forward pass.

        Args:
            images: uint8 (b, H, W, 3), RGB, b at least 1, H and W multiples of `compression`, as all buckets' are.

        Returns:
            uint16 (b, channels, H/compression, W/compression): bits of bf16((latent - shift_factor) *
            scaling_factor), computed in fp32. Deterministic (of a posterior its mode), the whole picture at once:
            attention is global, so a tiled encoding would be another latent.

        Raises:
            NonFiniteError: with the batch rows.
        """
        pixels = torch.from_numpy(np.ascontiguousarray(images)).to(self.device)
        x = self._levels[pixels.permute(0, 3, 1, 2).to(torch.int32)].contiguous()
        with _arithmetic(self.dtype):
            latent = self.kind.encode(self.model, x)
        return finite_bits(self.kind.normalise(latent), "image encoder", self.dtype)


class ExactComparison:
    """Says how far the first latents of a run are from those of the exact encoder."""

    MOST = 4

    def __init__(self, vae: VaeConfig):
        self._vae, self._latents = vae, np.zeros(0, np.uint16)
        self._pictures: list[np.ndarray] = []

    @property
    def ready(self) -> bool:
        """Return whether there are latents to compare."""
        return len(self._pictures) > 0

    def add(self, batch: Any, outputs: Any) -> None:
        """Keep the first few of this run. batch: uint8 (b, H, W, 3); outputs: bf16 bits."""
        if not self.ready and len(outputs):
            self._pictures, self._latents = list(batch[: self.MOST]), np.stack(list(outputs[: self.MOST]))

    def line(self, device: Any) -> str:
        """Load the exact encoder and compare."""
        try:
            encoder = LatentEncoder.load(self._vae.model_copy(update={"dtype": "fp32"}), device)
            wanted = np.concatenate([encoder.encode(picture[None]) for picture in self._pictures])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return f"vae in {self._vae.dtype}: not compared with fp32, which needs more memory than there is"
        ours, theirs = (from_bits(bits).double().flatten(1) for bits in (self._latents, wanted))
        errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        return (
            f"vae in {self._vae.dtype}: the latents of {len(errors)} pictures differ from those in fp32 by "
            f"{100 * float(errors.mean()):.2f} % (relative L2; the worst by {100 * float(errors.max()):.2f} %)"
        )


class LatentDecoder:
    """Latents, as they are cached and sampled, to pictures: the only access to a decoder."""

    def __init__(self, model: Any, kind: VaeKind, latents: VaeKind, dtype: str):
        self.model, self.kind, self.latents, self.dtype = model, kind, latents, dtype
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, config: VaeConfig, device: str | torch.device) -> LatentDecoder:
        """Read the weights of the decoder alone: that of `vae.decoder`, else the VAE's. A decoder of other latents is
        refused."""
        folder = resolve(config)
        kind, dtype = vae_at(folder), config.dtype
        latents = kind
        if (weights := config.other_decoder) is not None:
            check_decoder(folder, other := resolve(weights))
            kind, dtype = decoder_at(other), "fp32"
            latents = kind if kind.imitates else latents
        return cls(_half(kind, "decoder", dtype, device), kind, latents, dtype)

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """One forward pass.

        Args:
            latents: float (b, C, h, w), normalised (as cached and as sampled).

        Returns:
            uint8 (b, H, W, 3), RGB: round(255 * clamp(x / 2 + 1/2, 0, 1)).

        Raises:
            NonFiniteError: with the batch rows.
        """
        z = self.latents.denormalise(latents.to(self.device, torch.float32)).to(DTYPES[self.dtype])
        with _arithmetic(self.dtype):
            x = self.kind.decode(self.model, z).float()
        bad = ~torch.isfinite(x).reshape(len(x), -1).all(dim=1)
        if bool(bad.any()):
            raise NonFiniteOutputError("latent decoder", bad.nonzero().flatten().tolist(), self.dtype)
        pixels = (x / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def check_decoder(folder: Path, other: Path) -> None:
    """ModelError unless the decoder whose `config.json` is in `other` is for latents like those of the VAE in
    `folder`."""
    vae, decoder = vae_at(folder), decoder_at(other)
    names = ("pixels per latent side", "latent channels", "scaling factor", "shift factor")
    ours = [vae.compression, vae.channels, vae.scaling_factor, vae.shift_factor]
    stated = [decoder.settings.get(name) for name in ("scaling_factor", "shift_factor")]
    factors = [our if decoder.imitates or their is None else their for our, their in zip(ours[2:], stated, strict=True)]
    theirs = [decoder.decoder_compression, decoder.channels, *factors]
    odd = [f"{name}: {a} | {b}" for name, a, b in zip(names, ours, theirs, strict=True) if a != b]
    if odd:
        raise ModelError(
            f"{other}: decodes other latents than {folder} encodes (VAE | decoder)",
            found="; ".join(odd),
            fix="vae.decoder: null, or a decoder of this VAE",
        )
