"""The sections `vae` and `text`: the frozen encoders."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sana_pipe.base.config import Location, Weights

# A constant of the released models: the instruction before every caption ("complex human instruction",
# `text_encoder.chi_prompt` in NVlabs/Sana's configurations). A changed character changes every row of every caption.
_INSTRUCTION = "\n".join(
    (
        "Given a user prompt, generate an {quote}Enhanced prompt{quote} that provides detailed visual descriptions "
        "suitable for image generation. Evaluate the level of detail in the user prompt:",
        "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
        "relationships to create vivid and concrete scenes.",
        "- If the prompt is already detailed, refine and enhance the existing details slightly without "
        "overcomplicating.",
        "Here are examples of how to transform or refine prompts:",
        "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
        "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.",
        "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing "
        "street lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering "
        "glass skyscrapers.",
        "Please generate only the enhanced description for the prompt below and avoid including any additional "
        "commentary or evaluations:",
        "User Prompt: ",
    )
)

INSTRUCTIONS: dict[str, str] = {
    "diffusers": _INSTRUCTION.replace("{quote}", "'"),
    "nvlabs": _INSTRUCTION.replace("{quote}", '"'),
}
"""Prompting -> the instruction (1,057 characters, with a space at the end)."""


class VaeConfig(Weights):
    """The image encoder: diffusers' `AutoencoderDC` (Sana) or `AutoencoderKL` (Z-Image, Flux, Stable Diffusion)."""

    folder: ClassVar[str] = "vae"
    dtype: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of the encoder's computation; part of the encoding. tf32: fp32, whose factors of products and
    convolutions a GPU rounds to TF32. fp16 is not offered: DC-AE and several AutoencoderKL overflow in it. With tf32
    and bf16 `encode` prints how far some of your latents are from those in fp32."""
    decoder: Location | None = None
    """The decoder of `sample` and `report`, a model on the hub or a folder, of diffusers' `AutoencoderDC`,
    `AutoencoderKL` or `AutoencoderTiny`; null: the VAE's. It must have the VAE's channels, compression, scaling and
    shift factor; `mit-han-lab/dc-ae-lite-f32c32-sana-1.1-diffusers` is a faster one for Sana. Not part of the
    encoding."""

    imported: Annotated[float, Field(gt=0)] | None = None
    """Take latents that others have computed with this VAE (`encode --format latents`): the number that they were
    multiplied by, 1 if by none; null: encode pictures. Part of the encoding."""

    @property
    def other_decoder(self) -> Weights | None:
        """The weights that `decoder` names."""
        return None if self.decoder is None else VaeConfig(id=self.decoder)


class Tokenizer(Weights):
    """The files of the text encoder's tokenizer."""

    folder: ClassVar[str] = "tokenizer"


class TextConfig(Weights):
    """The text encoder, and how a caption becomes rows."""

    folder: ClassVar[str] = "text_encoder"
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the encoder's computation; part of the encoding."""
    prompting: Literal["diffusers", "nvlabs"] = "diffusers"
    """Normalisation of captions. diffusers: as the encoder's pipeline does at inference: lower case, stripped for
    Gemma-2 (`SanaPipeline`), as written for Qwen3 (`ZImagePipeline`), cleaned for T5Gemma (`PRXPipeline`). nvlabs: as
    written, as NVlabs' trainer of Sana does."""
    instruction: str | None = None
    """The text before each caption; null: that of `prompting`, for Gemma-2; `""`: none."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Token limit of a caption; longer captions are cut. null: that of the encoder's pipeline: 300 for Gemma-2, 256 for
    T5Gemma, 512 for Qwen3, whose chat template counts."""
    mode: Literal["auto", "exact"] = "auto"
    """auto: run the instruction once for all captions, and no padding, and check samples against the reference. exact:
    run the reference for each caption. Not part of the encoding (see pipeline/data/encoders/text.py)."""

    @property
    def tokenizer(self) -> Weights:
        """The repository or folder of the tokenizer."""
        return Tokenizer(id=self.id, revision=self.revision)
