"""The command line: `sana-pipe encode | bucket | train | export | sample | demo`.

What: parses options, reads the configuration, calls one stage. Stages are imported inside their command, so that
`sana-pipe train` loads neither an encoder nor diffusers, and `--help` answers at once.
Why the errors are caught here and nowhere else: a `UserError` is printed without a traceback and ends with its own
exit code, and so is what the file system answers to a path that may not be used (2); anything else is a defect and
keeps its traceback. Ctrl-C ends with 130.
Price: an option that belongs to the configuration has no flag of its own; `--set a.b=c` reaches every one that the
command reads.
"""

from __future__ import annotations

import errno
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from pipeline import __version__
from pipeline.errors import EXIT_CODES, UserError
from pipeline.processes import allow_many_files, run_and_exit

if TYPE_CHECKING:
    from pipeline.config import Config

FIRST_S = 3.0
"""How long a process that is not the first waits before it prints an error: launchers end it within that time."""
INTERRUPTED = 130  # what shells report for a process that SIGINT ended
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}
"""What a file system says of a path that a person gave, whatever the command wanted to do there."""

Command = TypeVar("Command", bound=Callable[..., Any])


class _Command(click.Command):
    """Says in its help which exit codes it has."""

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        known = [
            (str(code), meaning)
            for code, (meaning, commands) in EXIT_CODES.items()
            if not commands or self.name in commands or self.name == "demo"
        ]
        with formatter.section("Exit codes"):
            formatter.write_dl(known)


class _Group(_Command, click.Group):
    command_class = _Command


_Group.group_class = _Group


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="sana-pipe")
def cli() -> None:
    """Precompute latents and text embeddings once, then train Sana without the encoders.

    \b
    sana-pipe check                 are the models there, and do they fit
    sana-pipe encode --data DIR     pictures and captions -> cache
    sana-pipe bucket                cache -> a snapshot of resolution buckets
    sana-pipe train                 snapshot -> checkpoints
    sana-pipe sample, export        checkpoint -> pictures, a SanaPipeline folder
    """


def _configured(command: Command) -> Command:
    """Adds the options that every stage has."""
    for option in (
        click.option(
            "--set",
            "overrides",
            metavar="A.B=C",
            multiple=True,
            help="Override one key of the configuration; may be repeated.",
        ),
        click.option(
            "--config",
            "config_path",
            metavar="FILE",
            help="Default: ./sana-pipe.yaml if there is one, else the shipped sana_1600m_1024.",
        ),
    ):
        command = option(command)
    return command


def _load(config_path: str | None, overrides: Sequence[str], *mode: str) -> Config:
    """`mode`: the options that decide what the command does, as in `pipeline.config.READS`."""
    from pipeline.config import load

    words = click.get_current_context().command_path.split()[1:]
    return load(config_path, list(overrides), " ".join([*words, *mode]))


@cli.command()
@_configured
@click.option(
    "--data",
    required=True,
    metavar="PATH|URL",
    help="A folder of pictures, tars, parquet files or a listing (.jsonl, .csv), or a pattern such as "
    "'s3://bucket/shard-{0000..0099}.tar'.",
)
@click.option(
    "--format",
    type=click.Choice(["folder", "webdataset", "wids", "parquet", "jsonl", "csv"]),
    help="What --data is. Default: seen from what is there.",
)
@click.option("--source-name", metavar="NAME", help="Name of this source in the cache. Default: the folder's name.")
@click.option(
    "--reassign", metavar="FILE", help="Encode these pictures for other buckets, too; `bucket` writes such a list."
)
@click.option("--rehash", is_flag=True, help="Read every file again instead of trusting size and mtime.")
@click.option("--shrink", is_flag=True, help="The source may have lost more than encode.max_shrink of its pictures.")
@click.option(
    "--text-mode",
    type=click.Choice(["auto", "exact"]),
    help="text.mode: `auto` runs the instruction once for all captions and checks itself, `exact` is the reference.",
)
@click.option("--task-index", type=click.IntRange(min=0), help="This worker among --task-count (job arrays).")
@click.option("--task-count", type=click.IntRange(min=1), help="How many workers share the work.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="ray: hand the units out on the Ray cluster of RAY_ADDRESS, or on a local one.",
)
@click.option("--dry-run", is_flag=True, help="Write nothing: say what there is to do, its bytes and its time.")
@click.option("--probe/--no-probe", default=True, help="Whether --dry-run times the encoders (about a minute).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout at the end; lines go to stderr.")
def encode(
    config_path: str | None,
    overrides: tuple[str, ...],
    data: str,
    format: str | None,
    source_name: str | None,
    reassign: str | None,
    rehash: bool,
    shrink: bool,
    text_mode: str | None,
    task_index: int | None,
    task_count: int | None,
    engine: str,
    dry_run: bool,
    probe: bool,
    as_json: bool,
) -> Any:
    """Encode pictures and captions into the cache; what is there already is not encoded again.

    SIGTERM or SIGUSR1: the unit in hand is finished within encode.grace_s or dropped, and the exit code is 0; run the
    same command again to continue.

    Encoding waits for space as long as encode.low_disk_wait_s says; --dry-run ends with 6 if there will not be enough.
    """
    if (task_index is None) != (task_count is None):
        raise click.UsageError("--task-index and --task-count belong together")
    if task_index is not None and task_count is not None and task_index >= task_count:
        raise click.UsageError(f"--task-index {task_index} must be below --task-count {task_count}")
    if dry_run and reassign is not None:
        raise click.UsageError("--dry-run tells of the pictures' own buckets only; leave --reassign out")
    own = [*([f"text.mode={text_mode}"] if text_mode else []), *(["encode.max_shrink=1"] if shrink else [])]
    config = _load(config_path, (*overrides, *own), *(["--engine ray"] if engine == "ray" else []))
    from stages import encode as stage

    options: dict[str, Any] = {
        "data": data,
        "source_name": source_name,
        "rehash": rehash,
        "task_index": task_index,
        "task_count": task_count,
        "format": format,
        "engine": engine,
        "as_json": as_json,
    }
    if dry_run:
        return stage.dry_run(config, probe=probe, **options)
    return stage.run(config, reassign=reassign, **options)


@cli.command()
@_configured
@click.option("--name", metavar="NAME", help="Name for the snapshot. Default: only its id.")
@click.option("--cache", "caches", multiple=True, metavar="DIR", help="Another cache to use; adds to bucket.caches.")
@click.option("--dry-run", is_flag=True, help="Report what would be in it, and write nothing.")
@click.option(
    "--pack",
    is_flag=True,
    help="Then copy its records into joint shards in a shuffled order, for training from object storage.",
)
@click.option("--snapshot", metavar="NAME|ID", help="With --pack: pack this snapshot; make no other one.")
@click.option("--latest", is_flag=True, help="With --pack: the packed snapshot becomes the newest.")
@click.option("--move", is_flag=True, help="Let NAME point to it though it points to another snapshot.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def bucket(
    config_path: str | None,
    overrides: tuple[str, ...],
    name: str | None,
    caches: tuple[str, ...],
    dry_run: bool,
    pack: bool,
    snapshot: str | None,
    latest: bool,
    move: bool,
    as_json: bool,
) -> Any:
    """Join latents and captions into an immutable snapshot, grouped by resolution.

    Which samples (filters, weights, duplicates, held-out part, subset) and how they are batched: the section `bucket`
    of the configuration. Several processes or nodes may run it with --pack at the same time: they share the copying.
    With --pack the name is that of the packed snapshot (default: ID.packed), and `latest` stays with what was packed.
    """
    if latest and not pack:
        raise click.UsageError("--latest is for --pack: a snapshot that is not packed is the newest anyway")
    if snapshot is not None and not pack:
        raise click.UsageError("--snapshot is for --pack: training chooses its snapshot by `train --snapshot`")
    if pack and (dry_run or (as_json and snapshot is None)):
        raise click.UsageError("--pack goes with --json only beside --snapshot, and never with --dry-run")
    config = _load(config_path, overrides, *(["--pack"] * pack), *(["--snapshot"] * (snapshot is not None)))
    if caches:
        own = config.bucket.model_copy(update={"caches": [*config.bucket.caches, *caches]})
        config = config.model_copy(update={"bucket": own})
    from stages import bucket as stage

    if not pack:
        return stage.run(config, name=name, dry_run=dry_run, as_json=as_json, move=move)
    from stages import pack as packing

    packing.check_name(name)  # before the snapshot is made that is to be packed
    made = stage.run(config) if snapshot is None else snapshot
    return packing.run(config, snapshot=made, name=name, as_json=as_json, move=move, latest=latest)


@cli.group(invoke_without_command=True)
@_configured
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
@click.pass_context
def snapshots(context: click.Context, config_path: str | None, overrides: tuple[str, ...], as_json: bool) -> Any:
    """List the snapshots of the cache, compare two (`snapshots diff A B`), or name one (`snapshots name A NAME`)."""
    if context.invoked_subcommand is not None:
        if config_path or overrides or as_json:
            raise click.UsageError("options go behind the last word: sana-pipe snapshots diff A B --config F")
        return None
    config = _load(config_path, overrides)
    from stages import snapshots as stage

    return stage.run(config, as_json=as_json)


@snapshots.command()
@_configured
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with every sample that differs.")
def diff(config_path: str | None, overrides: tuple[str, ...], a: str, b: str, as_json: bool) -> Any:
    """Samples that B has and A has not, the reverse, and those that changed. A, B: names or ids."""
    config = _load(config_path, overrides)
    from stages import snapshots as stage

    return stage.diff(config, a, b, as_json=as_json)


@snapshots.command()
@_configured
@click.argument("snapshot", metavar="SNAPSHOT")
@click.argument("label", metavar="NAME")
@click.option("--move", is_flag=True, help="Also if NAME points to another snapshot.")
def name(config_path: str | None, overrides: tuple[str, ...], snapshot: str, label: str, move: bool) -> Any:
    """Give a snapshot (a name, an id or its beginning) a name, so that `gc` spares it."""
    config = _load(config_path, overrides)
    from stages import snapshots as stage

    return stage.name(config, snapshot, label, move)


@cli.command()
@_configured
@click.option("--source", metavar="NAME", help="A source that `bucket` is to use no more. Its records stay.")
@click.option("--snapshot", metavar="NAME", help="A name of a snapshot (also trained-ID); not `latest`.")
def forget(config_path: str | None, overrides: tuple[str, ...], source: str | None, snapshot: str | None) -> Any:
    """Forget a source or the name of a snapshot. Removes nothing itself: `gc` removes what nothing needs then."""
    if (source is None) == (snapshot is None):
        raise click.UsageError("give either --source or --snapshot")
    config = _load(config_path, overrides)
    from stages import forget as stage

    return stage.run(config, source=source, snapshot=snapshot)


@cli.command()
@_configured
@click.option("--snapshot", metavar="NAME|ID", help="Default: the newest snapshot of the cache.")
@click.option(
    "--resume",
    metavar="auto|PATH",
    help="`auto`: the newest complete checkpoint of train.output. PATH: a run directory or a checkpoint.",
)
@click.option(
    "--quarantine",
    metavar="FILE",
    help="Go on where a record cannot be read: another sample of its bucket takes its place, and FILE gets a line.",
)
def train(
    config_path: str | None,
    overrides: tuple[str, ...],
    snapshot: str | None,
    resume: str | None,
    quarantine: str | None,
) -> Any:
    """Train the transformer from a snapshot. Several GPUs: torchrun --no-python sana-pipe train."""
    config = _load(config_path, overrides)
    from stages import train as stage

    report = stage.run(config, snapshot=snapshot, resume=resume, quarantine=quarantine)
    return INTERRUPTED if getattr(report, "stopped_by", None) == "SIGINT" else report


@cli.command()
@_configured
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def check(config_path: str | None, overrides: tuple[str, ...], as_json: bool) -> Any:
    """Say whether the models of the configuration are there and fit one another, before anything is encoded.

    Fetches JSON files only, and says how much `encode` and `train` will fetch. Exit code 2 if something is missing,
    gated, of the wrong kind, or does not fit.
    """
    config = _load(config_path, overrides)
    from stages import check as stage

    return stage.run(config, as_json=as_json)


@cli.command()
@_configured
@click.option("--checkpoint", default="auto", show_default=True, metavar="auto|PATH", help="Which checkpoint.")
@click.option("--ema", is_flag=True, help="The running average of the weights (train.ema) instead of the last ones.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="Of the transformer's files.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["diffusers", "nvlabs"]),
    default="diffusers",
    show_default=True,
    help="A whole pipeline, or the transformer as NVlabs' repository and ComfyUI load it (.pth and .safetensors).",
)
@click.option("--out", default="./export", show_default=True, metavar="DIR", help="The folder to write; new or empty.")
@click.option("--overwrite", is_flag=True, help="Replace an export of the same run after as many steps or fewer.")
def export(
    config_path: str | None,
    overrides: tuple[str, ...],
    checkpoint: str,
    ema: bool,
    dtype: str,
    form: str,
    out: str,
    overwrite: bool,
) -> Any:
    """Write a folder that diffusers' SanaPipeline.from_pretrained loads, or files with NVlabs' names."""
    config = _load(config_path, overrides)
    from stages import export as stage

    return stage.run(config, checkpoint, Path(out), ema=ema, overwrite=overwrite, dtype=dtype, form=form)


@cli.command()
@_configured
@click.option("--checkpoint", default="auto", show_default=True, metavar="auto|PATH", help="Which checkpoint.")
@click.option("--snapshot", metavar="NAME|ID", help="Whose captions. Default: the newest snapshot of the cache.")
@click.option("--ema", is_flag=True, help="The running average of the weights (train.ema) instead of the last ones.")
@click.option("--count", type=click.IntRange(min=1), help="How many captions. Default: sample.count.")
@click.option("--out", default="./samples", show_default=True, metavar="DIR", help="Where the PNGs go.")
def sample(
    config_path: str | None,
    overrides: tuple[str, ...],
    checkpoint: str,
    snapshot: str | None,
    ema: bool,
    count: int | None,
    out: str,
) -> Any:
    """Draw pictures for captions of a snapshot and put them on a contact sheet."""
    config = _load(config_path, overrides)
    from stages import sample as stage

    return stage.run(config, checkpoint, snapshot, Path(out), count, ema=ema)


@cli.command(hidden=True)
@_configured
@click.option("--latents", required=True, metavar="FILE", help="safetensors file of latents, one tensor a picture.")
@click.option("--out", required=True, metavar="DIR", help="Where the PNGs go.")
def decode(config_path: str | None, overrides: tuple[str, ...], latents: str, out: str) -> Any:
    """Decode latents in a process of its own (`sample` calls it)."""
    config = _load(config_path, overrides)
    from stages import sample as stage

    return stage.decode(config, Path(latents), Path(out))


@cli.command()
@_configured
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def status(config_path: str | None, overrides: tuple[str, ...], as_json: bool) -> Any:
    """What the cache holds and what is missing, while or after it is filled."""
    config = _load(config_path, overrides)
    from stages import status as stage

    return stage.run(config, as_json=as_json)


@cli.command()
@_configured
@click.option("--repair", is_flag=True, help="Put documents right, and encode damaged records again, only those.")
@click.option("--data", multiple=True, metavar="NAME=DIR", help="Where a source is now, if it moved (for --repair).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def verify(
    config_path: str | None, overrides: tuple[str, ...], repair: bool, data: tuple[str, ...], as_json: bool
) -> Any:
    """Read the whole cache and name what is damaged."""
    config = _load(config_path, overrides, *(["--repair"] * repair))
    from stages import verify as stage

    return stage.run(config, mend=repair, data=data, as_json=as_json)


@cli.command()
@_configured
@click.option("--yes", is_flag=True, help="Remove the files; without it they are only listed.")
@click.option("--older-than-hours", type=click.FloatRange(min=0), default=48, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def gc(config_path: str | None, overrides: tuple[str, ...], yes: bool, older_than_hours: float, as_json: bool) -> Any:
    """List, or remove, what no commit, snapshot or scan refers to."""
    config = _load(config_path, overrides)
    from stages import gc as stage

    return stage.run(config, yes=yes, older_than_hours=older_than_hours, as_json=as_json)


@cli.command()
@click.option("--out", default="./demo", show_default=True, metavar="DIR", help="Where everything of the demo goes.")
@click.option("--data", metavar="DIR", help="Your own pictures with captions, instead of scikit-image's.")
@click.option("--quick", is_flag=True, help="A few steps only: shows that every stage runs, draws nothing good.")
def demo(out: str, data: str | None, quick: bool) -> Any:
    """Photographs to generated pictures with small models, on two cores, without any download."""
    from stages import demo as stage

    return stage.run(Path(out), data=None if data is None else Path(data), quick=quick)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Always ends in SystemExit: 0, a UserError's own code, 2 for wrong usage, 130 for Ctrl-C."""
    allow_many_files()
    try:
        result = cli.main(args=arguments, prog_name="sana-pipe", standalone_mode=False)
    except click.Abort:
        click.echo("sana-pipe: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        _say(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in REFUSED or error.filename is None:
            raise
        fix = "check the path, and who may read, enter and write its folders"
        _say(UserError(f"{error.filename}: {error.strerror}", fix=fix))
        sys.exit(UserError.exit_code)
    sys.exit(result if isinstance(result, int) else 0)


def _say(error: UserError) -> None:
    """Print an error once for all processes of a launch: the first process does, another one only what is its alone.

    What every process finds by itself, such as a misspelt option, cannot be known to be so; but the launcher ends the
    others when the first one has ended.
    """
    from pipeline.launch import detect

    try:
        rank = detect().rank
    except UserError:
        rank = 0
    if rank:
        if error.everywhere:
            return
        time.sleep(FIRST_S)
    click.echo(f"sana-pipe: {f'process {rank}: ' if rank else ''}{error}", err=True)


def console() -> NoReturn:
    """The command: `main`, then the end of the process.

    A run shows its lines only: warnings and notes of libraries stay away, unless Python was asked for them
    (`PYTHONWARNINGS=default`). What concerns a user is an error or a line of ours.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
    run_and_exit(main)


if __name__ == "__main__":
    console()
