"""Stage `train`: a snapshot and a configuration in, a run directory with checkpoints out.

What: opens the snapshot, prints its size, decides what is `auto`, and hands the trainer a `Task` that makes the loader.
Why apart from the trainer: the trainer knows no cache, this file no optimizer. No encoder is imported here.
Price: a snapshot must exist; `sana-pipe encode` and `sana-pipe bucket` make it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.cache.root import Cache
from pipeline.cache.snapshot import Snapshot
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.launch import Launch, detect, resolve_device
from pipeline.loader import shard_prefetch
from pipeline.loader.loader import Loader, LoaderSettings, State
from pipeline.loader.schedule import Schedule
from pipeline.parallel.mesh import Layout
from pipeline.planning import auto
from pipeline.planning.expect import expect
from pipeline.planning.predict import Data
from pipeline.retrying import TIMEOUT_S
from pipeline.training import checkpoint
from pipeline.training.build import architecture_of, with_residual
from pipeline.training.expectation import Expected
from pipeline.training.task import Context, Report, Task
from pipeline.training.trainer import fit


def run(
    config: Config,
    snapshot: str | None = None,
    resume: str | Path | None = None,
    quarantine: str | Path | None = None,
    say: Callable[[str], None] | None = None,
    begin: str | Path | None = None,
) -> Report:
    """Train on a snapshot.

    Args:
        snapshot: a name, an id or a prefix of one; None is the newest, for a resumed run the one it began with.
        resume: None, `auto` or a checkpoint folder.
        quarantine: file that lists unreadable records; other samples then substitute for theirs.
        say: prints one line (default: print, flushed); called on the first process only.
        begin: a checkpoint or run directory that a new run begins from (`--from`); `train.phase` follows its phase
            unless the configuration gives one.

    Raises:
        UserError: no snapshot, one that does not fit the model or that `gc` elsewhere may remove, a run directory in
            use, and whatever `pipeline.training.checks` refuses.
    """
    launch = detect()
    speak = say or (lambda line: print(line, flush=True))
    cache = Cache.of(config)
    resumed = checkpoint.origin(Path(config.train.output), resume, begin)
    continued = None if resumed is None or resumed.begins else resumed.document
    if resumed is not None and "phase" not in config.train.model_fields_set:
        config = config.model_copy(update={"train": config.train.model_copy(update={"phase": resumed.phase})})
    opened = cache.open_snapshot(snapshot or (None if continued is None else continued.state.snapshot))
    if launch.is_main:
        samples = sum(bucket.samples for bucket in opened.buckets)
        speak(f"snapshot {opened.id[:12]}: {samples} samples in {len(opened.buckets)} buckets")
        latest = cache.snapshot_of("latest")
        if continued is not None and snapshot is None and latest not in (None, opened.id):
            speak(
                f"the run began with this snapshot and keeps it; the newest is {str(latest)[:12]}: to train on that, "
                f"sana-pipe train {checkpoint.beginning(Path(config.train.output))}"
            )
        if (warning := shard_prefetch.advice(opened)) is not None:
            speak(warning)
    if config.train.epochs is not None:
        config = _with_steps(config, opened)
        if launch.is_main:
            speak(f"{config.train.steps} steps: train.epochs of this snapshot")
    data, device = Data.of(config, opened), resolve_device(config.train.device, launch)
    earlier = None if resumed is None else resumed.document.config
    if config.train.undecided:
        shape = architecture_of(config, task(config, opened, launch))
        as_begun = None if continued is None else continued.config
        config, lines = auto.decide(config, shape, data, auto.present(device, launch), as_begun)
        for line in lines if launch.is_main else []:
            speak(line)

    def expected(context: Context) -> Expected | None:
        decided = with_residual(context.config, earlier)
        return expect(decided, lambda: architecture_of(decided, context.task), data, device, launch, context.log)

    return fit(
        config,
        task(config, opened, launch, quarantine),
        launch,
        resume=resume,
        begin=begin,
        say=speak,
        accepted=lambda: cache.keep(opened.id),
        expect=expected,
    )


def _with_steps(config: Config, snapshot: Snapshot) -> Config:
    """The configuration with the steps of `train.epochs` on a snapshot.

    Raises:
        ConfigError: in so few epochs no bucket fills a batch.
    """
    train = config.train
    assert train.epochs is not None
    steps = Schedule.of(snapshot.head, seed=train.seed, phase=train.phase).steps_upto(train.epochs)
    if not steps:
        raise ConfigError(
            f"train.epochs = {train.epochs} of snapshot {snapshot.id[:12]} are no step: no batch fills in them",
            fix="more train.epochs, train.steps instead, or a snapshot with a smaller bucket.batch",
        )
    return config.model_copy(update={"train": train.model_copy(update={"steps": steps, "epochs": None})})


def task(config: Config, snapshot: Snapshot, launch: Launch, quarantine: str | Path | None = None) -> Task:
    """The data of a run on `snapshot`."""
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

    def loader(layout: Layout, start: int, stop: int) -> Loader:
        return Loader(
            snapshot,
            LoaderSettings(
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
            ),
        )

    return Task(
        origin=State(snapshot.id, train.seed, train.phase, 0, train.length_window),
        batch=max(bucket.batch for bucket in snapshot.buckets),
        channels=snapshot.latent_recipe.channels,
        text_width=snapshot.text_recipe.width,
        sample_size=config.data.resolution // snapshot.latent_recipe.compression,
        loader=loader,
        batches={f"{bucket.height}x{bucket.width}": bucket.batch for bucket in snapshot.buckets},
        names=snapshot.names,
        check=check,
    )
