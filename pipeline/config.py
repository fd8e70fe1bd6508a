"""The configuration: one strict, typed YAML file for every stage. Each option is documented at its field.

`load()` reads `--config F`, else `./sana-pipe.yaml`, else the shipped `sana_1600m_1024.yaml`, and applies `--set a.b=c`
on top. A mistake must stop the run before it costs GPU hours: unknown keys are errors that name the key, the file and
the nearest valid name, and values are not converted (an integer may serve as a float, nothing else).

Defaults are Sana's (NVlabs/Sana `configs/sana_config/*`, diffusers' `SanaTransformer2DModel`); see docs/training.md.
"""

from __future__ import annotations

import difflib
import re
import shlex
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from pipeline.errors import ConfigError, alternatives, expanded, not_permitted
from pipeline.options import (
    MISSING,
    deepest,
    field_at,
    fields_below,
    flat,
    put,
    section_of,
    value_at,
    values_of,
    within,
)
from pipeline.urls import strip_credentials
from pipeline.yaml_text import NO_YAML, as_yaml, from_yaml, not_yaml, on_one_line

SHIPPED = Path(__file__).resolve().parent.parent / "configs"
DEFAULT_NAME = "sana_1600m_1024.yaml"
LOCAL_NAME = "sana-pipe.yaml"
Place = Annotated[str, AfterValidator(expanded)]
"""A path or a URL. `~` and `$NAME` are replaced here: no shell does it in a file, or behind `--set cache=`."""
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Channel = Annotated[int, Field(ge=0, le=255)]
Sides = Annotated[
    tuple[Positive, Positive], BeforeValidator(lambda value: tuple(value) if type(value) is list else value)
]
"""[height, width]; YAML has lists alone."""
Tracker = Literal["tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio"]
Storage = Literal["bf16", "bf16-zstd", "int8"]


def _check_recompute(mode: str) -> str:
    if mode not in ("none", "full", "selective", "auto") and not re.fullmatch(r"every-([2-9]|[1-9]\d+)", mode):
        raise ValueError("must be none, full, selective, every-K (every-2: each second block; K at least 2), or auto")
    return mode


Recompute = Annotated[str, AfterValidator(_check_recompute), "none | full | selective | every-K | auto"]


def _check_traced(steps: str) -> str:
    first, _, last = steps.partition("-")
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", steps) or int(first) < 2 or (last and int(last) < int(first)):
        raise ValueError("must be steps FIRST-LAST or one step, from 2 on: 10-12 or 10")
    return steps


TracedSteps = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(_check_traced),
    "FIRST-LAST",
]


def _check_local(path: str) -> str:
    if "://" in path:
        raise ValueError("must be a path on a disk, such as a mount of the store, not a URL")
    return path


LocalPath = Annotated[str, AfterValidator(expanded), AfterValidator(_check_local), "text"]


def _check_microbatch(size: Any) -> Any:
    if size != "auto" and (type(size) is not int or size < 1):
        raise ValueError("must be an integer above 0, or auto")
    return size


if TYPE_CHECKING:
    Microbatch = int  # once `pipeline.planning.auto.decide` has decided
    Steps = int  # once the stage has counted those of `train.epochs`
else:
    Steps = Positive | None
    Microbatch = Annotated[Any, AfterValidator(_check_microbatch), "integer above 0 | auto"]
_AUTO: Any = "auto"


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _by_word(cls, data: Any) -> Any:
        return cls.from_word(data) if isinstance(data, str) else data

    @classmethod
    def from_word(cls, word: str) -> Any:
        """Return what a word in place of the section stands for (`storage: int8`); most sections have no such form."""
        return word

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        if (conflict := next(self._conflicts(), None)) is not None:
            raise ValueError(conflict)
        return self

    def _conflicts(self) -> Iterator[str]:
        """Values that do not go together, each with what to set."""
        yield from ()


class Weights(_Section):
    """Pretrained weights."""

    folder: ClassVar[str] = ""
    """The model's folder in a pipeline's repository or folder."""
    id: Place
    """A model on the hub, or a folder that `save_pretrained` wrote: the model's, or that of a pipeline which has it."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null: the main branch."""


class StartWeights(Weights):
    """The weights that training starts from."""

    folder: ClassVar[str] = "transformer"
    id: Place
    """A model on the hub or a folder that `save_pretrained` wrote, the transformer's or a pipeline's; or a file of
    NVlabs' trainer (`.pth`, or safetensors with its names), local or as `hf://OWNER/NAME/checkpoints/NAME.pth`."""
    variant: str | None = None
    """The variant of the weight files; null: the files of the highest precision (the run logs which). Of several models
    in one `.pth`, the key of one, such as `state_dict_ema`."""
    runs_in: Annotated[list[Literal["fp32", "bf16", "fp16"]], Field(min_length=1)] | None = None
    """The precisions in which these weights work, the preferred one first; null: unknown. Weights trained in fp16 fail
    in bf16 (NVlabs/Sana #47, #109), and weights trained in bf16 overflow in fp16 (#65)."""

    def bears(self, precision: str) -> bool:
        """False if the weights are known to fail in this value of `train.precision`."""
        return self.runs_in is None or precision.removesuffix("_pure") in self.runs_in

    @classmethod
    def from_word(cls, word: str) -> Any:
        return {"id": word}


class VaeConfig(Weights):
    """The image encoder."""

    folder: ClassVar[str] = "vae"
    dtype: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of the encoder's computation; part of the recipe. tf32: fp32, whose factors of products and
    convolutions a GPU rounds to TF32. DC-AE overflows in fp16. With tf32 and bf16 `encode` prints how far some of your
    latents are from those in fp32."""
    decoder: Place | None = None
    """The decoder of `sample` and `report`, a model on the hub or a folder, of diffusers' `AutoencoderDC` or
    `AutoencoderTiny`; null: the VAE's. It must have the VAE's channels, compression and scaling factor;
    `mit-han-lab/dc-ae-lite-f32c32-sana-1.1-diffusers` is a faster one for Sana. Not part of the recipe."""

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
    """Precision of the encoder's computation; part of the recipe."""
    recipe: Literal["diffusers", "nvlabs"] = "diffusers"
    """Normalisation of captions. diffusers: lower case, stripped, as `SanaPipeline` does at inference. nvlabs: as
    written, as NVlabs' trainer does."""
    instruction: str | None = None
    """The text before each caption; null: the recipe's instruction; `""`: none."""
    max_length: Annotated[int, Field(ge=2)] = 300
    """Token limit of a caption; longer captions are cut."""
    mode: Literal["auto", "exact"] = "auto"
    """auto: run the instruction once for all captions, and check samples against the reference. exact: run the
    reference for each caption. Not part of the recipe (see pipeline/models/text.py)."""

    @property
    def tokenizer(self) -> Weights:
        """The repository or folder of the tokenizer."""
        return Tokenizer(id=self.id, revision=self.revision)


class TagsConfig(_Section):
    """Variants of captions that are tag lists (`1girl, solo, outdoors`), encoded beside the original, which keeps its
    order. Sentences stay as they are."""

    shuffle: Positive = 4
    """Variants of each caption, with its tags in another order; equal ones count once."""
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the tags that a variant leaves out."""
    keep: NotNegative = 0
    """The first tags, such as a trigger word, that stay in front and are not left out."""


WAYS = ("suffix", "folder", "column", "made")
"""The options that say where a further picture is."""


class FurtherConfig(_Section):
    """The place of a further picture of each sample: `suffix`, `folder`, `column` or `made`, one of them. It is cropped
    and resized as the sample's picture, so it must show the same area; its size in pixels may differ."""

    suffix: str | None = None
    """The end of its name that the picture's name lacks: `.control` for `x.control.png` (in a tar, too) beside `x.jpg`,
    `-masklabel` for `x-masklabel.png`."""
    folder: Place | None = None
    """The folder, relative to the data, that has it under the picture's name: with `edges`, `edges/x.png` is that of
    `x.jpg` and of `photos/x.jpg`."""
    column: str | None = None
    """The column of a table or of metadata.jsonl that holds it, or its file name."""
    required: bool = True
    """true: a sample without it is rejected. Otherwise it counts as a black control picture, or as a white mask."""

    @property
    def ways(self) -> list[str]:
        """Return which of the four is given; none: the source remembers it."""
        return [name for name in WAYS if getattr(self, name, None)]

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        made, given = getattr(self, "made", None), self.ways
        if len(given) > 1:
            raise ValueError(f"give one of suffix, folder, column and made (given: {', '.join(given)})")
        folder = self.folder or ""
        if folder.startswith("/") or "://" in folder or {".", ".."} & {*folder.split("/")}:
            example = "edges for DIR/edges of --data DIR, which holds the pictures, too"
            raise ValueError(f"folder is relative to the data: {example} (found {folder})")
        if made is not None and not self.required:
            raise ValueError("required: false goes with suffix, folder and column: what is made is never missing")
        return self


class ControlPictureConfig(FurtherConfig):
    """The control picture of a ControlNet."""

    made: Literal["canny"] | None = None
    """canny: the edges of the sample's picture, made by OpenCV (`pip install 'sana-pipe[control]'`)."""


class MaskPictureConfig(FurtherConfig):
    """The mask of a masked loss: white is learned, black is not."""

    made: Literal["alpha"] | None = None
    """alpha: the transparency of the sample's picture; what is opaque is learned."""


class FurtherPictures(_Section):
    """Further pictures of each sample, which `encode` makes records of."""

    control: ControlPictureConfig | None = None
    """The control picture; its latents train a ControlNet."""
    mask: MaskPictureConfig | None = None
    """The mask; it weights the loss of each position of the latent."""


class DataConfig(_Section):
    """Pictures, captions, and the pictures that are left out."""

    resolution: Positive = 1024
    """Side of a square picture in pixels; the other buckets have about the same area."""
    buckets: Literal["sana"] | list[tuple[Positive, Positive]] = "sana"
    """Target sizes as [height, width]; sana: Sana's table of 40 aspect ratios at `resolution`."""
    caption_field: str = "text"
    """The column that holds the caption. `tag_string_character+tag_string_general`: several columns, joined with
    commas."""
    caption_weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Several caption columns with their weights, such as `{short: 1, long: 3}`; replaces `caption_field`. `txt` is the
    text file beside a picture."""
    caption_scores: dict[str, str] = {}
    """The score column of a caption column, such as `{long: clip}`: captions are then drawn by Sana's rule for CLIP
    scores: in proportion to score^10, and none below 25, unless all are; then the best is."""
    caption: str | None = None
    """The caption of pictures without one. none: the empty caption. filename: the file's name without its ending.
    folder: the name of its folder (underscores become spaces in both; of kohya's `10_sks dog` it is `sks dog`). null:
    the picture is rejected. Any other text, such as `a photo of sks dog`, is the caption itself."""
    caption_prefix: str = ""
    """Text put before every caption, as written (with its spaces). Where a caption has `[trigger]`, the words of
    this text take its place, and nothing is put before it."""
    caption_parts: Literal["auto", "captions", "tags"] = "auto"
    """The meaning of the lines of a text and the entries of a list. captions: a caption each. tags: tags, which are
    joined with commas into one caption. auto: a text is one caption, with its line breaks; a list of tags is one
    caption, a list with a sentence is several, and a picture whose list may be either is rejected."""
    tags: TagsConfig | None = None
    """Add variants of captions that are tag lists, such as `{shuffle: 4, drop: 0.1, keep: 1}`; null: none."""
    image_field: str | None = None
    """The column of a table that holds the picture or its file name; null: chosen by type and name."""
    image_root: Place | None = None
    """The folder that a table's file names are relative to; null: the table's folder."""
    pictures: FurtherPictures = FurtherPictures()
    """Further pictures of each sample."""
    background: tuple[Channel, Channel, Channel] = (255, 255, 255)
    """Colour behind transparent pixels (red, green, blue)."""
    max_pixels: Positive = 200_000_000
    """Pictures with more pixels are rejected, by their header; WebP and JPEG 2000 with more than half as many. Decoding
    takes up to 16 bytes a pixel, of these two 32, and `encode.workers` pictures are decoded at once."""
    decoder: Literal["auto", "vips", "pillow"] = "auto"
    """vips is fast. auto: vips where it can be imported, but an existing cache keeps its decoder. The pixels differ by
    rounding, so the decoder is part of the recipe."""
    min_side: Positive | None = None
    """Pictures with a shorter side below this many pixels are left out; null: none."""
    max_upscale: Annotated[float, Field(gt=0)] | None = None
    """Pictures that must be enlarged by more than this factor to cover their bucket are left out; null: none."""
    max_crop_loss: Share | None = None
    """Pictures that would lose more than this share of their area to the crop are left out; null: none."""

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, data: Any) -> Any:
        if isinstance(data, dict):  # YAML has lists only; strict mode wants tuples
            data = dict(data)
            if isinstance(data.get("buckets"), list):
                data["buckets"] = [tuple(b) if isinstance(b, list) else b for b in data["buckets"]]
            if isinstance(data.get("background"), list):
                data["background"] = tuple(data["background"])
        return data


@dataclass(frozen=True)
class DataGiven:
    """The origin of the values of the section `data`, and of `encode.signals`, which is called `signals` here.

    Attributes:
        file: the section as the configuration file has it, with defaults; None: unknown.
        signals: those of the file.
        named: its options that a file of the user's choice gives.
        overridden: its options that `--set` gives, those of sections in it by dotted name (`tags.drop`); a section
            itself where `--set` gives null or an empty mapping.
    """

    file: DataConfig | None = dataclass_field(default=None, compare=False)
    signals: tuple[str, ...] = dataclass_field(default=(), compare=False)
    named: frozenset[str] = dataclass_field(default=frozenset(), compare=False)
    overridden: frozenset[str] = dataclass_field(default=frozenset(), compare=False)


class StorageConfig(_Section):
    """The form in which values are stored; part of the recipe. `storage: int8` sets both kinds.

    bf16: as they are. bf16-zstd: the same bits in 0.7 of the bytes; reading costs CPU time. int8: half the bytes, an
    error below one per cent (`encode` prints it)."""

    latent: Storage = "bf16"
    """Storage of latents."""
    text: Storage = "bf16"
    """Storage of text rows."""

    @classmethod
    def from_word(cls, word: str) -> Any:
        return {"latent": word, "text": word}


class EncodeConfig(_Section):
    """The encoding of pictures and captions. Only `storage` is part of the recipe. Batch sizes are part of the plan, so
    a unit's bytes do not depend on the process that encodes it."""

    storage: StorageConfig = StorageConfig()
    """Storage of values."""
    signals: list[Literal["phash"]] = []
    """Further records of each picture, made from the pixels that are decoded for the latent. phash: a perceptual hash,
    by which near-duplicates are found. A cache gets those that it lacks without encoding latents again."""
    image_batch: Microbatch = _AUTO
    """Pictures of one VAE batch. auto: on a GPU for each size as many as are predicted to leave a tenth of the memory
    free, at most 15 of 1024 x 1024 pixels (larger tensors are no faster); 8 on a CPU and with `--engine ray`. A batch
    that does not fit is halved."""
    workers: NotNegative = 4
    """Threads that read and decode pictures."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    max_reject_rate: Share = 0.5
    """Refuse a source if more than this share of its items is rejected. Items left out by your settings
    (`data.min_side`, ...) do not count; a source without usable items is always refused."""
    max_shrink: Share = 0.2
    """Refuse a scan that misses more than this share of the source's earlier pictures: the source is probably
    unreachable or mistyped. 1: accept it."""


class SourceConfig(_Section):
    """The samples that `bucket` takes from a source."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """Visits of each sample per epoch, with at most three decimals. 0.25: every fourth epoch. 2: twice an epoch. 0: the
    source is left out."""
    filter: str | None = None
    """As `bucket.filter`, for this source alone."""
    repeats: bool | None = None
    """true: the number that a folder begins with multiplies the visits of its pictures, as for kohya's sd-scripts
    (`10_sks dog`: ten times an epoch; not in the held-out part). null: if all pictures of the source lie in such
    folders; `bucket` says so."""

    def _conflicts(self) -> Iterator[str]:
        if round(self.weight, 3) != self.weight:
            yield "weight must have at most three decimals"


class BucketConfig(_Section):
    """The samples that are used, and the batches that they form."""

    batch: Positive = 64
    """Global batch of an optimizer step, whatever the number of GPUs."""
    tokens: Positive | None = None
    """Limit on latent tokens of a step, in place of `batch`: large buckets get smaller batches, rounded down to a
    multiple of `batch_multiple`."""
    batch_multiple: Positive = 1
    """Every batch is a multiple of this number. Choose one that all your numbers of GPUs divide."""
    remainder: Literal["carry", "drop"] = "carry"
    """Samples that do not fill the last batch of an epoch. carry: use them in the next epoch. drop: skip them in this
    epoch (others in the next one), and skip buckets smaller than a batch."""
    caches: list[Place] = []
    """Other caches (folders or URLs) whose sources are used, too. The shards that are needed are linked or copied."""
    sources: dict[str, SourceConfig] = {}
    """Settings by source; a source that is not listed has the defaults."""
    filter: str | None = None
    """A condition in SQL that samples must satisfy, such as `least(width, height) >= 512 AND score > 5`
    (docs/snapshots.md)."""
    dedup: Literal["none", "image", "near"] = "none"
    """image: of pictures with equal bytes use one, from the source listed first in `sources`, then by name of source
    and item. near: of pictures that look the same (resized, compressed again, cropped to the middle, mirrored) use the
    one with the most pixels, then with the longest caption; it needs `encode.signals: [phash]`."""
    dedup_captions: Literal["drop", "keep"] = "drop"
    """keep: the captions of pictures that `dedup` leaves out become further captions of the one that stays."""
    dedup_keep: list[str] = []
    """Pictures that `dedup` does not leave out, by `ITEM` or `SOURCE: ITEM` as `bucket` lists them: other pictures that
    look the same."""
    balance: Share | None = None
    """Fewer visits for what a data set has much of, more for what is rare: samples are grouped by their latents, and
    those of large groups are visited less. 0.5: by the root of a group's size; 1: every group equally often, as far as
    an eighth of a visit to eight visits of a sample an epoch allow; null: every sample counts the same. Every latent is
    read once."""
    heldout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the pictures, chosen by their digest, that goes into a second snapshot, NAME.heldout. In a cache with
    hashes (`encode.signals: [phash]`) pictures that look the same stay on one side."""
    subset: Positive | None = None
    """Use this many pictures, those with the smallest sample ids. A larger number later keeps them, in the same
    order."""
    grow: str | None = None
    """With `subset`: take the pictures of this earlier snapshot first."""
    resolutions: list[Positive] = []
    """Use Sana's table at each of these, for a cache that was encoded at several `data.resolution`; []: at
    `data.resolution`."""
    pack_mib: Positive = 64
    """`--pack`: size of a shard in MiB. The mirror needs room for sixteen of each bucket."""


class MirrorConfig(_Section):
    """Local copies of shards and tables of a cache in an object store (`cache: s3://...`), shared by all processes of
    the machine."""

    path: LocalPath | None = None
    """Folder of the copies; null: `~/.cache/sana-pipe`."""
    gib: Annotated[float, Field(gt=0)] = 64.0
    """Limit in GiB; free disk space limits the copies, too."""


class MetricsConfig(_Section):
    """Metrics of the stages `encode` and `train`; see docs/metrics.md."""

    textfile: LocalPath | None = None
    """Folder of Prometheus' textfile collector (node exporter's `--collector.textfile.directory`): each process writes
    `sana_pipe_*.prom` there; null: none."""


class ModelConfig(_Section):
    """The transformer: either `weights` (fine-tuning) or `arch` (from scratch); the other is null."""

    weights: StartWeights | None = None
    """Start weights. `weights: ID` alone is the model in that folder, or the `transformer` of that pipeline; `--set
    model.weights=ID` keeps the file's `runs_in`."""
    arch: dict[str, Any] | None = None
    """A new model: the keys of diffusers' `config.json` of a `SanaTransformer2DModel` that differ from Sana 1.6B's,
    such as `{num_layers: 28}`; `{}`: Sana 1.6B. Widths and `sample_size` follow from the other keys and from
    `data.resolution`."""

    def _conflicts(self) -> Iterator[str]:
        if (self.weights is None) == (self.arch is None):
            yield (
                "give either model.weights (fine-tuning; --set model.arch=null) or model.arch (from scratch; --set "
                "model.weights=null), not both, not none"
            )


class FlowConfig(_Section):
    """Flow matching as Sana trains it: logit-normal times, then shifted."""

    shift: Annotated[float, Field(gt=0)] = 3.0
    """Shift of the times towards noise; used in sampling, too."""


class OptimConfig(_Section):
    """The optimizer and the learning rate."""

    name: Literal["adamw", "adamw8bit", "came"] = "adamw"
    """adamw: 8 bytes of state per parameter. adamw8bit: 2 bytes (torchao). came: 4 bytes; NVlabs use it with
    weight_decay 0. Adafactor is not offered: torch's cannot be sharded."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate. NVlabs' trainer multiplies that of its configuration by sqrt(batch / 256)."""
    betas: Annotated[tuple[Share, ...], Field(min_length=2, max_length=3)] = (0.9, 0.999)
    """Decay of the moments; null: (0.9, 0.999) for AdamW, (0.9, 0.999, 0.9999) for CAME."""
    eps: Annotated[float, Field(gt=0)] | None = 1e-8
    """AdamW's eps; null: 1e-8. CAME needs null (its eps are fixed)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decay of matrices and convolutions; with `recipe: nvlabs` of all parameters."""
    clip: Annotated[float, Field(gt=0)] | None = 0.1
    """Limit on the global norm of the gradient; null: none."""
    warmup_steps: NotNegative = 2000
    """Steps over which the rate rises to its peak."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The rate after the warm-up. linear, cosine: it falls to 0 at `train.steps`. wsd: it is constant and falls over
    the last tenth of `train.steps` (with 1 - sqrt of the part that is done). A resumed run with another `train.steps`
    follows the new curve from there."""
    in_backward: bool = False
    """Update each parameter as soon as its gradient is complete, and free the gradient: the gradients of the whole
    model are never in memory together. Needs `clip: null`, because the global norm is known only afterwards."""

    @model_validator(mode="before")
    @classmethod
    def _fill_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        is_came = data.get("name") == "came"
        betas, eps = data.get("betas"), data.get("eps")
        if betas is None:
            betas = (0.9, 0.999, 0.9999) if is_came else (0.9, 0.999)
        if eps is None and not is_came:
            eps = 1e-8
        return {**data, "betas": tuple(betas) if isinstance(betas, list) else betas, "eps": eps}

    def _conflicts(self) -> Iterator[str]:
        expected = 3 if self.name == "came" else 2
        if len(self.betas) != expected:
            yield f"{self.name} has {expected} betas, not {len(self.betas)}; betas: null takes its defaults"
        if self.name == "came" and self.eps is not None:
            yield "eps is AdamW's; CAME's are fixed (1e-30 and 1e-16): write eps: null"


class EmaConfig(_Section):
    """EMA weights: an exponential moving average in fp32, for `export --ema`, `sample --ema` and `train.pictures`."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    """Decay per step; a new average starts with (1 + step) / (10 + step) if that is less."""
    device: Literal["same", "cpu"] = "same"
    """same: beside the parameters. cpu: in host memory."""


class AdapterConfig(_Section):
    """Train a low-rank product beside chosen matrices, and nothing else (see docs/training.md)."""

    kind: Literal["lora", "dora"] = "lora"
    """lora: W + alpha / rank * B A. dora: that with a trained length of each row."""
    rank: Positive = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The product is multiplied by alpha / rank; null: the rank, so that a larger one is not weaker. A fixed alpha is
    weaker with each higher rank, which `train` says."""
    targets: Literal["attention", "all"] | Annotated[list[str], Field(min_length=1)] = "attention"
    """The matrices. attention: the eight projections of both attentions. all: the two 1x1 convolutions, too. A list:
    patterns of module names or their ends, such as `[attn2.to_k, "transformer_blocks.1?.attn1.*"]`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the values that are dropped before A in training."""
    start: Place | None = None
    """An export, a LoRA file of diffusers or a folder of PEFT, whose matrices a new run begins with; null: A drawn, B
    zero."""


class ControlNetConfig(_Section):
    """Train a ControlNet, a copy of the model's first blocks that reads a control picture, beside the frozen model (see
    docs/guides/controlnet.md). Its samples have `control` records (`data.pictures`)."""

    layers: Positive | None = None
    """Blocks that are copied, fewer than the model has; null: 7, or as many as a smaller model allows."""
    control_drop: Share = 0.0
    """Share of samples that are trained with zeros in place of the control, whatever becomes of their caption."""
    start: Place | None = None
    """An export, or a folder or file of diffusers' `SanaControlNetModel`, whose values a new run begins with; null:
    those of the model's blocks, and zero layers."""


class PreserveConfig(_Section):
    """Keep what the base knows while an adapter learns: on a share of the samples the target is the base's own
    prediction, computed with the adapter off."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the samples."""
    prompt: str | Annotated[list[str], Field(min_length=1)] | None = None
    """The caption of these samples, such as `a dog` where the pictures' captions say `a sks dog`; of several each
    sample draws one. A prompt of any set in the cache (`encode --prompts`). null: the samples keep their captions."""

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt or []


class MaskConfig(_Section):
    """Learn the masked part of each picture: the snapshot has masks (`data.pictures`), one value a latent cell."""

    outside: Share = 0.0
    """Weight of the cells whose mask is 0; the weight of a cell is outside + (1 - outside) mask. A sample's loss is its
    weighted mean, so that it does not depend on the masked area."""


class ParallelConfig(_Section):
    """The way in which the model is parallelized. dp_replicate, dp_shard, tp_size and pp_size multiply to the processes
    of the launch."""

    sizes: Literal["given", "auto"] = "given"
    """given: those below. auto (`parallel: auto` for short): a run chooses dp_replicate, dp_shard, tp_size, pp_size and
    offload when it starts, the fastest by prediction that fits (see `microbatch` for the memory). Its configuration and
    checkpoints have the choice; a run that is resumed on as many processes keeps it."""
    dp_replicate: Annotated[int, Field(ge=-1)] = 1
    """Replicas of the model, whose gradients are averaged (DDP; with dp_shard HSDP). -1: what the other sizes leave."""
    dp_shard: Annotated[int, Field(ge=-1)] = -1
    """Processes that share the parameters of a replica (FSDP2). -1: what the other sizes leave."""
    tp_size: Positive = 1
    """Processes that share each matrix (tensor parallelism)."""
    pp_size: Positive = 1
    """Groups of processes with consecutive blocks each (pipeline parallelism, 1F1B)."""
    reshard_after_forward: bool | None = None
    """Free a block's gathered parameters before the backward pass and after each microbatch: less memory, more gathers.
    null: yes where several processes share the parameters or `offload` is set, and no with a pipeline (it would gather
    again for each microbatch). One process gathers nothing, but casts its fp32 parameters to the compute dtype: no
    keeps 2 bytes per parameter and casts once per step."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are sent and summed."""
    reduce_each_microbatch: bool | None = None
    """Reduce gradients over the processes after each microbatch of a step: no process then keeps a whole gradient (4
    bytes per parameter, on the GPU also under `offload`) between microbatches, and gradients are sent as often as there
    are microbatches. One process alone sends nothing and needs no memory for the reduced gradient beside the whole one.
    bf16_pure then sums them in bf16. null: no, unless a search (`microbatch` or `parallel` auto) finds that nothing
    fits without or, on one GPU, that it is faster. A step of one microbatch is the same either way. Not with a
    pipeline."""
    offload: Literal["none", "all"] = "none"
    """all: parameters, gradients and optimizer states stay in host memory, and the optimizer runs on the CPU; a block's
    parameters are copied to the GPU when it runs."""

    @classmethod
    def from_word(cls, word: str) -> Any:
        return {"sizes": word} if word == "auto" else word

    def _conflicts(self) -> Iterator[str]:
        given = {"dp_replicate": 1, "dp_shard": -1, "tp_size": 1, "pp_size": 1, "offload": "none"}
        if self.sizes == "auto" and (others := [name for name, usual in given.items() if getattr(self, name) != usual]):
            yield f"sizes: auto chooses {', '.join(others)}, too: leave them out, or write sizes: given"
        for name in ("dp_replicate", "dp_shard"):
            if getattr(self, name) == 0:
                yield f"{name} must be -1 (what remains) or a positive number"
        if self.dp_replicate == self.dp_shard == -1:
            yield "only one of dp_replicate and dp_shard can be -1 (what remains)"
        if self.reduce_each_microbatch and self.pp_size > 1:
            yield "reduce_each_microbatch does not go with pp_size > 1: a pipeline reduces once a step"

    def reshards(self, shards: int) -> bool:
        """`reshard_after_forward`, null resolved. `shards`: processes that share the parameters of a replica."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.pp_size == 1 and (shards > 1 or self.offload == "all")


class ValidationConfig(_Section):
    """The loss on held-out samples while a run goes on (see docs/training.md)."""

    snapshot: str | None = None
    """Snapshot of the samples, a name or an id. null: the part that was held out of the snapshot that is
    trained on (`bucket.heldout`)."""
    every: Positive = 500
    """Steps between validations; also before the first step and after the last one."""
    samples: Positive = 512
    """Samples of all buckets together, each bucket in proportion to its size."""


class PicturesConfig(_Section):
    """Pictures while a run goes on (see docs/training.md). Steps, guidance and seed are those of `sample`."""

    prompts: str | None = None
    """Name or id of a prompt set (`encode --prompts`). captions: eight captions of the snapshot, and the prompts that
    `encode` made of `data.caption_prefix`. null: the set `prompts` if the cache has it, else captions. With
    `controlnet` always captions, of the samples that the run is validated on, if there are any, and with the controls
    of these samples, in the bucket that has most of them."""
    every: Positive = 500
    """Steps between pictures; also before the first step and after the last one."""
    size: Sides | None = None
    """[height, width] in pixels; null: a square of `data.resolution`. With `controlnet` those of a bucket, null any."""


class TrainConfig(_Section):
    """The training run."""

    output: LocalPath = "./runs/default"
    """The run directory: checkpoints, metrics.jsonl, the configuration."""
    steps: Steps = 10_000
    """Optimizer steps; null: those of `epochs`."""
    epochs: Positive | None = None
    """Epochs of the snapshot in place of `steps`, as its batches and weights define one. The run directory has their
    number of steps."""
    seed: NotNegative = 0
    """Seed of the order, noise, times, caption choice and caption drop."""
    microbatch: Microbatch = _AUTO
    """Samples per process and forward pass; lower it if memory runs out. auto: on a GPU the fastest that is predicted
    to leave a tenth of its memory free, chosen as with `parallel.sizes: auto`; 8 on a CPU. A resumed run keeps its
    choice. `sample` takes 8 for auto."""
    precision: Literal["fp32", "bf16", "fp16", "bf16_pure"] = "bf16"
    """Precision of the computation, on fp32 parameters. fp16 scales the loss and skips steps that overflow. bf16_pure:
    parameters and moments are bf16, too, updated with stochastic rounding."""
    tf32: bool = False
    """On a GPU, round the factors of fp32 matrix products and convolutions to TF32 (10 bits): up to eight times as
    fast. Under bf16 and fp16 it changes nothing on a GPU of compute capability 8.0 or newer: only linear attention
    multiplies in fp32 there, in a kernel that is as exact either way."""
    recipe: Literal["default", "nvlabs"] = "default"
    """nvlabs: follow NVlabs' trainer where no other option does: CAME (3x3 kernels unfactored and without confidence;
    query, key and value as one matrix), weight decay of all parameters, a first step of rate 0, eps of attention. See
    docs/training.md; default is better where they differ, and has the constants of diffusers' pipeline."""
    activation_checkpointing: Recompute = "auto"
    """The part of a block that is computed again in the backward pass. none: nothing. full: everything; only its inputs
    are saved. selective: as full, but the results of matrix products that are no wider than their inputs are saved,
    too. every-K (every-2): full for each K-th block. auto: on a GPU the fastest of none, selective and full that fits,
    chosen as with `microbatch: auto`; otherwise full."""
    activation_compression: Literal["none", "int8"] = "none"
    """Store saved tensors in 8 bits, 128 values with one scale: the inputs of blocks that recompute, the saved tensors
    of Linear and convolution layers of the others. Not with `selective`."""
    caption_drop: Share = 0.1
    """Share of samples that are trained with the empty caption, under the mask of their caption, as NVlabs train."""
    flow: FlowConfig = FlowConfig()
    """Flow matching."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    adapter: AdapterConfig | None = None
    """Train a LoRA or DoRA of frozen weights; null: none, {}: with its defaults."""
    only: Annotated[list[str], Field(min_length=1)] | None = None
    """Train these modules and parameters and freeze the rest; patterns as in `adapter.targets`, such as `[attn2]`.
    null: train all."""
    controlnet: ControlNetConfig | None = None
    """Train a ControlNet and freeze the model; null: none, {}: with its defaults."""
    preserve: PreserveConfig | None = None
    """On a share of the samples, learn the prediction of the base; with `adapter`. null: not, {}: with its defaults."""
    mask: MaskConfig | None = None
    """Weight the loss by the masks of the snapshot; null: not, {}: with its defaults."""
    ema: EmaConfig | None = None
    """EMA weights, a moving average; null: none, {}: with its defaults."""
    validation: ValidationConfig | None = None
    """Validation on held-out samples; null: none, {}: with its defaults."""
    pictures: PicturesConfig | None = None
    """Pictures of captions or prompts; null: none, {}: with its defaults."""
    parallel: ParallelConfig = ParallelConfig()
    """Strategies that divide the model and the batch over processes."""
    text: Literal["padded", "packed"] | None = None
    """Layout in which captions travel to the GPU and are attended to. padded: to the batch's longest. packed: one after
    the other, without padding (on a GPU: of compute capability 8.0 or newer, in 16 bits; not with a pipeline). null:
    packed on such a GPU, else padded."""
    length_window: NotNegative = 0
    """Batches of a bucket, on average, that are sorted by caption length together (length grouping); 0: none. Part of
    the order, so a run cannot be resumed with another value."""
    log_every: Positive = 10
    """Steps between rows of metrics."""
    save_every: Positive = 500
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 3
    """Newest checkpoints that are kept; with `validation` also the one with the lowest held-out loss."""
    keep_every: Positive | None = None
    """Keep the checkpoint of every this many steps for ever; a multiple of `save_every`; null: none."""
    trackers: list[Tracker] = ["tensorboard"]
    """Trackers that get the metrics of `metrics.jsonl`, too, by accelerate's names."""
    compile: Literal["auto", "none", "block"] = "auto"
    """block: compile each block with torch.compile, once for all shapes, and what prepares text and timestep. auto:
    block on a GPU of compute capability 8.0 or newer with Triton, unless another option excludes it; else none. A
    resumed run keeps its choice."""
    profile: TracedSteps | None = None
    """Trace these steps with torch.profiler on the first process, into the folder `profile` of the run: 10-12, or 10.
    They are counted since the run started or resumed, and begin at 2, because the step before is a warm-up; null:
    none."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""

    @property
    def undecided(self) -> tuple[str, ...]:
        """The options that are `auto`. `pipeline.planning.auto.decide` gives them values before a run reads them."""
        parts: dict[str, Any] = {
            "parallel": self.parallel.sizes,
            "microbatch": self.microbatch,
            "activation_checkpointing": self.activation_checkpointing,
            "compile": self.compile,
        }
        return tuple(name for name, value in parts.items() if value == "auto")

    @property
    def drawn_at_once(self) -> int:
        """`microbatch` for `sample`, which does not train."""
        size: Any = self.microbatch
        return 8 if size == "auto" else size

    @model_validator(mode="before")
    @classmethod
    def _steps_or_epochs(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("epochs") is not None:
            if data.get("steps") is not None:
                raise ValueError(
                    f"give either train.steps (it is {data['steps']}) or train.epochs (it is {data['epochs']}), not "
                    "both: the other one is null"
                )
            data = {**data, "steps": None}
        elif isinstance(data, dict) and "steps" in data and data["steps"] is None:
            raise ValueError("'train.steps' is null, and so is 'train.epochs': give one of them")
        return data

    def _conflicts(self) -> Iterator[str]:
        if self.activation_compression != "none" and self.activation_checkpointing == "selective":
            yield (
                f"activation_compression: {self.activation_compression} does not go with activation_checkpointing: "
                "selective; use activation_checkpointing: full, every-K or none, or activation_compression: none"
            )
        if self.optim.in_backward:
            if self.recipe == "nvlabs" and self.optim.name == "came":
                yield (
                    "optim.in_backward updates one parameter at a time, and CAME under recipe: nvlabs takes query, key "
                    "and value together; set recipe: default or optim.in_backward: false"
                )
            if self.optim.clip is not None:
                yield (
                    "optim.in_backward updates parameters before the norm of the gradient is known; "
                    f"set optim.clip: null (it is {self.optim.clip:g}) or optim.in_backward: false"
                )
            if self.precision not in ("fp32", "bf16"):
                why = {"fp16": "the loss scale decides afterwards whether a step counts"}
                yield (
                    f"optim.in_backward does not go with precision: {self.precision} "
                    f"({why.get(self.precision, 'its rounding is drawn in the order of all parameters')}); "
                    "set precision to fp32 or bf16, or optim.in_backward: false"
                )
            if self.parallel.pp_size > 1:
                yield (
                    "optim.in_backward needs one backward pass per step, and a pipeline has one per microbatch; "
                    f"set parallel.pp_size: 1 (it is {self.parallel.pp_size}) or optim.in_backward: false"
                )
        if self.preserve is not None and self.adapter is None:
            reason = "without one there is no base to be asked"
            if self.controlnet is not None:
                reason = "a ControlNet leaves its base as it is"
            yield f"preserve needs adapter: {reason}; set preserve: null, or train by adapter"
        given = [name for name in ("adapter", "only", "controlnet") if getattr(self, name) is not None]
        if len(given) > 1:
            yield f"give either {given[0]} or {given[1]}, not both: each says what is trained"
        prompts = None if self.pictures is None else self.pictures.prompts
        if self.controlnet is not None and prompts not in (None, "captions"):
            yield f"pictures.prompts = {prompts}: these have no control pictures; with controlnet set it to captions"
        if self.compile == "block" and self.activation_compression != "none":  # its backward pass is one piece
            yield (
                f"compile: block does not go with activation_compression: {self.activation_compression}; set "
                "activation_compression to none, or compile: none"
            )
        if self.text == "packed" and self.parallel.pp_size > 1:
            yield (
                "text: packed: the stages of a pipeline exchange padded captions; "
                f"set text: padded or parallel.pp_size: 1 (it is {self.parallel.pp_size})"
            )
        if self.keep_every is not None and self.keep_every % self.save_every:
            yield (
                f"keep_every = {self.keep_every} must be a multiple of save_every = {self.save_every}, such as "
                f"{self.save_every}, {2 * self.save_every}, {10 * self.save_every}"
            )


class SampleConfig(_Section):
    """Pictures drawn from a checkpoint. Defaults: Sana's."""

    steps: Positive = 20
    """Sampling steps."""
    guidance: Annotated[float, Field(ge=0)] = 4.5
    """Scale of classifier-free guidance."""
    seed: NotNegative = 0
    """Seed of the start noise."""


class Config(_Section):
    """The whole file."""

    cache: Place = "./cache"
    """The cache: a folder or a URL (s3://...)."""
    mirror: MirrorConfig = MirrorConfig()
    """Local copies of a cache in an object store."""
    patience_s: Annotated[float, Field(ge=0)] = 300.0
    """Seconds to wait for storage that does not answer (of the cache or a source: object store, web server, network
    disk). It is named after some seconds, and `train` saves before it gives up. Storage that has never answered gets
    5 s: its address is probably wrong. Processes of a training wait for each other as long and 5 minutes more."""
    vae: VaeConfig
    """The image encoder."""
    text: TextConfig
    """The text encoder."""
    model: ModelConfig
    """The transformer."""
    data: DataConfig = DataConfig()
    """Pictures and captions."""
    encode: EncodeConfig = EncodeConfig()
    """The stage `encode`."""
    bucket: BucketConfig = BucketConfig()
    """The stage `bucket`."""
    train: TrainConfig = TrainConfig()
    """The stage `train`."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics of the stages `encode` and `train`."""
    sample: SampleConfig = SampleConfig()
    """The stage `sample`."""
    _data_given: DataGiven = PrivateAttr(default_factory=DataGiven)

    def with_train(self, **changes: Any) -> Config:
        """The configuration with other values of `train`'s options; they are not validated."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})

    def bears(self, precision: str) -> bool:
        """Return whether the weights to begin from work in this value of `train.precision`, as far as is known."""
        return self.model.weights is None or self.model.weights.bears(precision)

    def _conflicts(self) -> Iterator[str]:
        weights, precision = self.model.weights, self.train.precision
        if weights is not None and not weights.bears(precision):
            working = weights.runs_in or []
            yield (
                f"train.precision: {precision} breaks these weights, which run in {' and '.join(working)} "
                "(model.weights.runs_in): weights trained in fp16 fail in bf16 (NVlabs/Sana #47, #109), weights "
                f"trained in bf16 overflow in fp16 (#65); set train.precision={working[0]}"
            )


_CACHE = ("cache", "mirror", "patience_s")
_BUCKETS = (
    *("data.resolution", "data.buckets", "data.background"),
    *("data.min_side", "data.max_upscale", "data.max_crop_loss"),
)
READS: dict[str, tuple[str, ...]] = {
    "encode": (*_CACHE, "vae", "text", "data", "encode", "metrics"),
    "bucket": (*_CACHE, "vae", "text", "bucket", *_BUCKETS, "encode"),
    "check": ("vae", "text", "model", "data", "train"),
    "train": (*_CACHE, "model", "train", "metrics", "data.resolution", "data.caption_prefix", "sample"),
    "plan": (*_CACHE, "text", "model", "train", "data", "bucket"),
    "export": (*_CACHE, "vae", "text", "model", "data", "train", "sample"),
    "sample": (*_CACHE, "vae", "text", "model", "data", "encode", "train", "sample"),
    "decode": ("vae", "encode"),
    "inspect": (*_CACHE, "train"),
    "status": (*_CACHE, "train"),
    "report": (*_CACHE, "vae", "data", "encode", "train"),
    "view": (*_CACHE, "data"),
    "verify": (*_CACHE, "vae", "text", "data", "encode", "bucket"),
}
"""The sections and options that a command reads. Commands that are not listed read `_CACHE` only. A file serves every
command, so it may hold any option; `--set` takes what the command reads."""


def reads(command: str, option: str) -> bool:
    """Return whether a command reads an option (`train.optim.lr`)."""
    return any(within(option, name) for name in READS.get(command, _CACHE))


def _check_read(command: str, option: str, value: Any) -> None:
    for name, _ in flat({option: value}):
        if reads(command, name):
            continue
        others = [other for other in READS if reads(other, name) and other != "decode"]
        near = _similar(name, [other for other in _all_paths() if reads(command, other)])
        raise ConfigError(
            f"--set {name}: sana-pipe {command} does not read this option",
            expected=" or ".join(near) or None,
            fix=f"leave it out; it is read by sana-pipe {', '.join(others)}" if others else "leave it out",
        )


def shipped() -> list[Path]:
    """The configuration files that come with the package."""
    return sorted(SHIPPED.glob("*.yaml"))


def find(path: str | Path | None) -> Path:
    """`--config F`, else `./sana-pipe.yaml`, else the shipped default. A bare name may be a shipped one."""
    if path is None:
        local = Path(LOCAL_NAME)
        return local if local.exists() else SHIPPED / DEFAULT_NAME
    given = Path(path)
    if given.exists() and not given.is_dir():
        return given
    inside = SHIPPED / (given.name if given.suffix else given.name + ".yaml")
    if inside.exists() and given.parent == Path("."):
        return inside
    raise ConfigError(
        f"there is no configuration file {str(path)!r}",
        expected="a path, or one of " + ", ".join(p.name for p in shipped()),
        fix=f"--config {shipped()[0].stem}, or no --config for {LOCAL_NAME} here, else {Path(DEFAULT_NAME).stem}",
    )


@dataclass(frozen=True)
class Given:
    """The options that a configuration file and `--set` give, and where each comes from.

    Attributes:
        file: the configuration file.
        tree: what the file and `--set` say together.
        overridden: the options named in `--set`.
    """

    file: Path
    tree: dict[str, Any]
    overridden: tuple[str, ...] = ()

    def given_by(self, option: str) -> str:
        """Name what gives an option its value: `--set`, the file (`shipped NAME` if it came with the package), or
        `default`."""
        if any(within(option, name) or within(name, option) for name in self.overridden):
            return "--set"
        value, rest = deepest(self.tree, option)
        if rest and isinstance(value, dict):  # a value that is no section is a short form, such as `storage: int8`
            return "default"
        return f"shipped {self.file.name}" if self.file.parent == SHIPPED else str(self.file)


def load(
    path: str | Path | None = None, overrides: tuple[str, ...] | list[str] = (), command: str | None = None
) -> Config:
    """Read, override and check a configuration.

    Args:
        path: see `find`.
        overrides: `a.b=c` strings; the value is YAML (`train.optim.lr=2e-5`, `model.weights=null`).
        command: a key of `READS`; overrides of options that it does not read are refused. None: any option.

    Raises:
        ConfigError: unknown key, wrong type, impossible combination, unreadable file, an option that is not read.
    """
    config, given = load_given(path, overrides)
    for option in given.overridden if command else ():
        _check_read(str(command), option, value_at(given.tree, option))
    return config


def load_given(path: str | Path | None = None, overrides: tuple[str, ...] | list[str] = ()) -> tuple[Config, Given]:
    """Load as `load` does, and say where the values come from."""
    source = find(path)
    tree = read_tree(source)
    data_given = _data_given(tree, is_chosen=path is not None or source.parent != SHIPPED)
    assignments = [_parse_override(text) for text in overrides]
    overridden = [".".join(keys) for keys, _, _ in assignments]
    for name, other in (("steps", "epochs"), ("epochs", "steps")):  # the flag replaces what the file says of the other
        if f"train.{name}" in overridden and f"train.{other}" not in overridden and isinstance(tree.get("train"), dict):
            tree["train"].pop(other, None)
    for keys, value, text in assignments:
        _assign(tree, keys, value, text)
    if "phases" in tree:
        raise _phases_refused(tree, source if source != Path(LOCAL_NAME) else None)
    config = validated(tree, source, dict(zip(overridden, overrides, strict=True)))
    names = [name for keys, value, _ in assignments if keys[0] == "data" for name in _named(keys[1:], value)]
    signals = ["signals"] if any(within("encode.signals", option) for option in overridden) else []
    config._data_given = replace(data_given, overridden=frozenset([*names, *signals]))
    return config, Given(source, tree, tuple(overridden))


def _phases_refused(tree: dict[str, Any], file: Path | None) -> ConfigError:
    """The error for `phases`, with the commands that train the phases of a file.

    Args:
        file: to name by `--config`; None: `train` finds it.
    """
    phases, train = tree["phases"], tree.get("train")
    output = Path(str((train.get("output") if isinstance(train, dict) else None) or TrainConfig().output))
    lines: list[str] = []
    for number, phase in enumerate(phases if isinstance(phases, list) else ()):
        if not isinstance(phase, dict) or not isinstance(phase.get("name"), str):
            lines.clear()
            break
        words = ["sana-pipe", "train", *([] if file is None else ["--config", str(file)])]
        words += ["--from", str(output / phases[number - 1]["name"])] if number else []
        words += ["--snapshot", str(phase["snapshot"])] if phase.get("snapshot") else []
        changed = phase["set"] if isinstance(phase.get("set"), dict) else {}
        given = {f"train.{key}": phase[key] for key in ("steps", "epochs") if phase.get(key) is not None}
        for option, value in {"train.output": str(output / phase["name"]), **given, **changed}.items():
            words += ["--set", f"{option}={on_one_line(value)}"]
        lines.append(shlex.join([*words, "--resume", "auto"]))
    template = ["sana-pipe train --from RUN --set train.output=DIR --set OPTION=VALUE --resume auto"] if phases else []
    return ConfigError(
        f"{file or LOCAL_NAME}: `phases` is no option: each round is a `train` of its own, which begins from the last",
        fix="\n  ".join(["take `phases` out of the file, then", *(lines or template)]) if phases else "take it out",
    )


def validated(tree: dict[str, Any], source: Path, overridden: dict[str, str]) -> Config:
    """The configuration of a tree.

    Args:
        source: names it in errors. overridden: option -> the text of its `--set`.

    Raises:
        ConfigError: as `load`.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, tree, source, overridden) from None


def _data_given(tree: dict[str, Any], is_chosen: bool) -> DataGiven:
    section, signals = tree.get("data") or {}, value_at(tree, "encode.signals")
    named = [*(section if isinstance(section, dict) else ()), *(["signals"] if isinstance(signals, list) else [])]
    with suppress(ValidationError):  # `--set` may mend it
        file = DataConfig.model_validate(section)
        return DataGiven(file, tuple(signals or ()), frozenset(named if is_chosen else ()))
    return DataGiven()


def _named(keys: list[str], value: Any) -> Iterator[str]:
    """The options of `data` that `--set` gives by `data.KEYS=VALUE`, as in `DataGiven.overridden`."""
    field = field_at(DataConfig, keys)[1] if keys else None
    if isinstance(value, dict) and value and (not keys or (field is not None and section_of(field) is not None)):
        for key, inner in value.items():
            yield from _named([*keys, key], inner)
    else:
        yield from [".".join(keys)] if keys else DataConfig.model_fields


def read_tree(source: Path) -> dict[str, Any]:
    """The sections of a configuration file as they stand there; anything else is a ConfigError."""
    try:
        tree = from_yaml(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise not_permitted(source) or ConfigError(f"{source}: cannot be read: {error}") from None
    except NO_YAML as error:
        raise not_yaml(source, error) from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: must be a mapping of sections", found=type(tree).__name__)
    return tree


def written(config: Config) -> dict[str, Any]:
    """The full tree with defaults, for files that others read: URLs are without user, password and query."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(below) for key, below in value.items()}
        if isinstance(value, list):
            return [clean(below) for below in value]
        return strip_credentials(value) if isinstance(value, str) and not re.search(r"\s", value) else value

    return clean(config.model_dump(mode="json"))


def dump(config: Config) -> str:
    """`written` as YAML, for the run directory."""
    return as_yaml(written(config), sort_keys=False)


def setting(option: str, *values: Any) -> str:
    """`--set OPTION=VALUE` as it is typed in a shell, of values that are alternatives each."""
    return alternatives("--set", (f"{option}={on_one_line(value)}" for value in values))


WITH_SPACES = ("caption_prefix",)
"""Options whose text may begin or end with spaces."""


def _parse_override(text: str) -> tuple[list[str], Any, str]:
    """Keys, value and the text of one `--set`."""
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text!r} is not of the form a.b=c", fix="--set train.optim.lr=2e-5")
    try:
        meaning = from_yaml(value)
    except NO_YAML as error:
        raise not_yaml(f"--set {text!r}", error) from None
    if keys[-1] in WITH_SPACES and meaning == value.strip():  # YAML drops the spaces of a text without quotes
        meaning = value
    return keys, meaning, text


def _assign(tree: dict[str, Any], keys: list[str], value: Any, text: str) -> None:
    if keys == ["model", "weights"] and isinstance(value, str):
        runs_in = value_at(tree, "model.weights.runs_in", MISSING)
        value = {**StartWeights.from_word(value), **({} if runs_in is MISSING else {"runs_in": runs_in})}
    if keys == ["train", "parallel"] and value == "auto":
        keys = [*keys, "sizes"]
    try:
        put(tree, ".".join(keys), value)
    except ValueError as error:
        raise ConfigError(f"--set {text!r}: {error}") from None


def option_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every option and section of the file with its field."""
    return fields_below(Config)


def _all_paths() -> list[str]:
    return [name for name, _ in option_fields()]


_LISTED = 12
"""A message lists the options of a section with at most this many."""


def _similar(name: str, valid: list[str]) -> list[str]:
    """List at most three: the same name in other sections, else names that are spelt alike."""
    last = name.rpartition(".")[2]
    same = [other for other in valid if other.rpartition(".")[2] == last and "NAME" not in other]
    return same[:3] or difflib.get_close_matches(name, valid, n=3, cutoff=0.75)


def _hint(location: tuple[int | str, ...]) -> str:
    """The nearest valid name: similar in this section, the same name elsewhere, else the names of a small section."""
    last, valid = str(location[-1]), field_at(Config, location)[2]
    section = [str(part) for part in location[:-1]]
    similar = [".".join([*section, match]) for match in difflib.get_close_matches(last, valid, n=1, cutoff=0.5)]
    typo = similar if difflib.get_close_matches(last, valid, n=1, cutoff=0.8) else []
    elsewhere = [path for path in _all_paths() if last in (path, path.rpartition(".")[2])]
    candidates = [*typo, *elsewhere, *similar]
    if candidates:
        return f"; did you mean {candidates[0]!r}?"
    if len(valid) > _LISTED:
        return f"; `sana-pipe config {'.'.join(section)}".rstrip() + "` lists the options"
    return f"; valid here: {', '.join(valid)}" if valid else ""


def _explain(error: ValidationError, tree: dict[str, Any], source: Path, overridden: dict[str, str]) -> ConfigError:
    """overridden: option -> the text of its `--set`."""
    problems = []
    for item in error.errors():
        above = item["loc"][:-1] if item["type"] == "extra_forbidden" else item["loc"]  # an unknown key may hold a [
        tags = [p for p in above if isinstance(p, str) and "[" in p]  # pydantic's names for a union's members
        given = item["loc"][: item["loc"].index(tags[0])] if tags else item["loc"]
        if tags and tags[0].startswith("list[") != isinstance(value_at(tree, given), list):
            continue  # the error of the union's other member
        location = (*(p for p in above if p not in tags), *item["loc"][len(above) :])
        name = ".".join(str(part) for part in location) or "(whole file)"
        unknown = item["type"] == "extra_forbidden"
        below = any(within(key, name) for key in overridden)  # `--set` gave an option of the section at fault
        origin = f"{source} with --set" if below else str(source)
        if any(within(name, key) for key in overridden) or (below and unknown):
            origin = "--set"
        if unknown:
            problems.append(f"{origin}: unknown key {name!r}{_hint(location)}")
        elif item["type"] == "missing" and isinstance(location[-1], str):
            problems.append(f"{origin}: {name!r} is required and not given")
        else:
            problems.append(f"{origin}: {name!r}: {_problem(item, location, overridden.get(name))}")
    return ConfigError("\n".join(dict.fromkeys(problems)))


def _problem(item: Any, location: tuple[int | str, ...], override: str | None) -> str:
    """Say what an option takes, and what was found. Our validators (`value_error`) say it themselves.

    Args:
        override: the text of the `--set` that gave the value.
    """
    found, message = item["input"], item["msg"].removeprefix("Value error, ")
    option, field, _ = field_at(Config, location)
    if item["type"] != "value_error" and field is not None:
        is_option = option == ".".join(map(str, location))
        message = f"must be {values_of(field)}" if is_option else f"{message}; {option} is {values_of(field)}"
    message = re.sub(r"Input should be a valid dictionary or instance of \w+", "must be {OPTION: VALUE, ...}", message)
    if isinstance(found, int | float) and re.search("text|string", message):
        quoted = "put it in quotes" if override is None else setting(option, override.partition("=")[2].strip())
        return f"{message} (found {found!r}, which is no text: {quoted})"
    return message + ("" if isinstance(found, dict) else f" (found {textwrap.shorten(repr(found), 200)})")
