"""The changes that `sana-pipe init` makes to a shipped configuration, for some pictures and a machine, with reasons.

The file is chosen by purpose and resolution. Its values and their reasons stand in it; here is what depends on the
pictures (their number, size, captions) and on memory. `edited` puts it into the text of the file.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from sana_pipe.base.errors import UserError, escaped
from sana_pipe.base.options import value_at, within
from sana_pipe.base.yaml_text import as_yaml, edited
from sana_pipe.config import SHIPPED, load, load_given
from sana_pipe.data.cache.prompts import TRIGGER_CONTEXTS, filled, has_words, with_prefix
from sana_pipe.data.images import buckets

LORA, FULL, SCRATCH = "lora", "full", "scratch"
PURPOSES = (LORA, FULL, SCRATCH)
MODELS = {1024: "sana_1600m_1024", 512: "sana_600m_512"}
"""The shipped configuration whose models are used, by resolution."""
_ADAPTED, _NEW = "sana_1600m_1024_lora", "sana_600m_512_scratch"
SANA = "sana"
_OF_MODELS = ("vae", "text", "model")
"""The sections that name models."""
_INSTEAD = {"train.steps": "epochs", "train.epochs": "steps"}
"""Option -> the option of its section that it replaces."""


@dataclass(frozen=True)
class Family:
    """A model with one shipped configuration, `file`, for one purpose and resolution."""

    file: str
    purpose: str
    resolution: int


OTHERS = {"zimage": Family("zimage_1024_lora", LORA, 1024), "prx": Family("prx_512", FULL, 512)}
"""The other models that `init --model` chooses."""


@dataclass(frozen=True)
class Steps:
    """visits: of each picture, in `least` to `most` steps, and at least one epoch."""

    visits: int
    least: int
    most: int
    source: str

    def of(self, pictures: int, batch: int) -> int:
        wanted = math.ceil(self.visits * pictures / batch)
        return max(min(max(wanted, self.least), self.most), math.ceil(pictures / batch))


@dataclass(frozen=True)
class Memory:
    """The first row whose `gib`, of all cards together (`Facts.shared_gib`), are there."""

    purpose: str
    resolution: int
    gib: float
    settings: dict[str, Any]
    source: str
    model: str = SANA


SMALL_SET = 1000
_FEWER = f"fewer than {SMALL_SET:,} pictures"
SMALL = {
    "bucket.batch": (16, f"{_FEWER}: enough steps in 100 epochs of them; our choice"),
    "train.optim.lr": (5e-5, f"{_FEWER}: 1e-4 by NVlabs' square root rule (auto_lr) for 16 of 64"),
}
"""Option -> value and reason, for full fine-tuning of fewer than `SMALL_SET` pictures."""

STEPS = {
    LORA: Steps(
        200,
        500,
        3100,
        "50 steps a picture; diffusers' train_dreambooth_lora_sana: 500; users of Z-Image (2B, rank 16): 2,000 to "
        "3,100",
    ),
    FULL: Steps(
        100,
        500,
        10_000,
        "NVlabs' num_epochs = 100, from which on train warns; about 10,000 before a first concept shows "
        "(reported by people who fine-tune Sana)",
    ),
    SCRATCH: Steps(100, 10_000, 100_000, "NVlabs' num_epochs = 100; the bounds are our choice"),
}

MEMORY = (
    Memory(LORA, 1024, 6, {}, "4.3 GiB (sana-pipe plan); the text encoder takes 5.2 GB while encoding"),
    Memory(LORA, 512, 6, {}, "as above"),
    Memory(FULL, 1024, 36, {}, "29.0 GiB and a tenth free (sana-pipe plan)"),
    Memory(
        FULL,
        1024,
        23.5,
        {
            "train.optim.name": "adamw8bit",
            "train.parallel.reshard_after_forward": True,
            "train.parallel.reduce_each_microbatch": True,
        },
        "17.3 GiB at a microbatch of 1 (sana-pipe plan): moments in 8 bits (pip install 'sana-pipe[torchao]')",
    ),
    Memory(
        FULL,
        1024,
        21.5,
        {"train.precision": "bf16_pure"},
        "17.1 GiB (sana-pipe plan): parameters and moments in bf16, with stochastic rounding",
    ),
    Memory(FULL, 512, 11, {}, "9.8 GiB (sana-pipe plan), the 0.6B in fp32"),
    Memory(SCRATCH, 512, 15, {}, "13.5 GiB in microbatches of 4 (sana-pipe plan)"),
    Memory(LORA, 1024, 22.5, {}, "20.3 GiB (sana-pipe plan)", "zimage"),
    Memory(
        LORA,
        1024,
        15.5,
        {
            "train.activation_checkpointing": "full",
            "train.activation_compression": "int8",
            "train.microbatch": 1,
        },
        "14.4 GiB (sana-pipe plan)",
        "zimage",
    ),
    Memory(FULL, 512, 23.5, {}, "21.4 GiB with full checkpointing (sana-pipe plan)", "prx"),
)

OF_ANOTHER_CARD = 1.2
"""GiB of a context and of the buffers of collectives, as sana-pipe plan estimates them."""

HELDOUT = ((1000, 0.02), (40, 0.1))
"""(from so many pictures, share that is held out): `validation.samples` are 512, and fewer than four say little."""
FULL_FROM = 2000
"""So many pictures with captions are fully fine-tuned where the memory suffices; our choice, not a measurement."""
SHARP, LARGEST = 1.5, 2.0
"""1024 px if at least half of the pictures are enlarged by at most `SHARP`; what is enlarged by more than `LARGEST` is
left out. Our choices: `encode` counts what is above 2."""
TRIGGER = "sks"
"""The trigger word where no picture has a caption and none is given, as in the DreamBooth paper."""
KEPT = 3
"""A trigger word stands among so many tags if it is to stay in place: what stays is learned in this order."""
CONTROL = "a street market at night"
"""A prompt without the trigger word: shows what else changes."""
DRAWN = 8
"""Limit on prompts that are drawn while it trains."""


@dataclass(frozen=True)
class Facts:
    """The facts about pictures and machine.

    Attributes:
        heights, widths: (n,) int64, pixels of the usable pictures whose size is known.
        pictures: usable ones. captioned: those with a caption.
        captions: some of their captions.
        held_out: how many pictures a share of `HELDOUT` holds out, by their digests; None: not counted.
        memory_gib: of one card; None: there is none. gpus: cards.
    """

    heights: np.ndarray
    widths: np.ndarray
    pictures: int
    captioned: int
    captions: tuple[str, ...] = ()
    held_out: int | None = None
    memory_gib: float | None = None
    gpus: int = 1

    @property
    def all_gib(self) -> float:
        """Memory of all cards; of none: without a limit, since the training will be elsewhere."""
        return math.inf if self.memory_gib is None else self.memory_gib * self.gpus

    @property
    def shared_gib(self) -> float:
        """`all_gib` without what each card but the first takes for itself."""
        return self.all_gib - OF_ANOTHER_CARD * (self.gpus - 1)


@dataclass(frozen=True)
class Choice:
    """A value and why."""

    option: str
    value: Any
    why: str

    def line(self) -> str:
        """The value and its reason, for people."""
        value = value_at(self.value, "weights.id") or value_at(self.value, "id") or self.value
        text = as_yaml(value, default_flow_style=True, width=1000, sort_keys=False, allow_unicode=True)
        return f"  {self.option}: {text.removesuffix('...' + chr(10)).strip()}   ({self.why.replace('`', '')})"


@dataclass
class Recommendation:
    """A shipped configuration, `base`, and the `choices` that differ from it.

    Attributes:
        model: SANA, or one of `OTHERS`.
        trained: pictures that are trained on. prompts: lines to draw while it trains.
    """

    purpose: str
    resolution: int
    model: str = SANA
    trained: int = 0
    choices: list[Choice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    @property
    def base(self) -> str:
        """The shipped configuration that is changed."""
        if self.model != SANA:
            return self.models
        return {LORA: _ADAPTED, SCRATCH: _NEW}.get(self.purpose, self.models)

    @property
    def models(self) -> str:
        """The shipped configuration whose models are used; `base`, or another."""
        return MODELS[self.resolution] if self.model == SANA else OTHERS[self.model].file

    @cached_property
    def _tree(self) -> dict[str, Any]:
        return load_given(SHIPPED / f"{self.base}.yaml")[1].tree

    def add(self, option: str, value: Any, why: str) -> None:
        """Change an option, unless it has this value."""
        if value_at(self._tree, option) != value:
            self.choices.append(Choice(option, value, why))

    def value(self, option: str) -> Any:
        """Return what the written file says of an option."""
        chosen = [choice.value for choice in self.choices if choice.option == option]
        return chosen[-1] if chosen else value_at(self._tree, option)

    @property
    def is_mixed(self) -> bool:
        """Tell whether the models are of another file than the values."""
        return bool(value_at(self._tree, "data.resolution") != self.resolution)

    def override(self, overrides: tuple[str, ...]) -> None:
        """Take the options of `--set` (`a.b=c`) in place of the choices."""
        given = load_given(self.models, overrides)[1]
        for option in given.overridden:
            replaced = (option, "train.steps") if option == "train.epochs" else (option,)
            self.choices = [c for c in self.choices if not any(within(c.option, each) for each in replaced)]
            self.choices.append(Choice(option, value_at(given.tree, option), "as asked by --set"))

    @property
    def origin(self) -> str:
        """The shipped configurations that the file is made of, for people."""
        models = f" with the models of configs/{self.models}.yaml" if self.is_mixed else ""
        return f"from configs/{self.base}.yaml{models}"

    def file(self, command: str) -> str:
        """The file: the shipped configuration with what differs, each below its reason. command: that writes it."""
        head = [
            f"# {self.purpose} at {self.resolution} px, written by: {escaped(command)}",
            f"# {self.origin}.",
            "# Its head has expected figures. What init changed stands below its reason. A start, not an optimum;",
            "# sana-pipe config lists every option.",
        ]
        return "\n".join(head) + "\n\n" + self.text()

    def text(self) -> str:
        """The shipped file without its head, with all choices."""
        body = _body(self.base)
        if self.is_mixed:
            models = _body(self.models)
            for section in _OF_MODELS:
                body = body.replace(_section(section, body), _section(section, models))
        for choice in self.choices:
            body = edited(body, choice.option, choice.value, choice.why, _INSTEAD.get(choice.option))
        return body


def _body(name: str) -> str:
    """A shipped configuration without the comments at its head."""
    return (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8").partition("\n\n")[2]


def _section(name: str, text: str) -> str:
    """The lines of a top-level section, up to the next one."""
    return next(re.finditer(rf"^{name}:.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL))[0]


def models_of(model: str) -> str:
    """Return the shipped configuration of a model that pictures are looked at for."""
    return MODELS[max(MODELS)] if model == SANA else OTHERS[model].file


def recommend(
    facts: Facts, purpose: str | None = None, trigger: str | None = None, model: str = SANA
) -> Recommendation:
    """Choose everything.

    Args:
        purpose: of `PURPOSES`; None: LoRA, or full fine-tuning of `FULL_FROM` pictures and more; of another model than
            Sana what its file is for.
        trigger: the word for what all pictures show.
        model: SANA, or one of `OTHERS`.

    Raises:
        UserError: no pictures, too small ones, no captions where they are needed, or too little memory.
    """
    if not facts.pictures:
        raise UserError("there is no usable picture", fix="sana-pipe encode --data DIR --dry-run names the reasons")
    if model != SANA:
        return _of_another(facts, purpose, trigger, model)
    resolution, left_out = _resolution(facts, tuple(MODELS))
    why_small = "" if resolution == max(MODELS) else ": more than half of the pictures are small"
    chosen, why = _purpose(facts, purpose, resolution)
    if chosen == FULL and resolution == 1024 and _memory(FULL, 1024, facts) is None and _memory(FULL, 512, facts):
        resolution, left_out, why_small = 512, _enlarged(facts, 512, LARGEST), ": the 1.6B needs more memory"
    resolution = 512 if chosen == SCRATCH else resolution
    memory = _memory(chosen, resolution, facts)
    if memory is None:
        raise _too_little(chosen, facts)
    made = Recommendation(chosen, resolution, notes=[f"{chosen}: {why}"])
    _models(made, why_small)
    used = _data(made, facts, trigger, left_out)
    _training(made, facts, used, memory)
    _watching(made, facts, used)
    return made


def _of_another(facts: Facts, purpose: str | None, trigger: str | None, model: str) -> Recommendation:
    """`recommend` for a model of `OTHERS`."""
    family = OTHERS[model]
    if purpose not in (None, family.purpose):
        raise UserError(
            f"--model {model} has a configuration for --for {family.purpose} alone",
            fix=f"--for {family.purpose}, or configs/{family.file}.yaml as a start",
        )
    _, left_out = _resolution(facts, (family.resolution,))
    memory = _memory(family.purpose, family.resolution, facts, model)
    if memory is None:
        raise _too_little(family.purpose, facts, model)
    made = Recommendation(family.purpose, family.resolution, model, notes=[f"{family.purpose}: as --model {model} has"])
    used = _data(made, facts, trigger, left_out)
    _training(made, facts, used, memory)
    _watching(made, facts, used)
    return made


def _resolution(facts: Facts, choices: tuple[int, ...]) -> tuple[int, int]:
    """The resolution, the first of the choices for which enough pictures are sharp, and how many pictures are too small
    for it.

    Raises:
        UserError: all are.
    """
    for resolution in choices:
        sharp = len(facts.heights) - _enlarged(facts, resolution, SHARP)
        if 2 * sharp >= len(facts.heights) or resolution == min(choices):
            break
    left_out = _enlarged(facts, resolution, LARGEST)
    if left_out == facts.pictures:
        largest = int(np.argmax(facts.heights * facts.widths))
        raise UserError(
            f"all {facts.pictures} pictures are too small: the model draws {resolution} x {resolution} pixels or more",
            expected=f"at least {resolution / LARGEST:.0f} x {resolution / LARGEST:.0f} pixels",
            found=f"the largest has {facts.widths[largest]} x {facts.heights[largest]}",
            fix="use the originals, or enlarge them with a tool for upscaling",
        )
    return resolution, left_out


def _enlarged(facts: Facts, resolution: int, limit: float) -> int:
    """Count the pictures that must be enlarged by more than `limit` to cover their bucket of Sana's table."""
    if not len(facts.heights):
        return 0
    shapes = np.array(buckets.SANA_UNITS, np.int64) * resolution // buckets.UNITS_PER_SIDE
    nearest = buckets.nearest_all([(int(h), int(w)) for h, w in shapes], facts.heights, facts.widths)
    return int((buckets.upscale(facts.heights, facts.widths, shapes[nearest].T) > limit).sum())


def _purpose(facts: Facts, purpose: str | None, resolution: int) -> tuple[str, str]:
    if purpose is not None:
        return purpose, "as asked by --for"
    if facts.captioned < FULL_FROM:
        return LORA, (
            f"{facts.captioned:,} pictures have captions; full fine-tuning of fewer than {FULL_FROM:,} learns them by "
            "heart (--for full)"
        )
    if facts.memory_gib is None:
        return LORA, "there is no GPU here (--gpu NAME chooses for another machine, --for full trains the whole model)"
    if _memory(FULL, resolution, facts) is None:
        return LORA, "full fine-tuning needs more memory than there is (--for full names how much)"
    return FULL, f"{facts.captioned:,} pictures with captions, and {facts.all_gib:.1f} GiB of GPU memory (--for lora)"


def _memory(purpose: str, resolution: int, facts: Facts, model: str = SANA) -> Memory | None:
    rows = (row for row in MEMORY if (row.purpose, row.resolution, row.model) == (purpose, resolution, model))
    return next((row for row in rows if facts.shared_gib >= row.gib), None)


def _too_little(purpose: str, facts: Facts, model: str = SANA) -> UserError:
    rows = (row for row in MEMORY if (row.purpose, row.model) == (purpose, model))
    least = min(rows, key=lambda row: row.gib)
    name = MODELS[least.resolution] if model == SANA else OTHERS[model].file
    smaller = "--for lora, or more cards" if model == SANA else "more cards, or --model sana"
    names = {LORA: "a LoRA", FULL: "full fine-tuning", SCRATCH: "training from scratch"}
    return UserError(
        f"{names[purpose]} does not fit into {facts.gpus} x {facts.memory_gib:.1f} GiB",
        expected=f"{least.gib:g} GiB, of all cards together, for {name}, and "
        f"{OF_ANOTHER_CARD} GiB for each card but the first",
        fix="a card with more memory" if (purpose, model) == (LORA, SANA) else smaller,
    )


def _models(made: Recommendation, why_small: str) -> None:
    """The resolution and the precision of the models, where they are not those of the file."""
    if why_small and made.purpose != SCRATCH:
        made.notes.append(f"{made.models}{why_small}")
    if made.is_mixed:
        made.add("data.resolution", made.resolution, "what these weights draw")
        precision = load(SHIPPED / f"{made.models}.yaml").train.precision
        made.add("train.precision", precision, f"as in configs/{made.models}.yaml, for these weights")


def _data(made: Recommendation, facts: Facts, trigger: str | None, left_out: int) -> int:
    """Captions, and what is left out; returns how many pictures stay.

    Raises:
        UserError: pictures without captions, from which only a LoRA of one word can learn.
    """
    if left_out:
        reason = f"{left_out} of {facts.pictures} pictures would be enlarged by more than {LARGEST:g} times: left out"
        made.add("data.max_upscale", LARGEST, reason)
    lacking, first = facts.pictures - facts.captioned, False
    if trigger is None and 2 * facts.captioned < facts.pictures:
        if made.purpose != LORA:
            raise UserError(
                f"{lacking} of {facts.pictures} pictures have no caption: {made.purpose} training needs captions",
                fix="write them (docs/encoding.md), or --trigger WORD gives all pictures this one, or --for lora",
            )
        trigger = TRIGGER
        made.notes.append(
            f"most pictures have no caption: the trigger word is {TRIGGER!r} (--trigger WORD for another)"
        )
    used = facts.pictures - left_out
    if trigger is None:
        if lacking:
            used = max(1, used - lacking)
            made.notes.append(f"{lacking} pictures without a caption are left out (--trigger WORD gives them this one)")
    elif not facts.captioned:
        made.add("data.caption", trigger, "no picture has a caption: all get the trigger word")
    else:
        first = _contain(facts, trigger)
        if not first:
            made.add("data.caption_prefix", f"{trigger}, ", "the trigger word before every caption")
        if lacking:
            caption = f"{trigger}, a picture" if first else "a picture"
            made.add("data.caption", caption, f"for the {lacking} pictures without a caption")
    if facts.captions and 2 * sum(map(is_tags, facts.captions)) > len(facts.captions):
        keep: int | None = 0
        if trigger is not None:
            captions = tuple(filled(text, trigger) for text in facts.captions)
            if first or captions != facts.captions:  # the word is one of the tags
                keep = _place(replace(facts, captions=captions), trigger)
        made.add(
            "data.tags",
            {"shuffle": 4, "drop": 0.1 if keep is not None else 0.0, "keep": keep or 0},
            "the captions are lists of tags: other orders"
            + (
                " and missing tags are learned, too" if keep is not None else "; none is left out, nor the trigger word"
            ),
        )
        made.notes.append(
            "the captions are lists of tags; the model was trained on sentences, so sentences are learned faster"
        )
    made.prompts = _prompts(facts, trigger)
    return used


def _contain(facts: Facts, trigger: str) -> bool:
    """Return whether most captions have the word already."""
    return 2 * sum(has_words(text, trigger) for text in facts.captions) > len(facts.captions)


def _place(facts: Facts, trigger: str) -> int | None:
    """The number of tags up to the one with the word; None if it stands at no place of its own near the front."""
    tags = [re.split(r"[,\n，]", text) for text in facts.captions if has_words(text, trigger)]
    places = [next((n for n, tag in enumerate(some, 1) if has_words(tag, trigger)), 0) for some in tags]
    last = max(places, default=0)
    return last if 0 < last <= KEPT and min(places) == last else None


def is_tags(caption: str) -> bool:
    """Return whether a caption is a list of tags: four or more parts between commas, of two words or fewer on
    average."""
    parts = [part.split() for part in caption.split(",") if part.strip()]
    return len(parts) >= 4 and sum(map(len, parts)) <= 2 * len(parts)


def _prompts(facts: Facts, trigger: str | None) -> list[str]:
    """Up to `DRAWN` prompts: the trigger word in contexts, captions as they are trained on, one without either."""
    word = [] if trigger is None else [*(context.format(trigger) for context in TRIGGER_CONTEXTS), CONTROL]
    lines = [" ".join(text.split()) for text in facts.captions]
    prefix = "" if trigger is None or _contain(facts, trigger) else f"{trigger}, "
    captions = [with_prefix(line, prefix) for line in lines if line and not line.startswith("#")]
    return list(dict.fromkeys([*word, *captions]))[:DRAWN]


def _training(made: Recommendation, facts: Facts, pictures: int, memory: Memory) -> None:
    """Batch, steps and memory."""
    if made.purpose == FULL and made.model == SANA and pictures < SMALL_SET:
        for option, (value, why) in SMALL.items():
            made.add(option, value, why)
    trained = made.trained = max(1, round(pictures * (1 - _share(pictures, facts))))
    batch = made.value("bucket.batch")
    rounded = math.ceil(batch / facts.gpus) * facts.gpus
    if rounded != batch:
        made.choices = [choice for choice in made.choices if choice.option != "bucket.batch"]
        made.add("bucket.batch", rounded, f"{batch}, as a multiple of {facts.gpus} cards")
    steps, source = STEPS[made.purpose].of(trained, rounded), STEPS[made.purpose].source
    made.add("train.steps", steps, f"{steps * rounded / trained:,.0f} visits of each of {trained:,} pictures. {source}")
    warmup = min(made.value("train.optim.warmup_steps"), steps // 5)
    made.add("train.optim.warmup_steps", warmup, "a fifth of the steps")
    for option, setting in memory.settings.items():
        made.add(option, setting, f"{facts.all_gib:.1f} GiB of GPU memory: {memory.source}")
    if (visits := steps * rounded / trained) > 100 and made.purpose != LORA:
        made.notes.append(
            f"each picture is seen {visits:,.0f} times: the model learns them by heart; more pictures help"
        )
    made.add("train.output", f"./runs/{made.purpose}", "checkpoints and metrics")


def _share(pictures: int, facts: Facts) -> float:
    share = next((share for least, share in HELDOUT if pictures >= least), 0.0)
    return 0.0 if facts.held_out == 0 else share


def _watching(made: Recommendation, facts: Facts, pictures: int) -> None:
    """Validation and pictures while it trains."""
    every, share = made.value("train.save_every"), _share(pictures, facts)
    if share:
        reason = f"about {pictures - made.trained} pictures for the validation; our choice"
        made.add("bucket.heldout", share, reason)
        made.add("train.validation", {"every": every}, "the loss on the held-out pictures, at each checkpoint")
    else:
        few = f"fewer than {HELDOUT[-1][0]} pictures"
        why = few if pictures < HELDOUT[-1][0] else "no digest is among those held out"
        made.notes.append(f"no validation: {why}")
        if made.value("train.validation") is not None:
            made.add("bucket.heldout", 0.0, f"nothing is held out: {why}")
            made.add("train.validation", None, f"nothing is held out: {why}")
    if not made.prompts:
        made.add("train.pictures", None, "there are no prompts")
