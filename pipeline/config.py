"""One strict, typed YAML for every stage.

What: pydantic models for the whole configuration, and `load()`, which reads `--config F`, else `./sana-pipe.yaml`,
else the shipped `sana_1600m_1024.yaml`, and applies `--set a.b=c` on top.
Why: an option that is misspelt, of the wrong type or impossible together with another must stop the run before it
costs GPU hours. So unknown keys are errors that name the key, the file and the nearest valid name; nothing is
coerced that a reader of the YAML would not expect (integers serve as floats, nothing else).
Price: every option has to be declared here; a file may not carry keys for other tools.

Constants are Sana's own (NVlabs/Sana `configs/sana_config/*` and the diffusers configuration of
`SanaTransformer2DModel`); each field says where it differs.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import ConfigError
from pipeline.urls import strip_credentials

SHIPPED = Path(__file__).resolve().parent.parent / "configs"
DEFAULT_NAME = "sana_1600m_1024.yaml"
LOCAL_NAME = "sana-pipe.yaml"

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Channel = Annotated[int, Field(ge=0, le=255)]
Tracker = Literal["tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio"]


def _recompute(mode: str) -> str:
    if mode not in ("none", "full", "selective") and not re.fullmatch(r"every-([2-9]|[1-9]\d+)", mode):
        raise ValueError("must be none, full, selective, or every-K (every-2: each second block; K at least 2)")
    return mode


Recompute = Annotated[str, AfterValidator(_recompute)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


class Weights(_Section):
    """Where pretrained weights come from: a hub id or a folder that `save_pretrained` wrote."""

    id: str
    subfolder: str | None = None
    revision: str | None = None
    variant: str | None = None


class StartWeights(Weights):
    """What training starts from. `variant: null` takes the set of the highest precision that is there; the run says
    which. `id` may also name a file of NVlabs (`.pth`, or safetensors with their names), here or on the hub:
    `hf://OWNER/NAME/checkpoints/NAME.pth`.

    runs_in: the precisions that these weights bear, the one to take first; null: not known. Weights that were trained
    in fp16 come apart in bf16 (NVlabs/Sana #47, #109), those trained in bf16 overflow in fp16 (#65).
    """

    runs_in: Annotated[list[Literal["fp32", "bf16", "fp16"]], Field(min_length=1)] | None = None

    def bears(self, precision: str) -> bool:
        """False: the weights are known to fail in this precision of `train.precision`."""
        return self.runs_in is None or precision.removesuffix("_pure") in self.runs_in


class VaeConfig(Weights):
    """The image encoder. `scaling_factor: null` takes the one in the VAE's own config (0.41407 for Sana's DC-AE)."""

    subfolder: str | None = "vae"
    dtype: Literal["fp32", "bf16"] = "fp32"
    scaling_factor: Annotated[float, Field(gt=0)] | None = None


class TextConfig(Weights):
    """The text encoder and the rule that turns a caption into rows.

    normalisation `diffusers` lowers and strips the caption and quotes the instruction as `SanaPipeline` does, so that
    the rows are those which `SanaPipeline` computes at inference; `nvlabs` keeps the caption raw, as NVlabs' trainer.
    `instruction: null` takes that recipe's own instruction; `""` uses none.
    mode `auto` runs the instruction once for all captions and checks itself against the reference; `exact` computes
    every caption as the reference does. It is not part of the recipe: see pipeline/models/text.py.
    """

    subfolder: str | None = "text_encoder"
    tokenizer_subfolder: str | None = "tokenizer"
    dtype: Literal["fp32", "bf16"] = "bf16"
    recipe: Literal["diffusers", "nvlabs"] = "diffusers"
    instruction: str | None = None
    max_length: Annotated[int, Field(ge=2)] = 300
    mode: Literal["auto", "exact"] = "auto"


class DataConfig(_Section):
    """What the pictures become. `buckets: sana` is Sana's table of 40 aspect ratios at `resolution`.

    Captions: `caption_field` is the column that holds them. Several columns with their shares go into
    `caption_weights` (`{short: 1, long: 3}`; `txt` stands for the text file beside a picture), which then replaces
    `caption_field`. `caption_scores` names the score column of a caption column (`{long: clip}`); see
    `pipeline/sources/caption_columns.py` for Sana's rule, whose constants are `score_threshold` and `score_power`.
    caption: what a picture says that has no caption: `none` (nothing: the empty caption), `filename` (its name without
    the ending), `folder` (the name of its folder; underscores of both read as spaces), or any other text, such as
    `a photo of sks dog`; null: such pictures are rejected.
    caption_prefix, caption_suffix: put before and after every caption, as they are (with their spaces).
    `image_field` is the column of a table that holds the picture or its name (null: found by type and name), and
    `image_root` is what these names are relative to (null: the table's own folder).
    max_pixels, max_picture_mib: a picture is left out if its header says that it has more pixels, or that decoding it
    takes more memory, in MiB. `encode.workers` pictures are decoded at once.
    decoder: `vips` (fast) or `pillow`; `auto` is vips where it can be imported, but stays with what a cache has been
    encoded with. The pixels differ by rounding, so the decoder is part of the recipe.
    min_side, max_upscale, max_crop_loss: pictures are left out whose shorter side has fewer pixels, that would be
    enlarged by more than this factor to cover their bucket, or that would lose more than this share of their area to
    the crop; null: never.
    """

    resolution: Positive = 1024
    buckets: Literal["sana"] | list[tuple[Positive, Positive]] = "sana"
    caption_field: str = "text"
    caption_weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    caption_scores: dict[str, str] = {}
    score_threshold: Annotated[float, Field(ge=0)] = 25.0
    score_power: Annotated[float, Field(ge=0)] = 10.0
    caption: str | None = None
    caption_prefix: str = ""
    caption_suffix: str = ""
    image_field: str | None = None
    image_root: str | None = None
    background: tuple[Channel, Channel, Channel] = (255, 255, 255)
    max_pixels: Positive = 200_000_000
    max_picture_mib: Positive = 3072
    decoder: Literal["auto", "vips", "pillow"] = "auto"
    min_side: Positive | None = None
    max_upscale: Annotated[float, Field(gt=0)] | None = None
    max_crop_loss: Share | None = None

    @property
    def max_bytes(self) -> int:
        """Memory that decoding a picture may take, in bytes."""
        return self.max_picture_mib << 20

    @model_validator(mode="before")
    @classmethod
    def _pairs(cls, data: Any) -> Any:
        if isinstance(data, dict):  # YAML has lists only; strict mode wants tuples
            data = dict(data)
            if isinstance(data.get("buckets"), list):
                data["buckets"] = [tuple(b) if isinstance(b, list) else b for b in data["buckets"]]
            if isinstance(data.get("background"), list):
                data["background"] = tuple(data["background"])
        return data


Storage = Literal["bf16", "bf16-zstd", "int8"]


class StorageConfig(_Section):
    """How values are stored, part of the recipe. `bf16`: as they are. `bf16-zstd`: the same bits in 0.7 of the bytes;
    reading costs CPU. `int8`: half the bytes, under one per cent of error (`encode` prints it)."""

    latent: Storage = "bf16"
    text: Storage = "bf16"


class RayConfig(_Section):
    """What one unit asks of a Ray cluster, as a Ray task (`--engine ray`). `gpus: null` is 1 if the cluster has GPUs
    and encode.device is not cpu, else 0. `retries` counts nodes and processes that die under one unit."""

    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] | None = None
    retries: NotNegative = 10


class EncodeConfig(_Section):
    """How the work is cut and done. None of it changes a value beyond bf16 batch effects; batch sizes are part of the
    plan, so bytes do not depend on who encodes a unit. `text_batch` is a bound: the encoder itself cuts a batch into
    forward passes of captions of similar length and at most 8192 tokens. `storage` alone is part of the recipe: one
    word for both kinds, or `{latent: ..., text: ...}`.

    max_reject_rate: the largest share of a source's items that may be rejected; those that a setting of yours rejects
    (`data.min_side`, ...) do not count. A source of which nothing is usable is refused in any case.
    max_shrink: a scan in which more than this share of the source's earlier pictures is missing is refused, for then
    the source is rather away or mistyped; `encode --shrink` is `max_shrink: 1`.
    claim_timeout_s: a worker that gave no sign for so long is thought dead, and idle ones take over its unit.
    grace_s: after SIGTERM or SIGUSR1, how long the unit in hand may go on; then it is dropped at its next batch.
    min_free_gib: what must stay free on the cache's disk beside the next unit; with less, encoding pauses.
    low_disk_wait_s: how long it waits for room before it ends with an error; 0: not at all.
    """

    storage: StorageConfig = StorageConfig()
    image_batch: Positive = 8
    text_batch: Positive = 128
    unit_mib: Positive = 64
    unit_images: Positive = 1024
    unit_captions: Positive = 512
    window: Positive = 65536
    workers: NotNegative = 4
    device: str = "auto"
    max_reject_rate: Share = 0.5
    max_shrink: Share = 0.2
    claim_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    grace_s: Annotated[float, Field(ge=0)] = 20.0
    min_free_gib: Annotated[float, Field(ge=0)] = 1.0
    low_disk_wait_s: Annotated[float, Field(ge=0)] = 3600.0
    ray: RayConfig = RayConfig()

    @model_validator(mode="before")
    @classmethod
    def _both(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("storage"), str):
            data = {**data, "storage": {"latent": data["storage"], "text": data["storage"]}}
        return data


class SourceConfig(_Section):
    """What `bucket` does with one source. weight: visits of each of its samples per epoch, at most three decimals
    (0.25: every fourth epoch; 2: twice an epoch); 0 leaves the source out. filter: as `bucket.filter`, on its items
    alone."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    filter: str | None = None

    @model_validator(mode="after")
    def _decimals(self) -> SourceConfig:
        if round(self.weight, 3) != self.weight:
            raise ValueError("weight must have at most three decimals")
        return self


class BucketConfig(_Section):
    """How samples become batches, and which samples. `batch` is the global batch of one optimizer step, whatever the
    number of GPUs. `tokens`, if given, takes its place: the most latent tokens of a step, so that large buckets have
    small batches; the batch is rounded down to a multiple of `batch_multiple`. `batches` goes before both:
    `{"1024x1024": 32}` (height x width). All batches must be multiples of `batch_multiple`: choose one that the numbers
    of GPUs you will ever use divide.

    small: what happens to the samples that do not fill a last batch of an epoch: `carry` takes them into the next
    epoch (nothing is lost), `drop` leaves them out of this epoch (another remainder each epoch) and a bucket smaller
    than one batch altogether; `repeat` fills the last batch of each epoch with second visits; `reassign` moves the
    samples of buckets smaller than one batch to the nearest bucket that is not (their latents have to be encoded again:
    `bucket` says how) and is `carry` for the rest.
    order: `largest_first` begins the first epoch with one batch of each bucket, the largest pictures first.

    caches: other cache folders whose sources are used, too. The shards that a snapshot uses are linked (or copied) into
    the own cache. sources: settings by name of the source. filter: an expression that samples must satisfy, such as
    `min(width, height) >= 512 and score > 5`; see pipeline/snapshots/filters.py.
    dedup: `image` keeps one of the samples whose files are equal bytes: that of the source listed first in `sources`,
    then of the first source and item by name.
    heldout: share of the pictures, chosen by their digest, that goes to a snapshot of its own (NAME.heldout).
    subset: use so many pictures, those with the smallest sample ids: a larger number later keeps all of them, in the
    same order. grow: name of an earlier snapshot whose pictures are taken before all others.
    pack_mib, pack_window: `--pack` writes shards of about so many MiB; training from them shuffles the samples of so
    many shards of a bucket together (pipeline/loader/schedule.py), so the mirror needs room for four times as many.
    resolutions: Sana's table at each of these, for caches that were encoded at several `data.resolution`; none: at
    `data.resolution` alone.
    """

    batch: Positive = 64
    tokens: Positive | None = None
    batches: dict[str, Positive] = {}
    batch_multiple: Positive = 1
    small: Literal["carry", "drop", "repeat", "reassign"] = "carry"
    order: Literal["random", "largest_first"] = "random"
    pad_text_multiple: Positive = 16
    caches: list[str] = []
    sources: dict[str, SourceConfig] = {}
    filter: str | None = None
    dedup: Literal["none", "image"] = "none"
    heldout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    subset: Positive | None = None
    grow: str | None = None
    resolutions: list[Positive] = []
    pack_mib: Positive = 64
    pack_window: Positive = 4


class MirrorConfig(_Section):
    """Copies of the shards and tables of a cache that lies in an object store (`cache: s3://...`): on this machine, in
    the folder `path` (null: `~/.cache/sana-pipe`), at most `gib` GiB of them and no more than its disk has space for;
    shared by all processes of the machine.
    """

    path: str | None = None
    gib: Annotated[float, Field(gt=0)] = 64.0


class ArchConfig(_Section):
    """Shape of a Sana transformer that is trained from scratch. Defaults: Sana 1.6B (diffusers' own defaults)."""

    in_channels: Positive = 32
    num_layers: Positive = 20
    num_attention_heads: Positive = 70
    attention_head_dim: Positive = 32
    num_cross_attention_heads: Positive = 20
    cross_attention_head_dim: Positive = 112
    caption_channels: Positive = 2304
    mlp_ratio: Annotated[float, Field(gt=0)] = 2.5
    qk_norm: Literal["rms_norm_across_heads"] | None = None
    interpolation_scale: float | None = None
    sample_size: Positive | None = None

    @model_validator(mode="after")
    def _widths(self) -> ArchConfig:
        own = self.num_attention_heads * self.attention_head_dim
        cross = self.num_cross_attention_heads * self.cross_attention_head_dim
        if own != cross:
            raise ValueError(
                f"num_attention_heads*attention_head_dim = {own} must equal "
                f"num_cross_attention_heads*cross_attention_head_dim = {cross}"
            )
        return self


def _model_at(place: str) -> dict[str, Any]:
    direct = (Path(place).expanduser() / "config.json").is_file()
    return {"id": place, "subfolder": None if direct else "transformer"}


class ModelConfig(_Section):
    """The transformer: `weights` (hub id or folder, diffusers format) or `weights: null` and `arch` from scratch.
    `weights: ID` alone is the model in that folder, or the `transformer` of that pipeline; `--set model.weights=ID`
    leaves `runs_in` as the file has it."""

    weights: StartWeights | None = None
    arch: ArchConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("weights"), str):
            return data
        return {**data, "weights": _model_at(data["weights"])}

    @model_validator(mode="after")
    def _one(self) -> ModelConfig:
        if (self.weights is None) == (self.arch is None):
            raise ValueError(
                "give either model.weights (fine-tuning; --set model.arch=null) or model.arch (from scratch; --set "
                "model.weights=null), not both, not none"
            )
        return self


class FlowConfig(_Section):
    """Flow matching as Sana trains it: logit-normal times, shifted afterwards."""

    shift: Annotated[float, Field(gt=0)] = 3.0
    logit_mean: float = 0.0
    logit_std: Annotated[float, Field(gt=0)] = 1.0


class OptimConfig(_Section):
    """The optimizer. NVlabs: CAME, or AdamW with these numbers for `Sana_1600M_img1024_AdamW`; scale_lr `sqrt`
    multiplies lr by sqrt(batch / 256), as their trainer does.

    name: `adamw`; `adamw8bit` (torchao: moments in 8 bits, 2 bytes of state per parameter instead of 8); `came` (4
    bytes; NVlabs use it with weight_decay 0). Adafactor is not offered: torch's cannot be sharded.
    betas, eps: `null` takes the optimizer's own: (0.9, 0.999) and 1e-8 for AdamW, (0.9, 0.999, 0.9999) for CAME, whose
    eps is fixed.
    in_backward: each parameter is updated as soon as its gradient is complete, and the gradient is given back: never
    are there the gradients of the whole model. Needs `clip: null`: the global norm is known only afterwards.
    """

    name: Literal["adamw", "adamw8bit", "came"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    scale_lr: Literal["none", "sqrt"] = "none"
    betas: Annotated[tuple[Share, ...], Field(min_length=2, max_length=3)] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] | None = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip: Annotated[float, Field(gt=0)] | None = 0.1
    warmup_steps: NotNegative = 2000
    in_backward: bool = False

    @model_validator(mode="before")
    @classmethod
    def _own(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        came = data.get("name") == "came"
        betas, eps = data.get("betas"), data.get("eps")
        if betas is None:
            betas = (0.9, 0.999, 0.9999) if came else (0.9, 0.999)
        if eps is None and not came:
            eps = 1e-8
        return {**data, "betas": tuple(betas) if isinstance(betas, list) else betas, "eps": eps}

    @model_validator(mode="after")
    def _fit(self) -> OptimConfig:
        wanted = 3 if self.name == "came" else 2
        if len(self.betas) != wanted:
            raise ValueError(f"{self.name} has {wanted} betas, not {len(self.betas)}; betas: null takes its own")
        if self.name == "came" and self.eps is not None:
            raise ValueError("eps is AdamW's; CAME's are fixed (1e-30 and 1e-16): write eps: null")
        return self


class EmaConfig(_Section):
    """A running average of the weights, in fp32, for `export --ema` and `sample --ema`.

    decay: per step, at most; an average begins with (1 + step) / (10 + step). device `cpu` keeps it in host memory.
    every: steps between updates; the decay per step stays the same.
    """

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    device: Literal["same", "cpu"] = "same"
    every: Positive = 1


class ParallelConfig(_Section):
    """How the model is spread. The four sizes multiply to the processes of the launch.

    dp_replicate: copies of the model, each fed with other samples; their gradients are averaged. Alone it is what DDP
    does. dp_shard: processes that share one copy, parameter by parameter (FSDP2); with dp_replicate it is HSDP. One of
    the two may be -1: what the other sizes leave. tp_size: processes that share every matrix. pp_size: groups that
    hold consecutive blocks.
    pp_schedule: in which order microbatches pass the pp_size groups (pipeline/parallel/pipeline_parallel.py).
    pp_stages_per_rank: slices of the model that each group holds; null: 1, or 2 for the schedules other than 1f1b and
    gpipe, which need several.
    reshard_after_forward: give a block's gathered parameters back before the backward pass (less memory, one more
    gather); null: yes, but not in a pipeline, where it would be one more gather per microbatch.
    prefetch_blocks: how many blocks ahead parameters are gathered, the counterpart of limit_all_gathers of older FSDP;
    null: FSDP2's own rule, one ahead. reduce_dtype: in which gradients travel and are summed.
    offload: `all` keeps parameters, gradients and the optimizer's states in host memory and does the optimizer's step
    on the CPU; a block's parameters come to the device when it is their turn.
    timeout_s: bounds every wait for another process; one that waits for its data has `patience_s` more.
    """

    dp_replicate: Annotated[int, Field(ge=-1)] = 1
    dp_shard: Annotated[int, Field(ge=-1)] = -1
    tp_size: Positive = 1
    pp_size: Positive = 1
    pp_schedule: Literal["1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"] = "1f1b"
    pp_stages_per_rank: Positive | None = None
    reshard_after_forward: bool | None = None
    prefetch_blocks: Positive | None = None
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    offload: Literal["none", "all"] = "none"
    timeout_s: Positive = 600

    @model_validator(mode="after")
    def _sizes(self) -> ParallelConfig:
        for name in ("dp_replicate", "dp_shard"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be -1 (what remains) or a positive number")
        if self.dp_replicate == self.dp_shard == -1:
            raise ValueError("only one of dp_replicate and dp_shard can be -1 (what remains)")
        return self

    @model_validator(mode="after")
    def _stages(self) -> ParallelConfig:
        given, simple = self.pp_stages_per_rank, self.pp_schedule in ("1f1b", "gpipe")
        if given is None:
            return self
        if simple and given > 1:
            raise ValueError(
                f"pp_schedule {self.pp_schedule} has one stage per process, pp_stages_per_rank is {given}: "
                "interleaved_1f1b takes several"
            )
        if not simple and given == 1:
            raise ValueError(f"pp_schedule {self.pp_schedule} needs pp_stages_per_rank of at least 2; 1f1b takes 1")
        if self.pp_schedule == "zbv" and given != 2:
            raise ValueError(
                f"pp_schedule zbv has pp_stages_per_rank 2, not {given}; interleaved_1f1b takes any number"
            )
        return self

    @property
    def reshards(self) -> bool:
        """`reshard_after_forward`, or what suits the sizes."""
        return self.pp_size == 1 if self.reshard_after_forward is None else self.reshard_after_forward

    @property
    def stages_per_rank(self) -> int:
        """`pp_stages_per_rank`, or what the schedule takes by itself."""
        return self.pp_stages_per_rank or (1 if self.pp_schedule in ("1f1b", "gpipe") else 2)


class TrainConfig(_Section):
    """The training run. `steps` counts optimizer steps; `microbatch` is samples per process and forward pass.

    Reading: `loader_threads` read ahead until `prefetch_mib` are ready (per process), and at most `prefetch` steps
    (null: any number; 0: no threads). A read that takes longer than about `patience_s` ends the run, which saves first.
    text: captions go to the device `padded` to the batch's longest, or `packed` one after the other, to be padded
    there: the same values, fewer bytes. packed_attention: do not pad them there either; cross attention then takes
    them as they are (on a GPU of compute capability 8.0 or newer, in bf16).
    max_quarantine_rate: with --quarantine, the run saves and ends when more than this share of the last 10,000 samples
    (of 200 at least) stood in for unreadable ones; a fifth of it brings a warning.
    activation_checkpointing: what a transformer block computes again in the backward pass: `none`; `full`, all but its
    inputs; `selective`, all but its inputs and the results of its matrix products that are no wider than their inputs;
    `every-K` (`every-2`): each K-th block in full, the others nothing.
    activation_compression: what blocks keep is kept as `int8` or `fp8`, 128 values with one scale: the inputs of blocks
    that recompute, what Linear and convolution layers save of the others. Not together with `selective`.
    activation_offload: what blocks keep waits in host memory; of a block that recomputes, its inputs.
    compile: `block` compiles each block with torch.compile, for at most `compile_max_shapes` shapes of a batch.
    peak_tflops: of one GPU in the run's precision, for the model FLOPs utilisation; null: its data sheet's, if known.
    trackers: where metrics go beside `metrics.jsonl`, by accelerate's names.
    length_window: so many batches of each bucket, on average, are sorted by caption length together and their batches
    shuffled again; 0: none. Part of the order, so a run cannot be resumed with another.
    precision: of the computation, on fp32 parameters (`fp16` scales its loss and skips steps that overflow);
    `bf16_pure` has no fp32 parameters at all: weights and moments are bf16, rounded by chance.
    residual: dtype of the tokens between the blocks, of the norms over them and of the gates: `fp32`, as under NVlabs'
    autocast; `compute`, that of `precision`. null: `fp32` for a new run; a resumed run keeps what it began with
    (`compute` if it is older than this option). Measured in bf16 against fp32 (`python -m benchmarks.residual`):
    gradients of three blocks of Sana 1.6B are off by 6.0e-3 with fp32 tokens and by 7.3e-3 without, those of eight
    narrow blocks by half; a block keeps 11 % more for the backward pass, or twice its input if it recomputes: 92 MB a
    sample of 1024 px over Sana 1.6B's 20 blocks.
    recipe: `nvlabs` follows NVlabs' trainer where no other option does: CAME keeps 3x3 kernels unfactored and without
    confidence, and takes the weights of query, key and value for the one matrix that they are there; weight decay
    pulls biases, norms and tables, too; warm-up begins with a step of rate 0; the norms of cross attention's queries
    and keys have eps 1e-6 (`default`: 1e-5), linear attention's denominator 1e-8 (1e-15). `default` is better where
    the two differ (docs/nvlabs.md says why), and has the constants of diffusers, whose pipeline draws with the exported
    weights.

    Checkpoints: one after every `save_every` steps, written beside the training (`async_save`; it takes host memory of
    the size of a process's share) or while the training waits. Kept are the `keep_checkpoints` newest and, for ever,
    that of every `keep_every`th step (null: none).
    """

    output: str = "./runs/default"
    steps: Positive = 10_000
    seed: NotNegative = 0
    phase: NotNegative = 0
    microbatch: Positive = 8
    precision: Literal["fp32", "bf16", "fp16", "bf16_pure"] = "bf16"
    residual: Literal["fp32", "compute"] | None = None
    recipe: Literal["default", "nvlabs"] = "default"
    activation_checkpointing: Recompute = "full"
    activation_compression: Literal["none", "int8", "fp8"] = "none"
    activation_offload: bool = False
    caption_drop: Share = 0.1
    null_mask: Literal["caption", "bos"] = "caption"
    flow: FlowConfig = FlowConfig()
    optim: OptimConfig = OptimConfig()
    ema: EmaConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    text: Literal["padded", "packed"] = "padded"
    length_window: NotNegative = 0
    prefetch: NotNegative | None = None
    prefetch_mib: Positive = 128
    loader_threads: Positive = 2
    max_quarantine_rate: Share = 0.05
    log_every: Positive = 10
    save_every: Positive = 500
    keep_checkpoints: Positive = 3
    keep_every: Positive | None = None
    async_save: bool = True
    trackers: list[Tracker] = ["tensorboard"]
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    packed_attention: bool = False
    compile: Literal["none", "block"] = "none"
    compile_backend: str = "inductor"
    compile_max_shapes: Positive = 8
    device: str = "auto"

    @model_validator(mode="after")
    def _memory(self) -> TrainConfig:
        if self.activation_compression != "none" and self.activation_checkpointing == "selective":
            raise ValueError(
                f"activation_compression: {self.activation_compression} does not reach what activation_checkpointing: "
                "selective keeps; use activation_checkpointing: full, every-K or none, or activation_compression: none"
            )
        if self.optim.in_backward:
            if self.recipe == "nvlabs" and self.optim.name == "came":
                raise ValueError(
                    "optim.in_backward updates one parameter at a time, and CAME under recipe: nvlabs takes query, key "
                    "and value together; set recipe: default or optim.in_backward: false"
                )
            if self.optim.clip is not None:
                raise ValueError(
                    "optim.in_backward updates parameters before the norm of the gradient is known; "
                    f"set optim.clip: null (it is {self.optim.clip:g}) or optim.in_backward: false"
                )
            if self.precision not in ("fp32", "bf16"):
                why = {"fp16": "the loss scale decides afterwards whether a step counts"}
                raise ValueError(
                    f"optim.in_backward does not go with precision: {self.precision} "
                    f"({why.get(self.precision, 'its rounding is drawn in the order of all parameters')}); "
                    "set precision to fp32 or bf16, or optim.in_backward: false"
                )
            if self.parallel.pp_size > 1:
                raise ValueError(
                    "optim.in_backward needs one backward pass per step, and a pipeline has one per microbatch; "
                    f"set parallel.pp_size: 1 (it is {self.parallel.pp_size}) or optim.in_backward: false"
                )
        return self

    @model_validator(mode="after")
    def _compiled(self) -> TrainConfig:
        if self.compile == "none":
            return self
        wanted: dict[str, tuple[object, tuple[object, ...]]] = {
            "activation_compression": (self.activation_compression, ("none",)),
            "activation_offload": (self.activation_offload, (False,)),
        }
        if self.parallel.pp_size > 1:  # the others take a block's backward pass apart, and compiled it is one piece
            wanted["parallel.pp_schedule"] = (self.parallel.pp_schedule, ("1f1b", "gpipe", "interleaved_1f1b"))
        for name, (found, works) in wanted.items():
            if found not in works:
                raise ValueError(
                    f"compile: {self.compile} does not go with {name}: {found}; set {name} to "
                    f"{' or '.join(map(str, works))}, or compile: none"
                )
        return self

    @model_validator(mode="after")
    def _pipeline(self) -> TrainConfig:
        if self.packed_attention and self.parallel.pp_size > 1:
            raise ValueError(
                "packed_attention: the stages of a pipeline exchange padded captions; "
                f"set packed_attention: false or parallel.pp_size: 1 (it is {self.parallel.pp_size})"
            )
        schedule, split = self.parallel.pp_schedule, ("interleaved_zero_bubble", "zbv")
        if self.parallel.pp_size > 1 and schedule in split and self.activation_checkpointing != "none":
            raise ValueError(
                f"parallel.pp_schedule {schedule} takes the backward pass apart, which recomputation cannot follow: "
                "set activation_checkpointing to none, or parallel.pp_schedule to 1f1b or interleaved_1f1b"
            )
        return self

    @model_validator(mode="after")
    def _kept(self) -> TrainConfig:
        if self.keep_every is not None and self.keep_every % self.save_every:
            some = f"{self.save_every}, {2 * self.save_every}, {10 * self.save_every}"
            raise ValueError(
                f"keep_every = {self.keep_every} must be a multiple of save_every = {self.save_every}, such as {some}"
            )
        return self

    @model_validator(mode="after")
    def _packed(self) -> TrainConfig:
        if self.packed_attention:
            for key, needed in (("text", "packed"), ("compile", "none")):
                if getattr(self, key) != needed:
                    raise ValueError(f"packed_attention: true needs {key}: {needed} (found {getattr(self, key)!r})")
        return self


class SampleConfig(_Section):
    """Drawing pictures from a checkpoint. Defaults are Sana's: 20 steps, guidance 4.5."""

    steps: Positive = 20
    guidance: Annotated[float, Field(ge=0)] = 4.5
    count: Positive = 8
    seed: NotNegative = 0


class Config(_Section):
    """The whole file. Top-level keys are one per stage, plus `cache` (a folder or a URL, s3://…), its `mirror`, the
    encoders, `data` and `model`.

    patience_s: how long a store that does not answer (of the cache or of a source; an object store, a web server, a
    network file system) is waited for, in every command; it is named after some seconds. `train` saves a checkpoint
    before it gives up. A store that has not answered a process yet is given 5 s: its address is probably wrong.
    """

    cache: str = "./cache"
    mirror: MirrorConfig = MirrorConfig()
    patience_s: Annotated[float, Field(ge=0)] = 300.0
    vae: VaeConfig
    text: TextConfig
    model: ModelConfig
    data: DataConfig = DataConfig()
    encode: EncodeConfig = EncodeConfig()
    bucket: BucketConfig = BucketConfig()
    train: TrainConfig = TrainConfig()
    sample: SampleConfig = SampleConfig()

    @model_validator(mode="before")
    @classmethod
    def _one_patience(cls, data: Any) -> Any:
        """`train.loader_timeout_s` of older files, which bounded the loader's reads alone."""
        train = data.get("train") if isinstance(data, dict) else None
        if not isinstance(train, dict) or "loader_timeout_s" not in train:
            return data
        if "patience_s" in data:
            raise ValueError("patience_s and train.loader_timeout_s, its name in older files: give patience_s alone")
        rest = {name: value for name, value in train.items() if name != "loader_timeout_s"}
        return {**data, "patience_s": train["loader_timeout_s"], "train": rest}

    @model_validator(mode="after")
    def _precision(self) -> Config:
        weights, wanted = self.model.weights, self.train.precision
        if weights is not None and not weights.bears(wanted):
            able = weights.runs_in or []
            raise ValueError(
                f"train.precision: {wanted} breaks these weights, which run in {' and '.join(able)} "
                f"(model.weights.runs_in): those trained in fp16 come apart in bf16 (NVlabs/Sana #47, #109), those "
                f"trained in bf16 overflow in fp16 (#65); set train.precision={able[0]}"
            )
        return self


_CACHE = ("cache", "mirror", "patience_s")
_SOURCE = (
    *("data.caption_field", "data.caption_weights", "data.caption_scores", "data.score_threshold", "data.score_power"),
    *("data.image_field", "data.image_root", "data.max_pixels", "data.max_picture_mib"),
)
_ENCODE = (*_CACHE, "vae", "text", "data", *(f"encode.{name}" for name in EncodeConfig.model_fields if name != "ray"))
_JOIN = (
    *(*_CACHE, *(f"bucket.{name}" for name in BucketConfig.model_fields if not name.startswith("pack_"))),
    *("data.resolution", "data.buckets", "data.background", "data.min_side", "data.max_upscale", "data.max_crop_loss"),
    *("vae.id", "vae.revision", "vae.dtype", "vae.scaling_factor", "text.id", "text.revision", "text.dtype"),
    *("text.recipe", "text.instruction", "text.max_length", "encode.storage"),
)
_PACK = (*_CACHE, "bucket.pack_mib", "bucket.pack_window", "encode.grace_s", "encode.claim_timeout_s")
_EXPORT = (
    *("train.output", "train.flow.shift", "sample.steps", "sample.guidance", "data.resolution", "data.buckets"),
    *("vae.id", "vae.subfolder", "vae.revision", "vae.variant", "vae.scaling_factor"),
    *("text.id", "text.subfolder", "text.revision", "text.variant", "text.tokenizer_subfolder"),
    *("text.recipe", "text.instruction", "text.max_length", "model.weights.runs_in"),
)
_SAMPLE = (
    *(*_CACHE, *_SOURCE, "sample", "vae", "data.background", "encode.device"),
    *("train.output", "train.device", "train.precision", "train.microbatch", "train.flow.shift"),
)
READS: dict[str, tuple[str, ...]] = {
    "encode": _ENCODE,
    "encode --engine ray": (*_ENCODE, "encode.ray"),
    "bucket": _JOIN,
    "bucket --pack": (*_JOIN, *_PACK),
    "bucket --pack --snapshot": _PACK,
    "check": ("vae", "text", "model", "data.resolution", "data.buckets", "train.precision"),
    "train": (*_CACHE, "model", "train", "data.resolution"),
    "export": _EXPORT,
    "sample": _SAMPLE,
    "decode": ("vae", "encode.device"),
    "verify --repair": (*_CACHE, *_SOURCE, "vae", "text", "encode.device", "encode.workers"),
}
"""The options that a command reads, by the words that choose what it does; a section stands for all that is in it.
Commands that are not named read where the cache is and nothing else. One file serves every command, so a file may hold
any option; `--set` takes those that the command reads."""


def reads(command: str, option: str) -> bool:
    """Whether a command reads an option (`train.optim.lr`)."""
    return any(option == name or option.startswith(name + ".") for name in READS.get(command, _CACHE))


def _check_read(command: str, option: str, value: Any) -> None:
    if reads(command, option):
        return
    if isinstance(value, dict) and value and option in _all_paths():
        for name, below in value.items():
            _check_read(command, f"{option}.{name}", below)
        return
    others = [other for other in READS if reads(other, option) and not other.startswith("decode")]
    raise ConfigError(
        f"--set {option}: sana-pipe {command} does not read this option",
        expected="one of " + ", ".join(READS.get(command, _CACHE)),
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
    if given.exists():
        return given
    inside = SHIPPED / (given.name if given.suffix else given.name + ".yaml")
    if inside.exists() and given.parent == Path("."):
        return inside
    raise ConfigError(
        f"there is no configuration file {str(path)!r}",
        expected="a path, or one of " + ", ".join(p.name for p in shipped()),
        fix=f"--config {shipped()[0].stem}, or no --config for {LOCAL_NAME} here, else {Path(DEFAULT_NAME).stem}",
    )


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
    source = find(path)
    try:
        tree = yaml.load(source.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None
    except _NO_YAML as error:
        raise ConfigError(f"{source}: is not valid YAML: {error}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: must be a mapping of sections", found=type(tree).__name__)
    touched = [_override(tree, text) for text in overrides]
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, tree, source, touched) from None
    for option in touched if command else ():
        _check_read(str(command), option, _given(tree, tuple(option.split("."))))
    return config


def written(config: Config) -> dict[str, Any]:
    """The full tree, defaults included, as it is written where others read it: URLs have no user, password or query."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(below) for key, below in value.items()}
        if isinstance(value, list):
            return [clean(below) for below in value]
        return strip_credentials(value) if isinstance(value, str) and not re.search(r"\s", value) else value

    return clean(config.model_dump(mode="json"))


def dump(config: Config) -> str:
    """YAML of `written`: what a run directory keeps."""
    return yaml.safe_dump(written(config), sort_keys=False)


_NO_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What PyYAML raises: a number may have too many digits, a date a thirteenth month, a list too many lists in it."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads 1e-4 as a number (YAML 1.1 reads it as a string)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *anchor`: keys written out go before merged ones
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: list(rules) for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def _override(tree: dict[str, Any], text: str) -> str:
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text!r} is not of the form a.b=c", fix="--set train.optim.lr=2e-5")
    try:
        parsed = yaml.load(value, Loader=_Loader)
    except _NO_YAML as error:
        raise ConfigError(f"--set {text!r}: the value is not valid YAML: {error}") from None
    node = tree
    for key in keys[:-1]:
        below = node.get(key)
        if below is None:
            below = node[key] = {}
        if not isinstance(below, dict):
            raise ConfigError(f"--set {text!r}: {key!r} is a value, not a section", found=repr(below))
        node = below
    if keys == ["model", "weights"] and isinstance(parsed, str):
        before = node.get("weights")
        kept = {"runs_in": before["runs_in"]} if isinstance(before, dict) and "runs_in" in before else {}
        parsed = {**_model_at(parsed), **kept}
    node[keys[-1]] = parsed
    return ".".join(keys)


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Names that are valid beside the last element of `location`."""
    model: Any = Config
    for part in location[:-1]:
        if isinstance(part, int):
            return []
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return []
        model = next((a for a in _alternatives(field.annotation) if hasattr(a, "model_fields")), None)
        if model is None:
            return []
    return list(getattr(model, "model_fields", {}))


def _alternatives(annotation: Any) -> list[Any]:
    return [annotation, *getattr(annotation, "__args__", ())]


def _all_paths(model: Any = Config, prefix: str = "") -> list[str]:
    paths = []
    for name, field in model.model_fields.items():
        paths.append(prefix + name)
        for inner in _alternatives(field.annotation):
            if hasattr(inner, "model_fields"):
                paths.extend(_all_paths(inner, f"{prefix}{name}."))
    return paths


def _hint(location: tuple[int | str, ...]) -> str:
    """The nearest valid name: a near one of this section, else this very name elsewhere, else what is valid here."""
    last, valid = str(location[-1]), _fields_at(location)
    section = [str(part) for part in location[:-1]]
    near = [".".join([*section, match]) for match in difflib.get_close_matches(last, valid, n=1, cutoff=0.5)]
    close = near if difflib.get_close_matches(last, valid, n=1, cutoff=0.8) else []
    elsewhere = [path for path in _all_paths() if path.split(".")[-1] == last]
    found = [*close, *elsewhere, *near]
    return f"; did you mean {found[0]!r}?" if found else f"; valid here: {', '.join(valid)}"


def _given(tree: Any, location: tuple[int | str, ...]) -> Any:
    """What the file says at `location`, up to the first part that is a union's member."""
    for part in location:
        if isinstance(part, str) and "[" in part:
            return tree
        tree = tree[part]
    return tree


def _explain(error: ValidationError, tree: dict[str, Any], source: Path, touched: list[str]) -> ConfigError:
    problems = []
    for item in error.errors():
        above = item["loc"][:-1] if item["type"] == "extra_forbidden" else item["loc"]  # an unknown key may hold a [
        tags = [p for p in above if isinstance(p, str) and "[" in p]  # pydantic's names for a union's members
        if tags and tags[0].startswith("list[") != isinstance(_given(tree, item["loc"]), list):
            continue  # the member of the union that was not meant
        location = (*(p for p in above if p not in tags), *item["loc"][len(above) :])
        name = ".".join(str(part) for part in location) or "(whole file)"
        where = "--set" if any(name == key or name.startswith(key + ".") for key in touched) else str(source)
        if item["type"] == "extra_forbidden":
            problems.append(f"{where}: unknown key {name!r}{_hint(location)}")
        elif item["type"] == "missing":
            problems.append(f"{where}: {name!r} is required and not given")
        else:
            message = item["msg"].removeprefix("Value error, ")
            shown = "" if isinstance(item["input"], dict) else f" (found {item['input']!r})"
            problems.append(f"{where}: {name!r}: {message}{shown}")
    return ConfigError("\n".join(problems))
