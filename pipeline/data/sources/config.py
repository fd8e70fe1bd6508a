"""The section `data`: pictures and captions."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sana_pipe.base.config import Channel, Location, NotNegative, Positive, Section, Share


class TagsConfig(Section):
    """Variants of captions that are tag lists (`1girl, solo, outdoors`), encoded next to the original, which keeps its
    order. Sentences stay as they are."""

    shuffle: Positive = 4
    """Variants of each caption, with its tags in another order; equal ones count once."""
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the tags that a variant leaves out."""
    keep: NotNegative = 0
    """The first tags, such as a trigger word, that stay in front and are not left out."""


WAYS = ("suffix", "folder", "column", "made")
"""The options that say where another picture of a sample is."""


class OtherPictureConfig(Section):
    """The place of another picture of each sample.

    same_area: it shows the same area as the sample's picture, so its sides must have the same ratio."""

    same_area: ClassVar[bool] = True

    suffix: str | None = None
    """The end of its name that the picture's name lacks: `.control` for `x.control.png` (in a tar, too) next to
    `x.jpg`, `-masklabel` for `x-masklabel.png`. `_w/_l`: `x_l.png` is that of `x_w.jpg`."""
    folder: Location | None = None
    """The folder, relative to the data, that has it under the picture's name: with `edges`, `edges/x.png` is that of
    `x.jpg` and of `photos/x.jpg`."""
    column: str | None = None
    """The column of a table or of metadata.jsonl that holds it, or its file name."""

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
        if made is not None and not getattr(self, "required", True):
            raise ValueError("required: false goes with suffix, folder and column: what is made is never missing")
        return self


class ControlOrMaskConfig(OtherPictureConfig):
    """The place of a control picture or mask of each sample: `suffix`, `folder`, `column` or `made`, one of them. It is
    cropped and resized as the sample's picture, so it must show the same area; its size in pixels may differ."""

    required: bool = True
    """true: a sample without it is rejected. Otherwise it counts as a black control picture, or as a white mask."""


class ControlPictureConfig(ControlOrMaskConfig):
    """The control picture of a ControlNet."""

    made: Literal["canny"] | None = None
    """canny: the edges of the sample's picture, made by OpenCV (`pip install 'sana-pipe[control]'`)."""


class MaskPictureConfig(ControlOrMaskConfig):
    """The mask of a masked loss: white is learned, black is not."""

    made: Literal["alpha"] | None = None
    """alpha: the transparency of the sample's picture; what is opaque is learned."""


class RejectedPictureConfig(OtherPictureConfig):
    """The rejected picture of a preference pair: `suffix`, `folder` or `column`, one of them. The sample's picture is
    the chosen one; the rejected one is resized and cropped to its bucket. A picture without one is no pair and is
    rejected."""

    same_area: ClassVar[bool] = False

    weight: str | None = None
    """The column of a table or of metadata.jsonl that holds the weight of a pair, such as votes or a margin, a positive
    number; 0 is a tie, which `bucket` leaves out. null: all have the weight 1."""
    label: str | None = None
    """With `column`: the column that says which picture of a row is better. 1: the sample's. 0: that of `column`; the
    two change places. 0.5: none; the row is rejected as a tie. null: the sample's is, in all rows."""

    @model_validator(mode="after")
    def _label_with_column(self) -> Self:
        if self.label is not None and (self.suffix or self.folder):
            raise ValueError("label goes with column: suffix and folder say which picture is the rejected one")
        return self


class ControlsAndMasks(Section):
    """Control pictures, masks and rejected pictures of each sample, which `encode` makes records of."""

    control: ControlPictureConfig | None = None
    """The control picture; its latents train a ControlNet."""
    mask: MaskPictureConfig | None = None
    """The mask; it weights the loss of each position of the latent."""
    rejected: RejectedPictureConfig | None = None
    """The rejected picture; its latents train from preference pairs."""


class DataConfig(Section):
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
    text file next to a picture."""
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
    image_root: Location | None = None
    """The folder that a table's file names are relative to; null: the table's folder."""
    key_field: str | None = None
    """The column of parquet tables that names a row, such as `id`: text or whole numbers, each once in the source.
    null: a row is named by its file and the digest of its picture."""
    pictures: ControlsAndMasks = ControlsAndMasks()
    """Control pictures, masks and rejected pictures of each sample."""
    background: tuple[Channel, Channel, Channel] = (255, 255, 255)
    """Colour behind transparent pixels (red, green, blue)."""
    max_pixels: Positive = 200_000_000
    """Pictures with more pixels are rejected, by their header; WebP and JPEG 2000 with more than half as many. Decoding
    takes up to 16 bytes a pixel, of these two 32, and `encode.workers` pictures are decoded at once."""
    decoder: Literal["auto", "vips", "pillow"] = "auto"
    """vips is fast. auto: vips where it can be imported, but an existing cache keeps its decoder. The pixels differ by
    rounding, so the decoder is part of the encoding."""
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
