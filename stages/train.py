"""Stage `train`: a snapshot and a configuration in, a run directory with checkpoints out.

What: opens the snapshot, prints its size, decides what is `auto`, and hands the trainer a `Task` that makes the loader.
Why apart from the trainer: the trainer knows no cache, this file no optimizer. No encoder is imported here.
Price: a snapshot must exist; `sana-pipe encode` and `sana-pipe bucket` make it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipeline.cache.root import Cache
from pipeline.cache.snapshot import Snapshot
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.launch import Launch, detect, resolve_device
from pipeline.loader import shard_prefetch
from pipeline.loader.loader import Loader, LoaderSettings, State
from pipeline.loader.validation_loader import ValidationLoader
from pipeline.parallel.mesh import Layout
from pipeline.planning import auto
from pipeline.planning.expect import expect
from pipeline.planning.predict import Data
from pipeline.retrying import TIMEOUT_S
from pipeline.snapshots import heldout
from pipeline.training import checkpoint
from pipeline.training.build import architecture_of, with_residual
from pipeline.training.checkpoint import Document
from pipeline.training.expectation import Expected
from pipeline.training.task import Context, Report, Task
from pipeline.training.trainer import fit


def run(
    config: Config,
    snapshot: str | None = None,
    resume: str | Path | None = None,
    quarantine: str | Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Report:
    """Train on a snapshot.

    Args:
        snapshot: a name, an id or a prefix of one; None is the newest, for a resumed run the one it began with.
        resume: None, `auto` or a checkpoint folder.
        quarantine: file that lists unreadable records; other samples then substitute for theirs.
        say: prints one line (default: print, flushed); called on the first process only.

    Raises:
        UserError: no snapshot, one that does not fit the model or that `gc` elsewhere may remove, a run directory in
            use, and whatever `pipeline.training.checks` refuses.
    """
    launch = detect()
    speak = say or (lambda line: print(line, flush=True))
    cache = Cache.of(config)
    resumed = checkpoint.document_of(config, resume)
    opened = cache.open_snapshot(snapshot or (resumed.state.snapshot if resumed is not None else None))
    if launch.is_main:
        samples = sum(bucket.samples for bucket in opened.buckets)
        speak(f"snapshot {opened.id[:12]}: {samples} samples in {len(opened.buckets)} buckets")
        if (warning := shard_prefetch.advice(opened)) is not None:
            speak(warning)
    config, part = _heldout(config, cache, opened, resumed, speak if launch.is_main else lambda line: None)
    data, device = Data.of(config, opened), resolve_device(config.train.device, launch)
    earlier = None if resumed is None else resumed.config
    if config.train.undecided:
        shape = architecture_of(config, task(config, opened, launch))
        config, lines = auto.decide(config, shape, data, auto.present(device, launch), earlier)
        for line in lines if launch.is_main else []:
            speak(line)

    def expected(context: Context) -> Expected | None:
        as_begun = with_residual(context.config, earlier)
        return expect(as_begun, lambda: architecture_of(as_begun, context.task), data, device, launch, context.log)

    def accepted() -> None:
        cache.keep(opened.id)
        if part is not None:
            heldout.check_disjoint(opened, part)
            cache.keep(part.id)

    return fit(
        config,
        task(config, opened, launch, quarantine, part),
        launch,
        resume=resume,
        say=speak,
        accepted=accepted,
        expect=expected,
    )


def _heldout(
    config: Config, cache: Cache, snapshot: Snapshot, resumed: Document | None, log: Callable[[str], None]
) -> tuple[Config, Snapshot | None]:
    """The snapshot to validate on, if any, and the configuration with its id. A resumed run keeps its choice."""
    validation = config.train.validation
    if validation is None:
        if (there := heldout.find(cache, snapshot)) is not None:
            log(f"note: snapshot {there[:12]} was held out of this one; --set train.validation={{}} validates on it")
        return config, None
    name = validation.snapshot
    if name is None and resumed is not None and resumed.state.snapshot == snapshot.id:
        name = (resumed.config["train"].get("validation") or {}).get("snapshot")
    name = name or heldout.find(cache, snapshot)
    if name is None:
        raise ConfigError(
            f"train.validation: nothing was held out of snapshot {snapshot.id[:12]}, as far as names show",
            fix="sana-pipe bucket --set bucket.heldout=0.01, or --set train.validation.snapshot=NAME, or --set "
            "train.validation=null",
        )
    part = cache.open_snapshot(name)
    heldout.check(snapshot, part)
    log(f"validation: {min(len(part), validation.samples)} of {len(part)} samples of snapshot {part.id[:12]}")
    validation = validation.model_copy(update={"snapshot": part.id})
    return config.model_copy(update={"train": config.train.model_copy(update={"validation": validation})}), part


def task(
    config: Config,
    snapshot: Snapshot,
    launch: Launch,
    quarantine: str | Path | None = None,
    part: Snapshot | None = None,
) -> Task:
    """The data of a run on `snapshot`. part: the held-out samples that it is validated on."""
    train = config.train

    def check(layout: Layout) -> None:
        if quarantine is not None and layout.model_parallel_size > 1:
            raise ConfigError(
                f"--quarantine with train.parallel.tp_size = {layout.tp} and pp_size = {layout.pp}: processes that "
                "share a batch each read it themselves; if only one of them finds a record unreadable, they go on with "
                "different samples",
                fix="train without --quarantine: a bad record then stops the run and is named (sana-pipe verify "
                "--repair)",
            )

    def settings(layout: Layout, start: int, stop: int) -> LoaderSettings:
        return LoaderSettings(
            seed=train.seed,
            phase=train.phase,
            rank=layout.data_rank(launch.rank),
            world=layout.data_world,
            microbatch=train.microbatch,
            caption_drop=train.caption_drop,
            null_mask=train.null_mask,
            prefetch=train.prefetch,
            threads=train.loader_threads,
            start_step=start,
            stop_step=stop,
            prefetch_mib=train.prefetch_mib,
            text=train.text,
            length_window=train.length_window,
            pin=resolve_device(train.device, launch).type == "cuda",
            timeout_s=config.patience_s + 2 * TIMEOUT_S,  # readers of a store give up first
            quarantine=quarantine,
        )

    def validation(layout: Layout) -> ValidationLoader:
        assert part is not None and train.validation is not None
        training, seed = settings(layout, 0, 0), train.validation.seed
        fixed = replace(training, seed=seed, phase=0, caption_drop=0.0, length_window=0, quarantine=None)
        return ValidationLoader(part, fixed, train.validation.samples)

    return Task(
        origin=State(snapshot.id, train.seed, train.phase, 0, train.length_window),
        batch=max(bucket.batch for bucket in snapshot.buckets),
        channels=snapshot.latent_recipe.channels,
        text_width=snapshot.text_recipe.width,
        sample_size=config.data.resolution // snapshot.latent_recipe.compression,
        loader=lambda layout, start, stop: Loader(snapshot, settings(layout, start, stop)),
        batches={f"{bucket.height}x{bucket.width}": bucket.batch for bucket in snapshot.buckets},
        names=snapshot.names,
        validation=None if part is None else validation,
        check=check,
    )
