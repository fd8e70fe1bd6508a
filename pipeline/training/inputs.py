"""Read what a run takes from the cache: its snapshot, held-out samples, prompts to draw, rows of prompts to preserve.

`find_inputs` chooses them and writes their ids into the configuration; a resumed run keeps its choice. `task_of` makes
of them the `TrainingTask` that the trainer is handed, so that the rest of this room knows no snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from pipeline.cache import prompts as prompt_sets
from pipeline.cache.cache import CAPTIONS, Cache
from pipeline.cache.prompts import PromptSet
from pipeline.cache.snapshot import Snapshot
from pipeline.config import Config, PicturesConfig
from pipeline.errors import CacheError, ConfigError
from pipeline.launch import Launch, resolve_device
from pipeline.loader.loader import Loader, LoaderSettings, LoaderState, bf16
from pipeline.loader.schedule import Schedule
from pipeline.loader.validation_loader import ValidationLoader
from pipeline.options import value_at
from pipeline.parallel.mesh import Layout
from pipeline.retrying import TIMEOUT_S
from pipeline.signals.control import ControlRecipe
from pipeline.signals.latent import LatentRecipe
from pipeline.signals.text import TextRecipe
from pipeline.snapshots import heldout
from pipeline.sources import caption_rules
from pipeline.training import checkpoint
from pipeline.training.assemble import recipe_of
from pipeline.training.task import DrawnPrompts, Log, TrainingTask

_MANY = 1000
"""Epochs that the mean length of an epoch is taken from."""
_CAPTIONS = 8
"""Captions of the snapshot that are drawn."""
THREADS = 2
"""Threads of each process that read batches ahead."""
PREFETCH_MIB = 128
"""MiB of batches that each process reads ahead."""
VALIDATION_SEED = 0
"""Seed of the choice of held-out samples, of their captions and noise; not `train.seed`, so that runs can be
compared."""


@dataclass(frozen=True)
class Inputs:
    """The parts of the cache that a run reads.

    Attributes:
        heldout: the samples that it is validated on. old_heldout: those of them that an earlier run was validated on,
            too. prompts: sets of the pictures that it draws. preserved: text rows of `train.preserve.prompt`. phase:
            see `checkpoint.Resumed`.
    """

    snapshot: Snapshot
    heldout: Snapshot | None = None
    old_heldout: Snapshot | None = None
    prompts: Sequence[PromptSet] = ()
    preserved: list[np.ndarray] = field(default_factory=list)
    phase: int = 0

    def keep(self, cache: Cache) -> None:
        """Keep the snapshots from `gc`.

        Raises:
            UserError: training and held-out samples overlap.
        """
        cache.keep(self.snapshot.id)
        if self.heldout is not None:
            heldout.check_disjoint(self.snapshot, self.heldout)
            cache.keep(self.heldout.id)
        if self.old_heldout is not None:
            cache.keep(self.old_heldout.id)


_UNUSED = {"mask": "--set 'train.mask={}'", "control": "train.controlnet (docs/guides/controlnet.md)"}
"""Records that somebody made for a training, and the setting that uses them."""


def unused_records(config: Config, snapshot: Snapshot) -> Iterator[str]:
    """Notes on masks and controls of a snapshot that the configuration's training does not use."""
    asked = recipe_of(config.train).pictures
    for kind, option in _UNUSED.items():
        if kind in snapshot.pictures and kind not in asked:
            yield f"note: the snapshot has {kind} records, and this run does not use them; {option} does"


def find_inputs(
    config: Config, cache: Cache, snapshot: Snapshot, resumed: checkpoint.Resumed | None, log: Log
) -> tuple[Config, Inputs]:
    """The inputs of a run, and its configuration with their ids. A resumed run keeps its choice."""
    kept = None if resumed is None or resumed.begins else resumed
    for note in unused_records(config, snapshot):
        log(note)
    config, part = _heldout(config, cache, snapshot, kept, log)
    old = _old_heldout(cache, part, resumed, log)
    config, prompts = _prompts(config, cache, snapshot, kept, part, log)
    phase = 0 if resumed is None else resumed.phase
    return config, Inputs(snapshot, part, old, prompts, _preserved(config, cache, snapshot), phase)


def _heldout(
    config: Config, cache: Cache, snapshot: Snapshot, kept: checkpoint.Resumed | None, log: Log
) -> tuple[Config, Snapshot | None]:
    """The snapshot to validate on, if any, and the configuration with its id."""
    validation = config.train.validation
    if validation is None:
        if (there := heldout.find(cache, snapshot)) is not None:
            log(f"note: snapshot {there[:12]} was held out of this one; --set train.validation={{}} validates on it")
        return config, None
    name = validation.snapshot or _began_with(kept, "validation.snapshot") or heldout.find(cache, snapshot)
    if name is None:
        raise ConfigError(
            f"train.validation: nothing was held out of snapshot {snapshot.id[:12]}, as far as names show",
            fix=f"{_hold_out(snapshot)} (a larger share if there are few pictures), or --set "
            "train.validation.snapshot=NAME, or --set train.validation=null",
        )
    part = cache.open_snapshot(name)
    heldout.check(snapshot, part)
    log(f"validation: {min(len(part), validation.samples)} of {len(part)} samples of snapshot {part.id[:12]}")
    if leaked := _leaked(snapshot, part):
        log(
            f"warning: {leaked} of them look like a sample that is trained on, so the loss on them is not of unseen "
            "pictures; sana-pipe bucket --set bucket.heldout=0.01 holds out a part without copies"
        )
    return config.with_train(validation=validation.model_copy(update={"snapshot": part.id})), part


def _leaked(snapshot: Snapshot, part: Snapshot) -> int:
    """Samples of a held-out part that look like one of the training, as far as `bucket` counted them."""
    return (snapshot.head.leaked or {}).get(part.id, 0)


def _hold_out(snapshot: Snapshot) -> str:
    """The command that makes a held-out part; for a snapshot that had one, of the same pictures."""
    side = snapshot.head.policies.heldout
    return f"sana-pipe bucket --set bucket.heldout={0.01 if side is None else side.share}"


def _old_heldout(cache: Cache, part: Snapshot | None, resumed: checkpoint.Resumed | None, log: Log) -> Snapshot | None:
    """Return what the run that this one began from was validated on, if that is another snapshot."""
    then = None if resumed is None else (resumed.began_from or {}).get("heldout")
    if part is None or then is None:
        return None
    try:
        old = cache.open_snapshot(then)
    except CacheError as error:
        log(f"note: old and new held-out samples are not told apart: {error.line}")
        return None
    return None if old.id == part.id else old


def _began_with(resumed: checkpoint.Resumed | None, option: str) -> str | None:
    """An option below `train` of the run that is resumed or begun from, if any."""
    return None if resumed is None else value_at(resumed.document.config["train"], option)


def _prompts(
    config: Config, cache: Cache, snapshot: Snapshot, kept: checkpoint.Resumed | None, part: Snapshot | None, log: Log
) -> tuple[Config, Sequence[PromptSet]]:
    """The prompt sets to draw, if any, and the configuration with the id of the set, or `CAPTIONS`."""
    pictures, recipe = config.train.pictures, snapshot.recipe(TextRecipe)
    if pictures is None:
        return config, ()
    is_controlled = config.train.controlnet is not None
    name = pictures.prompts or _began_with(kept, "pictures.prompts")
    if is_controlled or (name is None and prompt_sets.newest(cache, prompt_sets.NAME) is None):
        name = CAPTIONS
    if name != CAPTIONS:
        sets = [prompt_sets.open_prompts(cache, name, recipe)]
        name, counted = sets[0].id, f"{len(sets[0])} prompts of set {sets[0].id[:12]}"
    elif is_controlled:
        sets = [_controlled(pictures, part or snapshot)]
        counted = f"{len(sets[0])} captions and controls of samples of snapshot {(part or snapshot).id[:12]}"
    else:
        sets = [prompt_sets.of_snapshot(snapshot, _CAPTIONS)]
        if (trigger := prompt_sets.newest(cache, prompt_sets.TRIGGER)) is not None and trigger.recipe == recipe:
            sets.append(trigger)
        counted = f"{len(sets[0])} captions of the snapshot" + "".join(f", {len(more)} prompts" for more in sets[1:])
    if not any(map(len, sets)):
        log("note: no pictures are drawn: all captions are empty (sana-pipe encode --prompts FILE has others)")
        return config.with_train(pictures=None), ()
    log(f"pictures: {counted}, every {pictures.every} steps")
    return config.with_train(pictures=pictures.model_copy(update={"prompts": name})), sets


def _controlled(pictures: PicturesConfig, snapshot: Snapshot) -> PromptSet:
    """Captions that are drawn with the controls of their samples, all of one bucket."""
    _check_kinds([snapshot], [ControlRecipe.kind])
    size, buckets = pictures.size, snapshot.buckets
    fitting = [n for n, each in enumerate(buckets) if each.samples and size in (None, (each.height, each.width))]
    if not fitting:
        raise ConfigError(
            "train.pictures: a ControlNet's pictures have the shape of their controls, which is that of a bucket",
            expected=", ".join(f"{bucket.height}x{bucket.width}" for bucket in buckets),
            found="x".join(map(str, size or ())),
            fix="--set train.pictures.size=null",
        )
    number = max(fitting, key=lambda number: buckets[number].samples)
    first = snapshot.row(number, 0)
    return prompt_sets.of_snapshot(snapshot, _CAPTIONS, range(first, first + buckets[number].samples))


def _preserved(config: Config, cache: Cache, snapshot: Snapshot) -> list[np.ndarray]:
    """Text rows of `train.preserve.prompt`."""
    recipe, found = snapshot.recipe(TextRecipe), []
    for prompt in [] if config.train.preserve is None else config.train.preserve.prompts:
        rows = prompt_sets.find_rows(cache, recipe, prompt, caption_rules.normalise)
        if rows is None:
            raise ConfigError(
                f"train.preserve.prompt: the cache holds no record of {prompt!r} by the snapshot's text recipe",
                fix="sana-pipe encode --prompts FILE --prompts-name preserve, with these prompts as lines of FILE",
            )
        found.append(rows)
    return found


def _check_kinds(snapshots: Sequence[Snapshot], kinds: Sequence[str]) -> None:
    """Refuse snapshots without the further pictures that a recipe reads."""
    for snapshot in snapshots:
        if lacking := [kind for kind in kinds if kind not in snapshot.pictures]:
            raise ConfigError(
                f"snapshot {snapshot.id[:12]} has no {' or '.join(lacking)} records, which this training reads",
                found=", ".join(snapshot.pictures),
                fix=f"set data.pictures.{lacking[0]}, then sana-pipe encode and sana-pipe bucket",
            )


def task_of(config: Config, inputs: Inputs, launch: Launch, quarantine: str | Path | None = None) -> TrainingTask:
    """The data of a run."""
    snapshot, part = inputs.snapshot, inputs.heldout
    train, kinds = config.train, recipe_of(config.train).pictures

    def check(layout: Layout) -> None:
        _check_kinds([snapshot] if part is None else [snapshot, part], kinds)
        if quarantine is not None and layout.model_parallel_size > 1:
            raise ConfigError(
                f"--quarantine with train.parallel.tp_size = {layout.tp} and pp_size = {layout.pp}: "
                "processes that share a batch each read it themselves; if only one of them finds a "
                "record unreadable, they go on with different samples",
                fix="train without --quarantine: a bad record then stops the run and is named (sana-pipe verify "
                "--repair)",
            )

    def settings(layout: Layout, start: int, stop: int) -> LoaderSettings:
        return LoaderSettings(
            seed=train.seed,
            phase=inputs.phase,
            rank=layout.data_rank(launch.rank),
            world=layout.data_world,
            microbatch=train.microbatch,
            caption_drop=train.caption_drop,
            prefetch=None,
            threads=THREADS,
            start_step=start,
            stop_step=stop,
            prefetch_mib=PREFETCH_MIB,
            text=train.text or "padded",
            pictures=kinds,
            length_window=train.length_window,
            pin=resolve_device(train.device, launch).type == "cuda",
            timeout_s=config.patience_s + 2 * TIMEOUT_S,  # readers of a store give up first
            quarantine=quarantine,
        )

    def validation(layout: Layout) -> ValidationLoader:
        assert part is not None and train.validation is not None
        training = settings(layout, 0, 0)
        fixed = replace(training, seed=VALIDATION_SEED, phase=0, caption_drop=0.0, length_window=0, quarantine=None)
        return ValidationLoader(part, fixed, train.validation.samples)

    drawn = _pictures(config, inputs) if inputs.prompts else None
    return TrainingTask(
        first_state=LoaderState(snapshot.id, train.seed, inputs.phase, 0, train.length_window),
        channels=snapshot.recipe(LatentRecipe).channels,
        text_width=snapshot.recipe(TextRecipe).width,
        sample_size=config.data.resolution // snapshot.recipe(LatentRecipe).compression,
        loader=lambda layout, start, stop: Loader(snapshot, settings(layout, start, stop)),
        batches={f"{bucket.height}x{bucket.width}": bucket.batch for bucket in snapshot.buckets},
        names=snapshot.names,
        epoch_steps=Schedule.of(snapshot.head, seed=train.seed, phase=inputs.phase).steps_upto(_MANY) / _MANY,
        validation=None if part is None else validation,
        leaked=0 if part is None else _leaked(snapshot, part),
        old_samples=None if inputs.old_heldout is None else np.concatenate([*inputs.old_heldout.sample_ids()]),
        pictures=drawn,
        preserved=[bf16(rows) for rows in inputs.preserved],
        patience_s=config.patience_s,
        check=check,
    )


def _pictures(config: Config, inputs: Inputs) -> DrawnPrompts:
    settings, sets = config.train.pictures or PicturesConfig(), inputs.prompts
    recipe, drawn_from = inputs.snapshot.recipe(LatentRecipe), inputs.heldout or inputs.snapshot
    places = [(prompts, number) for prompts in sets for number in range(len(prompts))]

    def rows(number: int) -> torch.Tensor:
        prompts, place = places[number]
        return bf16(prompts.rows(place))

    def null() -> tuple[torch.Tensor, torch.Tensor]:
        rows, mask = sets[0].null()
        return bf16(rows), torch.from_numpy(mask)

    height, width = settings.size or (config.data.resolution, config.data.resolution)
    drawn = DrawnPrompts(
        texts=tuple(text for prompts in sets for text in prompts.texts),
        rows=rows,
        null=null,
        height=height,
        width=width,
        compression=recipe.compression,
        names={
            "latent_recipe": recipe.id,
            "latent": recipe.values(),
            "prompt_set": "+".join(prompts.id for prompts in sets),
        },
    )
    if config.train.controlnet is None:
        return drawn
    samples = [drawn_from.sample(row) for row in sets[0].samples]
    bucket = drawn_from.buckets[samples[0].bucket]
    controls = {"snapshot": drawn_from.id, "samples": [sample.sample_id for sample in samples]}
    return replace(
        drawn,
        height=bucket.height,
        width=bucket.width,
        names={**drawn.names, "controls": controls},
        control=lambda number: bf16(drawn_from.picture(samples[number], ControlRecipe.kind)),
    )
