"""The frozen networks: pictures to latents, captions to rows, latents back to pictures.

What: `LatentEncoder` (DC-AE's encoder alone), `TextEncoder` (Gemma-2 with Sana's selection rule), `LatentDecoder`
(DC-AE's decoder alone), and `describe_vae` / `describe_text`, which say from the files alone what decides their values.
Why: latents and rows are computed once and read for weeks, so each value has one definition, nothing is tiled or padded
beyond need, and a recipe changes exactly when a value could change.
Price: describing a model reads all of its weights (5 GB for Gemma-2-2b) to digest them; softcapped attention runs in
the eager implementation, the only one that has it on every device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from pipeline.config import TextConfig, VaeConfig, Weights
from pipeline.errors import UserError
from pipeline.models.hub import ModelError, is_local, quiet, read_json, resolve, weight_files

if TYPE_CHECKING:
    from diffusers import AutoencoderDC

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SELECTION = "sana"
"""Name of the rule in `TextEncoder`: the first position and the last `max_length - 1` of the padded sequence."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
_TOKENIZER_PATTERNS = (*TOKENIZER_FILES, "added_tokens.json", "config.json")
_VOLATILE = ("padding", "truncation", "chat_template", "name_or_path", "tokenizer_file", "processor_class", "is_local")

_VAE_ARCHITECTURE: dict[str, Any] = {  # diffusers' defaults, for configurations written before a key existed
    "in_channels": 3,
    "latent_channels": 32,
    "attention_head_dim": 32,
    "encoder_block_types": "ResBlock",
    "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
    "encoder_layers_per_block": [2, 2, 2, 3, 3, 3],
    "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "downsample_block_type": "pixel_unshuffle",
    "encoder_out_shortcut": True,
}
_TEXT_ARCHITECTURE: dict[str, Any] = {  # transformers' Gemma2Config
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
}


class NonFiniteError(UserError):
    """A network gave NaN or infinity. `rows` are the positions in the batch; the others were right."""

    def __init__(self, module: str, rows: Sequence[int], dtype: str):
        self.rows = tuple(rows)
        super().__init__(
            f"the {module} gave NaN or infinity for batch rows {', '.join(map(str, self.rows))}",
            expected="finite values",
            fix="set its dtype to fp32" if dtype != "fp32" else "look at these items, and at the weights",
        )


# ---------------------------------------------------------------- recipes, from files alone


def describe_vae(config: VaeConfig) -> dict[str, Any]:
    """What decides the value of a latent, read from files without building the module.

    Returns:
        id ("" for a local folder: the digest names it), revision (None for a local folder), weights (32 hex digits over
        the encoder's tensors and its architecture; the decoder does not count), compression (pixels per latent side),
        channels, dtype, scaling_factor, tiling (always False).

    Raises:
        ModelError: no such model, another class of model, weights that cannot be read.
    """
    folder = resolve(config)
    settings = _vae_settings(folder)
    return {
        **_identity(config),
        "weights": _digest(weight_files(folder, config.variant), _encoder_tensor, _vae_architecture(settings)),
        "compression": _compression(settings),
        "channels": int(_vae_architecture(settings)["latent_channels"]),
        "dtype": config.dtype,
        "scaling_factor": _scaling_factor(config, folder, settings),
        "tiling": False,
    }


def describe_text(config: TextConfig, instruction: str) -> dict[str, Any]:
    """What decides the rows of a caption, read from files without building the module.

    Args:
        instruction: the text that goes before every caption (`config.instruction` with the recipe's own filled in).

    Returns:
        id, revision (as for the VAE), weights (32 hex digits; the same for a folder with the language model's head and
        one without), tokenizer (32 hex digits over its files), dtype, attention, instruction, normalisation,
        max_length, selection, width (of a row).

    Raises:
        ModelError: no such model or tokenizer, another class of model, weights that cannot be read.
    """
    folder = resolve(config)
    architecture = _text_architecture(folder)
    return {
        **_identity(config),
        "weights": _digest(weight_files(folder, config.variant), _decoder_stack_tensor, architecture),
        "tokenizer": _tokenizer_digest(_tokenizer_folder(config)),
        "dtype": config.dtype,
        "attention": "eager",
        "instruction": instruction,
        "normalisation": config.recipe,
        "max_length": config.max_length,
        "selection": SELECTION,
        "width": int(architecture["hidden_size"]),
    }


def _identity(weights: Weights) -> dict[str, Any]:
    if is_local(weights):
        return {"id": "", "revision": None}
    return {"id": weights.id, "revision": weights.revision}


def _vae_settings(folder: Path) -> dict[str, Any]:
    settings = read_json(folder / "config.json")
    if settings.get("_class_name") != "AutoencoderDC":
        raise ModelError(
            f"{folder} is not a VAE that this pipeline knows",
            expected="AutoencoderDC (DC-AE in diffusers' format)",
            found=settings.get("_class_name"),
            fix="point vae.id and vae.subfolder at the VAE of a Sana repository",
        )
    return settings


def _vae_architecture(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: settings.get(key, default) for key, default in _VAE_ARCHITECTURE.items()}


def _compression(settings: dict[str, Any]) -> int:
    return 2 ** (len(_vae_architecture(settings)["encoder_block_out_channels"]) - 1)


def _scaling_factor(config: VaeConfig, folder: Path, settings: dict[str, Any]) -> float:
    value = config.scaling_factor if config.scaling_factor is not None else settings.get("scaling_factor")
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(
            f"{folder / 'config.json'} states no usable scaling_factor",
            expected="a positive number (0.41407 for Sana's DC-AE)",
            found=repr(value),
            fix="set vae.scaling_factor",
        )
    return float(value)


def _text_settings(folder: Path) -> dict[str, Any]:
    settings = read_json(folder / "config.json")
    if settings.get("model_type") != "gemma2":
        raise ModelError(
            f"{folder} is not a text encoder that this pipeline knows",
            expected="model_type gemma2 (Gemma2Model or Gemma2ForCausalLM)",
            found=settings.get("model_type"),
            fix="point text.id and text.subfolder at the Gemma-2 of a Sana repository",
        )
    return settings


def _text_architecture(folder: Path) -> dict[str, Any]:
    settings = _text_settings(folder)
    found = {key: settings.get(key, default) for key, default in _TEXT_ARCHITECTURE.items()}
    layers = found["num_hidden_layers"]
    # Written as `layer_types` and `rope_parameters` by newer transformers, implied or flat in older files.
    found["layer_types"] = settings.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
    ]
    rope = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    found["rope_theta"] = float(rope.pop("rope_theta", None) or settings.get("rope_theta") or 10000.0)
    found["rope"] = {} if rope.get("rope_type", "default") == "default" else rope
    return found


def _encoder_tensor(name: str) -> str | None:
    return name if name.startswith("encoder.") else None


def _decoder_stack_tensor(name: str) -> str | None:
    name = name.removeprefix("model.")
    return None if name.startswith("lm_head.") else name


def _digest(files: Sequence[Path], rename: Callable[[str], str | None], architecture: dict[str, Any]) -> str:
    """xxh3-128 over the architecture and, in name order, name, dtype, shape and bytes of each tensor that is kept.

    Independent of sharding, of file names and of the order inside files. `rename` gives the name to use, or None to
    leave a tensor out.
    """
    state = xxhash.xxh3_128()
    for key in sorted(architecture):
        state.update(f"{key}={architecture[key]!r}\0".replace("(", "[").replace(")", "]").encode())
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[Any, str]] = {}
        for path in files:
            handle = stack.enter_context(_open(path))
            for stored in handle.keys():
                name = rename(stored)
                if name is None:
                    continue
                if name in places:
                    raise ModelError(f"{path} holds tensor {stored!r} a second time", fix="remove the stale shard")
                places[name] = (handle, stored)
        if not places:
            raise ModelError(f"{files[0].parent} holds none of the expected tensors", fix="give the right subfolder")
        for name in sorted(places):
            handle, stored = places[name]
            tensor = handle.get_tensor(stored)
            kind = handle.get_slice(stored).get_dtype()
            state.update(f"{name}\0{kind}\0{list(tensor.shape)}\0".encode())
            state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read as safetensors", found=str(error), fix="fetch it again") from None
    with handle as opened:
        yield opened


def _tokenizer_folder(config: TextConfig) -> Path:
    place = config.model_copy(update={"subfolder": config.tokenizer_subfolder})
    return resolve(place, _TOKENIZER_PATTERNS)


def _tokenizer_digest(folder: Path) -> str:
    """xxh3-128 over the content of the tokenizer's files; spacing, key order and keys that only say where a tokenizer
    came from or how its last call padded do not count."""
    present = [folder / name for name in (*TOKENIZER_FILES, "added_tokens.json") if (folder / name).is_file()]
    if not any(path.name in ("tokenizer.json", "tokenizer.model") for path in present):
        raise ModelError(
            f"{folder} holds no tokenizer",
            expected="tokenizer.json or tokenizer.model",
            found=", ".join(sorted(p.name for p in folder.iterdir())),
            fix="set text.tokenizer_subfolder (null if the files lie directly in the model's folder)",
        )
    state = xxhash.xxh3_128()
    for path in present:
        if path.suffix == ".json":
            content = read_json(path)
            body = repr(_ordered({key: value for key, value in content.items() if key not in _VOLATILE})).encode()
        else:
            body = path.read_bytes()
        state.update(f"{path.name}\0{len(body)}\0".encode())
        state.update(body)
    return state.hexdigest()


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _ordered(value[key])) for key in sorted(value)]
    return [_ordered(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- numbers


def bf16_bits(values: torch.Tensor) -> np.ndarray:
    """Round to bf16 (to nearest, ties to even) and give the bits: uint16, same shape, on the CPU."""
    return values.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


def from_bits(bits: np.ndarray) -> torch.Tensor:
    """The bf16 tensor whose bits are `bits` (uint16); a copy."""
    return torch.from_numpy(np.array(bits, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


def _finite_bits(values: torch.Tensor, module: str, dtype: str) -> np.ndarray:
    rounded = values.to(torch.bfloat16)
    bad = ~torch.isfinite(rounded).reshape(len(rounded), -1).all(dim=1)
    if bool(bad.any()):
        raise NonFiniteError(module, bad.nonzero().flatten().tolist(), dtype)
    return bf16_bits(rounded)


def _exact_convolutions() -> contextlib.AbstractContextManager[None]:
    """cuDNN without TF32 and with a fixed algorithm, so that fp32 means fp32 and a second run gives the same bits."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


# ---------------------------------------------------------------- pictures


def _half_autoencoder(config: VaeConfig, keep: str, device: torch.device) -> tuple[AutoencoderDC, dict[str, Any], Path]:
    """AutoencoderDC with only its `encoder` or its `decoder`; the other half never has storage."""
    from diffusers import AutoencoderDC

    folder = resolve(config)
    settings = _vae_settings(folder)
    with torch.device("meta"):
        model = AutoencoderDC.from_config(AutoencoderDC.load_config(folder))
    delattr(model, "decoder" if keep == "encoder" else "encoder")
    state = {}
    for path in weight_files(folder, config.variant):
        with _open(path) as handle:
            for name in handle.keys():
                if name.startswith(f"{keep}."):
                    state[name] = handle.get_tensor(name).to(DTYPES[config.dtype])
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise ModelError(
            f"the weights in {folder} do not fit its config.json",
            found=" ".join(str(error).split())[:600],
            fix="fetch the folder again",
        ) from None
    return model.to(device).eval().requires_grad_(False), settings, folder


class LatentEncoder:
    """DC-AE's encoder: pictures to latents that are already multiplied by the scaling factor.

    Attributes:
        compression: pixels per latent side (32 for Sana's DC-AE).
        channels: latent channels.
        scaling_factor: the recipe's.
    """

    def __init__(self, model: AutoencoderDC, config: VaeConfig, compression: int, channels: int, scaling_factor: float):
        self.model, self.dtype = model, config.dtype
        self.compression, self.channels, self.scaling_factor = compression, channels, scaling_factor
        self.device = next(model.parameters()).device
        # x / 255 * 2 - 1 for each of the 256 values, made on the CPU: a GPU divides by a constant through its
        # reciprocal, which is another last bit.
        levels = torch.arange(256, dtype=torch.float32) / 255 * 2 - 1
        self._levels = levels.to(self.device, DTYPES[config.dtype])

    @classmethod
    def load(cls, config: VaeConfig, device: str | torch.device) -> LatentEncoder:
        """Read the encoder's weights alone.

        Raises:
            ModelError: no such model, or one of another class, or weights that do not fit.
        """
        model, settings, folder = _half_autoencoder(config, "encoder", torch.device(device))
        scale = _scaling_factor(config, folder, settings)
        return cls(model, config, _compression(settings), int(_vae_architecture(settings)["latent_channels"]), scale)

    @torch.inference_mode()
    def encode(self, images: np.ndarray) -> np.ndarray:
        """One forward pass.

        Args:
            images: uint8 (b, H, W, 3), RGB, H and W multiples of `compression`.

        Returns:
            uint16 (b, channels, H/compression, W/compression): bits of bf16(latent * scaling_factor), the product in
            fp32. Deterministic (DC-AE has no posterior), the whole picture at once: DC-AE's linear attention is
            global, so a tiled encoding would be another latent.

        Raises:
            ModelError: pictures of another type or shape.
            NonFiniteError: names the batch rows.
        """
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
            raise ModelError("pictures must be uint8 (b, H, W, 3)", found=f"{images.dtype} {images.shape}")
        height, width = images.shape[1:3]
        if not height or not width or height % self.compression or width % self.compression:
            raise ModelError(
                f"a picture of {height}x{width} pixels has no whole number of latents",
                expected=f"height and width multiples of {self.compression}",
                fix="choose buckets whose sides are multiples of the VAE's compression",
            )
        if not len(images):
            bottom = (height // self.compression, width // self.compression)
            return np.zeros((0, self.channels, *bottom), np.uint16)
        pixels = torch.from_numpy(np.ascontiguousarray(images)).to(self.device)
        x = self._levels[pixels.permute(0, 3, 1, 2).to(torch.int32)].contiguous()
        with _exact_convolutions():
            latent = self.model.encode(x).latent
        return _finite_bits(latent.float() * self.scaling_factor, "image encoder", self.dtype)


class LatentDecoder:
    """DC-AE's decoder: latents, as they are cached and sampled, to pictures."""

    def __init__(self, model: AutoencoderDC, config: VaeConfig, scaling_factor: float):
        self.model, self.dtype, self.scaling_factor = model, config.dtype, scaling_factor
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, config: VaeConfig, device: str | torch.device) -> LatentDecoder:
        """Read the decoder's weights alone.

        Raises:
            ModelError: no such model, or one of another class, or weights that do not fit.
        """
        model, settings, folder = _half_autoencoder(config, "decoder", torch.device(device))
        return cls(model, config, _scaling_factor(config, folder, settings))

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """One forward pass.

        Args:
            latents: float (b, C, h, w), multiplied by the scaling factor (as cached and as sampled).

        Returns:
            uint8 (b, H, W, 3), RGB: round(255 * clamp(x / 2 + 1/2, 0, 1)).

        Raises:
            NonFiniteError: names the batch rows.
        """
        z = (latents.to(self.device, torch.float32) / self.scaling_factor).to(DTYPES[self.dtype])
        with _exact_convolutions():
            x = self.model.decode(z).sample.float()
        bad = ~torch.isfinite(x).reshape(len(x), -1).all(dim=1)
        if bool(bad.any()):
            raise NonFiniteError("latent decoder", bad.nonzero().flatten().tolist(), self.dtype)
        pixels = (x / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()


# ---------------------------------------------------------------- captions


class TextEncoder:
    """Gemma-2's last hidden states (after its final norm), selected as Sana selects them.

    The rule (NVlabs/Sana `train.py`, diffusers `SanaPipeline.encode_prompt`): instruction + caption is cut and padded
    on the right to `len(instruction tokens) + max_length - 2`; position 0 (<bos>) and the last `max_length - 1`
    positions are kept, and of those the ones that are not padding count. The 2 stands for <bos> and the instruction's
    trailing space, which merges with the caption's first word. Attention is causal, so rows do not depend on padding
    to their right, and the padding is left out.

    Attributes:
        width: values per row.
        max_length: rows at most.
        truncated: captions cut so far, because they had more tokens than the rule has room for.
    """

    def __init__(self, model: torch.nn.Module, tokenizer: Any, config: TextConfig, instruction: str):
        self.model, self.tokenizer, self.dtype = model, tokenizer, config.dtype
        self.instruction, self.max_length = instruction, config.max_length
        self.width = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.device = next(model.parameters()).device
        self.truncated = 0
        if instruction:
            prefix = len(tokenizer.encode(instruction))
            self._room = prefix + config.max_length - 2
        else:
            self._room = config.max_length
        self._first = self._room - config.max_length + 1

    @classmethod
    def load(cls, config: TextConfig, instruction: str, device: str | torch.device) -> TextEncoder:
        """Read the model (with or without a language model's head) and its tokenizer.

        Args:
            instruction: text before every caption; "" for none.

        Raises:
            ModelError: no such model or tokenizer, missing weights, or a tokenizer that adds no <bos> or has no
                padding token.
        """
        import transformers

        folder = resolve(config)
        _text_settings(folder)
        weight_files(folder, config.variant)
        tokenizer = _load_tokenizer(_tokenizer_folder(config))
        try:
            with quiet():
                model, report = transformers.Gemma2Model.from_pretrained(
                    folder,
                    dtype=DTYPES[config.dtype],
                    attn_implementation="eager",
                    variant=config.variant,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except (RuntimeError, OSError, ValueError) as error:
            raise ModelError(
                f"the text encoder in {folder} cannot be loaded",
                found=" ".join(str(error).split())[:600],
                fix="fetch the folder again",
            ) from None
        lost = sorted(report["missing_keys"]) + sorted(str(key) for key in report.get("mismatched_keys", ()))
        if lost:  # transformers only warns, and trains nobody's random numbers
            raise ModelError(
                f"the weights in {folder} lack tensors that the text encoder needs",
                found=f"{len(lost)} missing, the first: {lost[0]}",
                fix="fetch the folder again",
            )
        return cls(model.to(torch.device(device)).eval().requires_grad_(False), tokenizer, config, instruction)

    def lengths(self, captions: Sequence[str]) -> list[int]:
        """Tokens of instruction + caption, uncut: what to sort by so that batches need little padding."""
        if not captions:
            return []
        return [len(ids) for ids in self._tokenize(captions, truncation=False)]

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> list[np.ndarray]:
        """One forward pass over the batch, padded to its longest member.

        Args:
            captions: already normalised.

        Returns:
            For each caption uint16 (n, width), n <= max_length: bits of the bf16 rows that count.

        Raises:
            NonFiniteError: names the batch rows.
        """
        if not captions:
            return []
        rows = self._tokenize(captions, truncation=False)
        long = [i for i, ids in enumerate(rows) if len(ids) > self._room]
        if long:
            cut = self._tokenize([captions[i] for i in long], truncation=True)
            for i, ids in zip(long, cut, strict=True):
                rows[i] = ids
        hidden = self._hidden(rows, max(map(len, rows)))
        kept = [torch.cat([hidden[i, :1], hidden[i, self._first : len(ids)]]) for i, ids in enumerate(rows)]
        bad = [i for i, values in enumerate(kept) if not bool(torch.isfinite(values).all())]
        if bad:
            raise NonFiniteError("text encoder", bad, self.dtype)
        self.truncated += len(long)
        return [bf16_bits(values) for values in kept]

    @torch.inference_mode()
    def null(self) -> tuple[np.ndarray, int]:
        """The empty caption as classifier-free guidance uses it: without the instruction, padded to `max_length`.

        Returns:
            uint16 (max_length, width): bits of all bf16 rows, those at padding positions included (Sana's trainer
            reads them when it drops a caption), and the number of rows that count.
        """
        (ids,) = self._tokenize([""], truncation=False, instruction="")
        hidden = self._hidden([ids], self.max_length)
        return _finite_bits(hidden, "text encoder", self.dtype)[0], len(ids)

    def _tokenize(self, captions: Sequence[str], truncation: bool, instruction: str | None = None) -> list[list[int]]:
        prefix = self.instruction if instruction is None else instruction
        limit = {"truncation": True, "max_length": self._room} if truncation else {"truncation": False}
        # verbose=False: the tokenizer would warn of lengths beyond the model's, which are cut afterwards.
        texts = [prefix + caption for caption in captions]
        return self.tokenizer(texts, add_special_tokens=True, padding=False, verbose=False, **limit)["input_ids"]

    def _hidden(self, rows: Sequence[Sequence[int]], length: int) -> torch.Tensor:
        ids = torch.full((len(rows), length), self.tokenizer.pad_token_id, dtype=torch.long)
        mask = torch.zeros((len(rows), length), dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, dtype=torch.long)
            mask[i, : len(row)] = 1
        out = self.model(ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False)
        return out.last_hidden_state


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    _tokenizer_digest(folder)  # says in our words that files are missing or broken
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded", found=" ".join(str(error).split())[:600]
        ) from None
    tokenizer.padding_side = "right"
    for text in ("", "a"):
        ids = tokenizer.encode(text)
        if tokenizer.bos_token_id is None or not ids or ids[0] != tokenizer.bos_token_id:
            raise ModelError(
                f"the tokenizer in {folder} does not begin every text with <bos>, as Sana's selection rule needs",
                expected=f"token {tokenizer.bos_token_id} first",
                found=f"{text!r} -> {ids}",
                fix="set add_bos_token to true in its tokenizer_config.json, or take the model's own tokenizer",
            )
    if tokenizer.pad_token_id is None:
        raise ModelError(f"the tokenizer in {folder} has no padding token", fix="take the model's own tokenizer")
    return tokenizer
