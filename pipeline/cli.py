"""The command line: options, the configuration, then one stage.

Stages are imported inside their command, so that `sana-pipe train` loads neither an encoder nor diffusers and `--help`
is fast. All errors are handled here: a `UserError`, an error of the machine (`errors.shown`) and a path that
the file system refuses are printed without a traceback and end with their exit code; any other exception is a defect
and keeps its traceback.

Options of the configuration have no flags; `--set a.b=c` reaches each that the command reads.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from sana_pipe import __version__
from sana_pipe.base.errors import (
    EXIT_CODES,
    ConfigError,
    UserError,
    expanded,
    local_path,
    not_permitted,
    print_error,
    shown,
    was_printed,
)
from sana_pipe.base.processes import DEFECT, INTERRUPTED, allow_many_files, pass_on, run_and_exit
from sana_pipe.base.processes import shown as shell_line
from sana_pipe.data.sources.formats import FORMATS

if TYPE_CHECKING:
    from sana_pipe.config import Config

OTHER_RANK_DELAY_S = 3.0
"""Delay before a process other than rank 0 prints its error; launchers end it within that time if rank 0 failed."""
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}
"""Errors of the file system that mean a wrong path from the user, whatever the operation."""

Command = TypeVar("Command", bound=Callable[..., Any])


_PATHS = re.compile(r"\b(DIR|FILE|PATH|RUN|CHECKPOINT)\b")
"""Words in the metavar of a path or URL. In its value `~` and `$NAME` are replaced, which no shell does in `--out=~/x`
or in quotes."""


class _Command(click.Command):
    """A command whose help ends with examples (command lines, `#` starts a remark)."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **attributes: Any):
        super().__init__(*args, **attributes)
        self.examples = tuple(examples)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Expand paths, and refuse empty values: `--snapshot "$NAME"` with a variable that is not set would mean the
        default. The text of a prompt may be empty."""
        given = list(args)
        try:
            rest = super().parse_args(context, args)
        except click.NoSuchOption as error:
            if suggestion := self._as_setting(error.option_name, given):
                raise click.UsageError(f"No such option '{error.option_name}': {suggestion}", context) from None
            raise
        for parameter in self.params:
            value = context.params.get(name := str(parameter.name))
            if value and _PATHS.search(parameter.metavar or ""):
                value = tuple(map(expanded, value)) if isinstance(value, tuple) else expanded(value)
                context.params[name] = value
            if "--prompt" not in parameter.opts and "" in (value if isinstance(value, tuple) else (value,)):
                raise click.BadParameter("is empty", context, parameter)
        return rest

    def _as_setting(self, option: str, args: list[str]) -> str | None:
        """The `--set` that an unknown option stands for; None: no option of the configuration that this command reads
        ends with its name."""
        from sana_pipe.base.options import section_of
        from sana_pipe.config import option_fields, reads

        if all(parameter.name != "overrides" for parameter in self.params):
            return None
        at = next((at for at, word in enumerate(args) if word.partition("=")[0] == option), len(args) - 1)
        word, following = args[at], args[at + 1] if at + 1 < len(args) else "-"
        value = word.partition("=")[2] or ("" if following.startswith("-") else following)
        ending = "." + option.lstrip("-").replace("-", "_")
        settings = [
            shlex.join(["--set", f"{name}={value or ('{}' if section_of(field) else 'VALUE')}"])
            for name, field in sorted(option_fields(), key=lambda option: option[0].count("."))
            if f".{name}".endswith(ending) and "NAME" not in name and reads(str(self.name), name)
        ]
        return f"it is an option of the configuration: {' or '.join(settings)}" if settings else None

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"  {example}\n")


class _Group(_Command, click.Group):
    command_class = _Command


_Group.group_class = _Group


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    examples=[
        "sana-pipe check",
        "sana-pipe encode --data /data/pictures",
        "sana-pipe bucket",
        "sana-pipe train --resume auto",
        "sana-pipe sample",
    ],
)
@click.version_option(__version__, prog_name="sana-pipe")
@click.option("--quiet", is_flag=True, help="Leave out the lines that name the next command and the default.")
def cli(quiet: bool) -> None:
    """Precompute latents and text embeddings once, then train Sana without the encoders.

    \b
    sana-pipe init --data DIR       look at pictures and card, write sana-pipe.yaml
    sana-pipe run DIR               all of these as one chain: encode, bucket, train, sample, export
    sana-pipe check                 are the models available, and do they fit together
    sana-pipe encode --data DIR     pictures and captions -> cache
    sana-pipe bucket                cache -> a snapshot of resolution buckets
    sana-pipe plan                  does the run fit, how fast is it, what does it cost
    sana-pipe train                 snapshot -> checkpoints
    sana-pipe sample, export        checkpoint -> pictures, a SanaPipeline folder
    sana-pipe config                every option with its meaning, value and origin
    sana-pipe help exit-codes       what the exit codes mean
    """


def _complete_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from sana_pipe.config import shipped

    names = [CompletionItem(path.stem) for path in shipped() if path.stem.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]


def _complete_options(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from sana_pipe.base.options import section_of
    from sana_pipe.config import option_fields

    for_set = parameter.name == "overrides"
    return [
        CompletionItem(f"{name}=" if for_set else name, help=" ".join((field.description or "").split()))
        for name, field in option_fields()
        if name.startswith(incomplete) and not (for_set and section_of(field))
    ]


@dataclass(frozen=True)
class _Given:
    """`--config` and `--set` of a command line."""

    path: str | None
    overrides: tuple[str, ...]

    def load(self) -> Config:
        """The configuration."""
        from sana_pipe.base.launch import prefer_expandable_segments
        from sana_pipe.config import load

        prefer_expandable_segments()  # before a stage imports torch
        _, command = click.get_current_context().command_path.split(maxsplit=1)
        return load(self.path, self.overrides, command)

    def default(self) -> str | None:
        """The shipped configuration, if it is used since this folder has none; and the folder above that has one."""
        from sana_pipe.config import LOCAL_NAME, SHIPPED, find

        here, file = Path.cwd(), None if self.path is not None else find(None).absolute()
        if file is None or file.parent != SHIPPED.absolute():
            return None
        above = next((folder for folder in here.parents if (folder / LOCAL_NAME).is_file()), None)
        enter = "" if above is None else f"; {above} has one: cd {shlex.quote(str(above))}"
        return f"there is no {LOCAL_NAME} in {here}, so the shipped {file.stem} is used{enter}"

    def elsewhere(self) -> str | None:
        """Explains an error, perhaps: the cache lies in the folder of the configuration, and the command runs in
        another."""
        from sana_pipe.config import find, load

        try:
            file, cache = find(self.path).absolute(), Path(load(self.path, self.overrides).cache)
        except UserError:
            return None
        if not cache.exists() and not cache.is_absolute() and (file.parent / cache).is_dir():
            there = f"lies in {file.parent}, the folder of {file.name}: cd {shlex.quote(str(file.parent))}"
            return f"{cache} was searched in {Path.cwd()}, and {there}"
        return None


def _grouped(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Options that several commands share, as one decorator; they are listed in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _given(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the configuration; the command gets them as its first argument, a `_Given`."""

    @wraps(command)
    def with_given(config_path: str | None, overrides: tuple[str, ...], **options: Any) -> Any:
        given, context = _Given(config_path, overrides), click.get_current_context()
        quiet = context.find_root().params.get("quiet") or options.get("as_json")
        notes = [] if context.info_name in _ABOUT_FILES or context.invoked_subcommand else [given.default]
        if not quiet and not context.command.hidden:
            _print_notes(notes)
            notes = []
        try:
            result = command(given, **options)
        except UserError:
            if context.info_name not in _ABOUT_FILES:
                _print_notes([*notes, given.elsewhere])
            raise
        if sys.stdout.isatty() and not quiet:
            text = _following(context, given, result)
            if text is not None and _is_main() and not pass_on("--next", text):
                click.echo(f"next: {text}")
        return result

    return _CONFIGURATION(with_given)


_ABOUT_FILES = ("init", "config")
"""Commands that say themselves which file they read or write."""


def _print_notes(notes: Sequence[Callable[[], str | None]]) -> None:
    for note in notes if _is_main() else ():
        if (text := note()) is not None:
            click.echo(f"note: {text}", err=True)


def _configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Do as `_given` does; the command gets the configuration."""

    @wraps(command)
    def with_config(given: _Given, **options: Any) -> Any:
        return command(given.load(), **options)

    return _given(with_config)


def _once(why: str) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], str | None]:
    """The value of a `multiple` option that is given once: of several click would take the last. why: not twice."""

    def value(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> str | None:
        if len(given) > 1:
            raise click.UsageError(f"{parameter.opts[0]} is given once: {why}", context)
        return given[0] if given else None

    return value


def _is_main() -> bool:
    from sana_pipe.base.launch import detect

    return detect().is_main


def _again(context: click.Context, without: Collection[str], more: Sequence[str] = ()) -> str:
    """The command line with the options that were given, except some."""
    words = context.command_path.split()[1:]
    for parameter in context.command.params:
        value, name = context.params.get(str(parameter.name)), str(parameter.name)
        if name in without or context.get_parameter_source(name) != click.core.ParameterSource.COMMANDLINE:
            continue
        for each in value if isinstance(value, tuple) else (value,):
            off = parameter.secondary_opts if each is False else parameter.opts
            words += [off[0], *([] if isinstance(each, bool) else [str(each)])]
    return shell_line(*words, *more)


_RESUME = ("train", "--resume", "auto")
_NEXT = {
    "encode": ("bucket",),
    "bucket": _RESUME,
    "check": ("encode", "--data", "DIR"),
    "plan": _RESUME,
    "train": ("sample",),
    "sample": ("export",),
    "export": ("report",),
    "run": ("report",),
    "verify": ("bucket",),
}
"""Command -> the words of the one that usually follows."""


def _following(context: click.Context, given: _Given, result: Any) -> str | None:
    """Say what to do after a command, ready to be pasted: with the options that were given, as far as it reads them."""
    from sana_pipe.config import reads

    name, options = str(context.command.name), context.params
    words, stopped = list(_NEXT.get(name, ())), getattr(result, "stopped_by", None)
    if name == "train" and (result == INTERRUPTED or stopped):
        return _again(context, {"resume"}, _RESUME[1:])
    unfinished = isinstance(result, dict) and (result.get("stopped") or result.get("left"))
    if unfinished or (isinstance(result, int) and result):
        return None
    if options.get("dry_run"):
        return _again(context, {"dry_run", "probe"})
    if name == "report":
        return f"open {local_path(options['out']).resolve().as_uri()}"
    if not words:
        return options.get("following")
    if options.get("watch"):
        words = ["report", "--run", options["watch"]]
    elif name == "encode" and options["data"] is None:
        words = list(_RESUME)
    elif name == "bucket" and options["pack"] and options["name"] and not options["latest"]:
        words += ["--snapshot", options["name"]]
    elif name == "sample":
        words += ["--checkpoint", options["checkpoint"]] if options["checkpoint"] != "auto" else []
        words += ["--ema"] * options["ema"]
    words += [] if given.path is None else ["--config", str(given.path)]
    for setting in given.overrides:
        if reads(words[0], setting.partition("=")[0].strip()):
            words += ["--set", setting]
    return shell_line(*words)


_NOTHING = _Given(None, ())
_CONFIGURATION = _grouped(
    click.option(
        "--config",
        "config_path",
        metavar="FILE",
        shell_complete=_complete_files,
        help="Default: ./sana-pipe.yaml if it exists, else the shipped sana_1600m_1024.",
    ),
    click.option(
        "--set",
        "overrides",
        metavar="A.B=C",
        multiple=True,
        shell_complete=_complete_options,
        help="Override one option of the configuration; may be repeated.",
    ),
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")


def _only_with(context: click.Context, option: str, *others: str) -> None:
    """Refuse options other than `option` that were given on the command line, except the configuration's and
    `others`."""
    known = {option.lstrip("-"), "config_path", "overrides", *others}
    given = click.core.ParameterSource.COMMANDLINE
    odd = [
        p.opts[0]
        for p in context.command.params
        if p.name not in known and context.get_parameter_source(str(p.name)) == given
    ]
    if odd:
        raise click.UsageError(f"{option} does not go with {', '.join(odd)}")


@cli.command(
    examples=[
        "sana-pipe init --data /data/dog --trigger 'sks dog'",
        "sana-pipe init --data /data/pictures --for full --gpu a100-80 --gpus 8 --out full.yaml",
        "sana-pipe init --data /data/table.parquet --set data.caption_field=long_caption",
    ]
)
@click.option(
    "--data", multiple=True, required=True, metavar="PATH|URL", help="The pictures, as for encode; may be repeated."
)
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["lora", "full", "scratch"]),
    help="A LoRA, full fine-tuning, or a new model. Default: by the number of pictures and the memory.",
)
@click.option(
    "--model",
    type=click.Choice(["sana", "zimage", "prx"]),
    default="sana",
    show_default=True,
    help="Sana; a LoRA of Z-Image; PRX on latents of Sana's VAE (docs/training.md says which).",
)
@click.option("--trigger", metavar="WORD", help="A word for what all pictures show; it goes into every caption.")
@click.option("--out", default="./sana-pipe.yaml", show_default=True, metavar="FILE", help="The configuration.")
@click.option("--force", is_flag=True, help="Replace the file, and prompts.txt next to it.")
@click.option("--gpu", metavar="NAME", help="Choose for this card (a name as in `plan`). Default: the one here.")
@click.option("--gpu-memory", metavar="24GiB", help="Memory of each card.")
@click.option("--gpus", type=click.IntRange(min=1), help="Number of cards. Default: those here.")
@click.option("--set", "overrides", metavar="A.B=C", multiple=True, help="An option of the file; may be repeated.")
def init(data: tuple[str, ...], out: str, **options: Any) -> Any:
    """Look at the pictures, the card and the disk, and write a commented configuration for them.

    Prints each value with its reason. Encodes nothing, and needs no model.
    """
    from sana_pipe.stages import init as stage

    return stage.run(data, stage.Options(out=local_path(out), **options))


@cli.command(
    examples=[
        "sana-pipe encode --data /data/pictures --dry-run   # what there is to do; writes nothing",
        "sana-pipe encode --data 's3://bucket/shard-{0000..0099}.tar' --set cache=s3://bucket/cache",
        "sana-pipe encode --data /data/pictures --set data.min_side=512 --set encode.image_batch=16",
        "sana-pipe encode --prompts default   # five prompts for pictures during training",
        "torchrun --standalone --nproc-per-node 8 --no-python sana-pipe encode --data /data/pictures",
    ]
)
@_configured
@click.option(
    "--data",
    multiple=True,
    callback=_once("each place is a source of its own, with a command of its own"),
    metavar="PATH|URL",
    help="A folder of pictures, tars, parquet files or a listing (.jsonl, .csv), or a pattern such as "
    "'s3://bucket/shard-{0000..0099}.tar'.",
)
@click.option(
    "--format",
    type=click.Choice(list(FORMATS)),
    help="The kind of --data. Default: from its content.",
)
@click.option("--source-name", metavar="NAME", help="Name of this source in the cache. Default: the folder's name.")
@click.option(
    "--prompts",
    metavar="FILE|default",
    help="Also encode these prompts (UTF-8, one a line, # for remarks) for pictures during training; default: five of "
    "ours. Goes without --data, too.",
)
@click.option(
    "--prompts-name", metavar="NAME", default="prompts", show_default=True, help="Name of their set in the cache."
)
@click.option("--rehash", is_flag=True, help="Read every file again instead of trusting size and mtime.")
@click.option("--task-index", type=click.IntRange(min=0), help="This worker among --task-count (job arrays).")
@click.option("--task-count", type=click.IntRange(min=1), help="Workers that share the work.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="ray: encode on the Ray cluster of RAY_ADDRESS, or on a local one.",
)
@click.option("--dry-run", is_flag=True, help="Write nothing; print the work, its bytes and its time.")
@click.option("--probe/--no-probe", default=True, help="Whether --dry-run times the encoders (about a minute).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout at the end; lines go to stderr.")
def encode(config: Config, dry_run: bool, probe: bool, **options: Any) -> Any:
    """Encode pictures and captions, or prompts, into the cache; existing records are not encoded again.

    After SIGTERM, SIGUSR1 or SIGHUP the shards at hand are finished within 20 s or dropped, and the exit
    code is 0; the same command continues.

    Encoding waits up to an hour for disk space; --dry-run ends with 6 if there is too little.
    """
    asked = {name: options.pop(name) for name in ("prompts", "prompts_name")}
    prompts = asked["prompts"]
    if options["data"] is None:
        if prompts is None:
            raise click.UsageError("Missing option '--data' (or '--prompts').")
        if any(options[name] for name in ("format", "source_name", "rehash")):
            raise click.UsageError("--format, --source-name and --rehash are about --data")
    if dry_run and prompts is not None:
        raise click.UsageError("--dry-run is for --data; prompts are few: leave it out")
    if not (probe or dry_run):
        raise click.UsageError("--no-probe is for --dry-run")
    from sana_pipe.stages import encode as stage

    if dry_run:
        return stage.dry_run(config, probe=probe, **options)
    return stage.run(config, **(asked if prompts else {}), **options)


@cli.command(
    examples=[
        "sana-pipe bucket --dry-run",
        "sana-pipe bucket --name round2 --set bucket.batch=128 --set bucket.remainder=drop",
        "sana-pipe bucket --filter 'least(width, height) >= 768' --set bucket.heldout=0.01",
        "sana-pipe bucket --like round1 --name round2",
        "sana-pipe bucket --dry-run --set bucket.dedup=near --show-duplicates duplicates.html",
        "sana-pipe bucket --pack --snapshot round2   # joint shards for training from an object store",
    ]
)
@_configured
@click.option("--name", metavar="NAME", help="Name of the snapshot. Default: only its id.")
@click.option("--filter", "condition", metavar="SQL", help="Use only samples that satisfy this; sets bucket.filter.")
@click.option("--metadata", metavar="FILE", help="Add the columns of a .parquet, .csv or .jsonl to the metadata.")
@click.option("--key", metavar="COLUMN", help="With --metadata: the column that names pictures. Default: item.")
@click.option("--like", metavar="NAME|ID", help="Use the rules of this snapshot on today's data, and say what differs.")
@click.option("--dry-run", is_flag=True, help="Write nothing; print the content of the snapshot.")
@click.option("--show-duplicates", metavar="FILE", help="Write a page with the pictures of the largest groups.")
@click.option(
    "--pack",
    is_flag=True,
    help="Then copy its records into joint shards in a shuffled order, for training from object storage.",
)
@click.option("--snapshot", metavar="NAME|ID", help="With --pack: pack this snapshot; do not make a new one.")
@click.option("--latest", is_flag=True, help="With --pack: the packed snapshot becomes the newest.")
@click.option("--move", is_flag=True, help="Move NAME from another snapshot to this one.")
@_json
def bucket(
    config: Config,
    name: str | None,
    condition: str | None,
    metadata: str | None,
    key: str | None,
    like: str | None,
    dry_run: bool,
    show_duplicates: str | None,
    pack: bool,
    snapshot: str | None,
    latest: bool,
    move: bool,
    as_json: bool,
) -> Any:
    """Join latents and captions into an immutable snapshot, grouped by resolution.

    The section `bucket` of the configuration decides which samples are used (filters, weights, duplicates, held-out
    part, subset) and how they are batched. Several processes or nodes may run --pack at the same time; they share the
    copying. With --pack the name is the packed snapshot's (default: ID.packed), and `latest` stays where it is.
    """
    if latest and not pack:
        raise click.UsageError("--latest is for --pack: a new snapshot is the newest without it")
    if snapshot is not None and not pack:
        raise click.UsageError("--snapshot is for --pack: training selects its snapshot by `train --snapshot`")
    if move and name is None and not pack:
        raise click.UsageError("--move is for --name")
    if snapshot is not None and condition is not None:
        raise click.UsageError("--filter is for a new snapshot, and --snapshot names one that is there")
    if snapshot is not None and show_duplicates is not None:
        raise click.UsageError("--show-duplicates is for a new snapshot, and --snapshot names one that is there")
    if snapshot is not None and like is not None:
        raise click.UsageError("--like is for a new snapshot, and --snapshot names one that is there")
    if pack and (dry_run or (as_json and snapshot is None)):
        raise click.UsageError("--pack goes with --json only together with --snapshot, and never with --dry-run")
    if snapshot is not None and metadata is not None:
        raise click.UsageError("--metadata is for a new snapshot, and --snapshot names one that is there")
    if key is not None and metadata is None:
        raise click.UsageError("--key names a column of the file of --metadata")
    given = {"filter": condition, "metadata": metadata, "metadata_key": key}
    given = {option: value for option, value in given.items() if value is not None}
    if given:
        config = config.model_copy(update={"bucket": config.bucket.model_copy(update=given)})
    from sana_pipe.stages import bucket as stage

    repeated: dict[str, Any] = {} if show_duplicates is None else {"show_duplicates": local_path(show_duplicates)}
    if like is not None:
        overrides = click.get_current_context().params["overrides"]
        chosen = [text.partition("=")[0].strip() for text in overrides] + [f"bucket.{option}" for option in given]
        repeated |= {"like": like, "chosen": chosen}
    if not pack:
        return stage.run(config, name=name, dry_run=dry_run, as_json=as_json, move=move, **repeated)
    from sana_pipe.stages import pack as packing

    packing.check_name(name)  # before the snapshot is made that is to be packed
    unpacked = stage.run(config, **repeated) if snapshot is None else snapshot
    return packing.run(config, snapshot=unpacked, name=name, as_json=as_json, move=move, latest=latest)


@cli.group(
    invoke_without_command=True,
    examples=[
        "sana-pipe snapshots",
        "sana-pipe snapshots diff round1 round2",
        "sana-pipe snapshots name latest round3",
    ],
)
@_given
@_json
@click.pass_context
def snapshots(context: click.Context, given: _Given, as_json: bool) -> Any:
    """List the snapshots of the cache, say how one was made (`snapshots show A`), compare two (`snapshots diff A B`),
    name one (`snapshots name A NAME`), or list its pictures (`snapshots list A FILE`)."""
    if context.invoked_subcommand is not None:
        if given != _NOTHING or as_json:
            raise click.UsageError("options go behind the last word: sana-pipe snapshots diff A B --config F")
        return None
    config = given.load()
    from sana_pipe.stages import snapshots as stage

    return stage.run(config, as_json=as_json)


@snapshots.command(
    examples=[
        "sana-pipe snapshots diff round1 round2 --json",
        "sana-pipe snapshots diff round1 s3://other/cache:round1",
        "sana-pipe snapshots diff round1 published.csv",
    ]
)
@_configured
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with every sample that differs.")
def diff(config: Config, a: str, b: str, as_json: bool) -> Any:
    """List the samples that were added, removed or changed from A to B (names or ids; CACHE:NAME in another cache). B
    may also be a list, FILE.csv or FILE.parquet: then items that A lacks, has besides, or has with other bytes."""
    from sana_pipe.stages import snapshots as stage

    return stage.diff(config, a, b, as_json=as_json)


@snapshots.command("list", examples=["sana-pipe snapshots list round1 round1.csv"])
@_configured
@click.argument("snapshot", metavar="SNAPSHOT")
@click.argument("file", metavar="FILE")
def write_list(config: Config, snapshot: str, file: str) -> Any:
    """Write source, item and digest of each picture of a snapshot to FILE (.csv or .parquet), for `snapshots diff`."""
    from sana_pipe.stages import snapshots as stage

    return stage.write_list(config, snapshot, file)


@snapshots.command(examples=["sana-pipe snapshots show round1 --json"])
@_configured
@click.argument("snapshot", metavar="SNAPSHOT")
@_json
def show(config: Config, snapshot: str, as_json: bool) -> Any:
    """Say how a snapshot was made: rules, sources, duplicates, held-out part, and the command that makes it again."""
    from sana_pipe.stages import snapshots as stage

    return stage.show(config, snapshot, as_json)


@snapshots.command(examples=["sana-pipe snapshots name latest round3 --move"])
@_configured
@click.argument("snapshot", metavar="SNAPSHOT")
@click.argument("label", metavar="NAME")
@click.option("--move", is_flag=True, help="Move NAME from another snapshot to this one.")
def name(config: Config, snapshot: str, label: str, move: bool) -> Any:
    """Name a snapshot (given by name, id or the start of its id), so that `gc` keeps it."""
    from sana_pipe.stages import snapshots as stage

    return stage.name(config, snapshot, label, move)


@cli.command(
    examples=[
        "sana-pipe push s3://bucket/round1 --snapshot round1 --license cc-by-4.0",
        "sana-pipe push ./round1 --license 'all rights reserved'",
    ]
)
@_configured
@click.argument("target", metavar="DIR|URL")
@click.option("--license", required=True, metavar="TEXT", help="Of pictures and captions; it stands in the data card.")
@click.option("--snapshot", metavar="NAME|ID", help="Default: the newest of the cache.")
@_json
def push(config: Config, target: str, license: str, snapshot: str | None, as_json: bool) -> Any:
    """Copy a snapshot with its shards and a data card to a folder or an object store, from which `pull` fetches it.

    What was held out of it goes with it; pictures do not. What is there already is not sent again.
    """
    from sana_pipe.stages import push as stage

    return stage.run(config, target, license, snapshot, as_json)


@cli.command(
    examples=[
        "sana-pipe pull s3://bucket/round1",
        "sana-pipe pull /nfs/art/cache --snapshot round2 --name art-round2",
    ]
)
@_configured
@click.argument("origin", metavar="DIR|URL")
@click.option("--snapshot", metavar="NAME|ID", help="Default: the newest there.")
@click.option("--name", metavar="NAME", help="Name of the snapshot here. Default: that which it has there.")
@click.option("--move", is_flag=True, help="Move the name from another snapshot to this one.")
@_json
def pull(config: Config, origin: str, snapshot: str | None, name: str | None, move: bool, as_json: bool) -> Any:
    """Copy a snapshot with its shards from another cache into this one, and train on it as if it had been made here.

    What was held out of it comes with it. What is here already is not fetched again.
    """
    from sana_pipe.stages import pull as stage

    return stage.run(config, origin, snapshot, name, move, as_json)


@cli.command(
    examples=[
        "sana-pipe forget --source photos",
        "sana-pipe forget --snapshot round1",
        "sana-pipe forget --item 'photos: 2019/beach.jpg' --item 0042.jpg",
        "sana-pipe forget --check",
    ]
)
@_configured
@click.option("--source", metavar="NAME", help="A source that `bucket` shall not use any more. Its records stay.")
@click.option("--snapshot", metavar="NAME", help="A name of a snapshot (also trained-ID); not `latest`.")
@click.option("--prompts", "prompt_set", metavar="NAME", help="A prompt set of `encode --prompts`. Its records stay.")
@click.option(
    "--item",
    "items",
    multiple=True,
    metavar="NAME",
    help="A picture that must go, with all that was made of it; `SOURCE: NAME` where sources share it. Repeatable.",
)
@click.option("--digests", metavar="FILE", help="The same for the pictures whose digests are the lines of FILE.")
@click.option(
    "--check", is_flag=True, help="End what was stopped, and look for anything that is left of such pictures."
)
def forget(config: Config, **what: Any) -> Any:
    """Forget a source, the name of a snapshot or a prompt set: `gc` then removes what nothing else needs. Or take
    pictures out: --item removes their records at once, makes the snapshots again, and keeps them out."""
    names = ("source", "snapshot", "prompt_set")
    if sum(map(bool, (*(what[name] for name in names), what["items"] or what["digests"], what["check"]))) != 1:
        raise click.UsageError("give either --source, --snapshot, --prompts, --item and --digests, or --check")
    from sana_pipe.stages import forget as stage

    return stage.run(config, **what)


@cli.command(
    examples=[
        "sana-pipe train --resume auto",
        "sana-pipe train --snapshot round2 --set train.optim.lr=2e-5 --set train.steps=4000",
        "sana-pipe train --from ./runs/round1 --snapshot round2 --set train.output=./runs/round2 --resume auto",
        "sana-pipe train --config sana_600m_512 --set train.optim.name=came --set train.optim.eps=null"
        " --set train.optim.betas=null",
        "torchrun --standalone --nproc-per-node 8 --no-python sana-pipe train --resume auto",
    ]
)
@_configured
@click.option(
    "--snapshot", metavar="NAME|ID", help="Default: the newest of the cache; a resumed run keeps that it began with."
)
@click.option(
    "--resume",
    metavar="auto|PATH",
    help="`auto`: the newest complete checkpoint of train.output. PATH: a run directory or a checkpoint.",
)
@click.option(
    "--from",
    "origin",
    metavar="CHECKPOINT|RUN",
    help="Begin a new run with its weights, moments and averages, on any snapshot. With --resume auto it counts "
    "until the new run has a checkpoint.",
)
@click.option(
    "--quarantine",
    metavar="FILE",
    help="Replace an unreadable record by another sample of its bucket, and write a line to FILE.",
)
def train(config: Config, snapshot: str | None, resume: str | None, origin: str | None, quarantine: str | None) -> Any:
    """Train the transformer from a snapshot. Several GPUs: torchrun --no-python sana-pipe train.

    Rounds: each begins --from the run before, in a run directory of its own.
    """
    from sana_pipe.stages import train as stage

    report = stage.run(config, snapshot=snapshot, resume=resume, quarantine=quarantine, origin=origin)
    return INTERRUPTED if getattr(report, "stopped_by", None) == "SIGINT" else report


@cli.command(
    examples=[
        "sana-pipe plan --gpu h100 --gpus 8 --price 2.5",
        "sana-pipe plan --gpus 4 --gpu-memory 24GiB --set train.optim.name=came --set train.optim.eps=null"
        " --set train.optim.betas=null",
        "sana-pipe plan --gpus 4 --gpu 3090 --search",
        "sana-pipe plan --snapshot round2 --gpu a40 --json",
    ]
)
@_configured
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="Of all nodes together.")
@click.option("--gpu", metavar="NAME", help="A card: 3090, 4090, a10g, a100-80, h100, b200, ...; or cpu.")
@click.option("--gpu-memory", metavar="24GiB", help="Memory of each GPU. Default: that of --gpu.")
@click.option("--nodes", type=click.IntRange(min=1), help="Default: nodes of at most 8 GPUs.")
@click.option("--price", type=click.FloatRange(min=0), metavar="P", help="Price of a GPU hour, in any currency.")
@click.option(
    "--snapshot", metavar="NAME|ID", help="Its buckets and samples. Default: the buckets of the configuration."
)
@click.option("--search", is_flag=True, help="Rank the strategies that fit by predicted speed (about a minute).")
@_json
def plan(config: Config, **options: Any) -> Any:
    """Predict memory, speed and cost of a training before it starts; needs no GPU.

    The training step is traced without memory on this machine's CPU, for the worst bucket. Exit code 1 if it does not
    fit.
    """
    if options["search"] and options["price"] is not None:
        raise click.UsageError("--price is for one configuration, such as the one that --search prints first")
    from sana_pipe.stages import plan as stage

    return stage.run(config, stage.Options(**options))


@cli.command(examples=["sana-pipe check", "sana-pipe check --config sana15_1600m_1024 --json"])
@_configured
@_json
def check(config: Config, as_json: bool) -> Any:
    """Check that the models of the configuration are available and fit together, before anything is encoded.

    Fetches JSON files only, and prints how much `encode` and `train` will fetch. Exit code 2 if a model is missing,
    gated, of the wrong kind, or does not fit the others.
    """
    from sana_pipe.stages import check as stage

    return stage.run(config, as_json=as_json)


_weights = _grouped(
    click.option(
        "--checkpoint", default="auto", show_default=True, metavar="auto|PATH", help="auto: the newest of train.output."
    ),
    click.option("--ema", is_flag=True, help="The EMA weights (train.ema) instead of the last weights."),
)


@cli.command(
    examples=[
        "sana-pipe export --out ./export",
        "sana-pipe export --checkpoint ./runs/sana_1600m_1024 --ema --dtype bf16 --overwrite",
        "sana-pipe export --best --out ./best   # the checkpoint with the lowest held-out loss",
        "sana-pipe export --format nvlabs --out ./nvlabs   # for NVlabs' repository and ComfyUI",
        "sana-pipe export --format comfyui --out ./lora   # of an adapter, for ComfyUI's LoraLoader",
    ]
)
@_configured
@_weights
@click.option(
    "--best",
    is_flag=True,
    help="The checkpoint with the lowest held-out loss, of train.output or of the run "
    "directory that --checkpoint names.",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Precision of the transformer's files. Default: bf16 for an adapter or a ControlNet with a base "
    "in bf16, else fp32.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["diffusers", "merged", "nvlabs", "comfyui"]),
    default="diffusers",
    show_default=True,
    help="diffusers: a whole pipeline, or the file of an adapter. nvlabs: the transformer as NVlabs' repository and "
    "ComfyUI load it (.pth and .safetensors). Of an adapter also comfyui, a file for ComfyUI's LoraLoader, and merged, "
    "a whole pipeline with the adapter in its base. Of a ControlNet diffusers alone: its folder.",
)
@click.option("--out", default="./export", show_default=True, metavar="DIR", help="The folder; new or empty.")
@click.option("--overwrite", is_flag=True, help="Replace an export that is in the folder.")
def export(config: Config, checkpoint: str, out: str, **options: Any) -> Any:
    """Write a folder for diffusers' SanaPipeline.from_pretrained, or files with NVlabs' names."""
    from sana_pipe.stages import export as stage

    return stage.run(config, checkpoint, local_path(out), **options)


@cli.command(
    examples=[
        "sana-pipe sample --count 4",
        "sana-pipe sample --snapshot round2.heldout --set sample.guidance=6.0",
        "sana-pipe sample --prompt 'a red cube' --prompt 'a lighthouse at sea' --ema",
        "sana-pipe sample --prompt 'a lighthouse at sea' --control edges.png",
        "sana-pipe sample --watch ./runs/sana_1600m_1024 --set encode.device=cpu",
        "sana-pipe sample --count 4 --for-pairs ./pairs",
    ]
)
@_configured
@_weights
@click.option("--snapshot", metavar="NAME|ID", help="The snapshot of the captions. Default: the newest of the cache.")
@click.option("--count", type=click.IntRange(min=1), help="How many captions. Default: 8.")
@click.option(
    "--out",
    metavar="DIR",
    help="Folder for the PNGs; a drawing in it is replaced. Default: ./samples, or ./samples-2 and so on if that holds "
    "another drawing.",
)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Draw this text instead of captions; may be repeated. Loads the text encoder, in a process of its own.",
)
@click.option(
    "--adapter-scale",
    "scale",
    type=float,
    help="Of an adapter's change, or of what a ControlNet adds: 0 is the base. Default: 1.",
)
@click.option(
    "--base/--no-base",
    default=True,
    show_default=True,
    help="Also draw with the weights that the run began from, one model after the other.",
)
@click.option("--height", type=click.IntRange(min=1), help="With --prompt: pixels. Default: data.resolution.")
@click.option("--width", type=click.IntRange(min=1), help="With --prompt: pixels. Default: data.resolution.")
@click.option(
    "--control",
    multiple=True,
    callback=_once("all prompts are drawn with it"),
    metavar="FILE",
    help="With --prompt: the control picture of all prompts.",
)
@click.option(
    "--watch",
    metavar="RUN",
    help="Decode what a training draws (train.pictures) as it appears, into RUN/pictures; Ctrl-C ends. Loads no "
    "transformer.",
)
@click.option("--once", is_flag=True, help="With --watch: end when everything that is there is decoded.")
@click.option(
    "--for-pairs",
    "for_pairs",
    metavar="DIR",
    help="Draw --count pictures (default: 4) for each of up to 100 captions into a new folder, with a page to mark the "
    "better and the worse picture on.",
)
@click.pass_context
def sample(
    context: click.Context,
    config: Config,
    checkpoint: str,
    snapshot: str | None,
    ema: bool,
    count: int | None,
    out: str | None,
    prompts: tuple[str, ...],
    scale: float | None,
    base: bool,
    height: int | None,
    width: int | None,
    control: str | None,
    watch: str | None,
    once: bool,
    for_pairs: str | None,
) -> Any:
    """Draw pictures for captions of a snapshot, or for new prompts, and put them on a contact sheet."""
    if watch is not None:
        _only_with(context, "--watch", "once")
    elif for_pairs is not None:
        _only_with(context, "--for-pairs", "for_pairs", "checkpoint", "snapshot", "ema", "count", "scale")
    elif once:
        raise click.UsageError("--once is for --watch")
    if prompts and (snapshot is not None or count is not None):
        raise click.UsageError("--prompt does not go with --snapshot and --count, which are about captions")
    if control is not None and not prompts:
        raise click.UsageError(
            "--control is for --prompt: captions are drawn with the control pictures of the snapshot"
        )
    if not prompts and (height is not None or width is not None):
        raise click.UsageError("--height and --width are for --prompt: other pictures have the size of their bucket")
    from sana_pipe.stages import sample as stage

    if watch is not None:
        return stage.watch(config, local_path(watch), once=once)
    if for_pairs is not None:
        return stage.run_pairs(config, checkpoint, snapshot, local_path(for_pairs), count, ema=ema, scale=scale)
    if not prompts:
        return stage.run(config, checkpoint, snapshot, _path(out), count, ema=ema, scale=scale, base=base)
    shared: dict[str, Any] = {"ema": ema, "scale": scale, "base": base, "control": _path(control)}
    return stage.run_prompts(config, checkpoint, prompts, _path(out), height=height, width=width, **shared)


@cli.command(hidden=True)
@_configured
@click.option("--latents", required=True, metavar="FILE", help="safetensors file of latents, one tensor a picture.")
@click.option("--out", required=True, metavar="DIR", help="Folder for the PNGs.")
def decode(config: Config, latents: str, out: str) -> Any:
    """Decode latents in a separate process (`sample` calls it)."""
    from sana_pipe.stages import sample as stage

    return stage.decode(config, local_path(latents), local_path(out))


@cli.command(hidden=True)
@_given
@click.option("--run", required=True, metavar="DIR", help="The run directory.")
@click.option("--next", "following", help="The command that the training named as the next one.")
def finish(given: _Given, run: str, following: str | None) -> Any:
    """Decode the drawings of a run and write its page (`train` ends with it)."""
    config = given.load()
    from sana_pipe.stages import report as stage

    return stage.finish(config, local_path(run), str(given.path))


@cli.command(examples=["sana-pipe status --watch", "sana-pipe status --set cache=s3://bucket/cache --json"])
@_configured
@click.option("--watch", is_flag=True, help="Print it again and again, until Ctrl-C.")
@click.option("--every", type=click.FloatRange(min=0.1), metavar="S", help="With --watch: seconds between (10).")
@_json
def status(config: Config, watch: bool, every: float | None, as_json: bool) -> Any:
    """Print what the cache holds, what is missing, and how far running processes are."""
    if every is not None and not watch:
        raise click.UsageError("--every is for --watch")
    from sana_pipe.stages import status as stage

    return stage.watch(config, every or 10.0, as_json) if watch else stage.run(config, as_json=as_json)


_newest = click.option("--snapshot", metavar="NAME|ID", help="Default: the newest snapshot of the cache.")
_shown = _grouped(
    click.option("--run", metavar="DIR", help="A run directory. Default: train.output, if there is one."),
    click.option("--snapshot", metavar="NAME|ID", help="Default: that of the run, else the newest of the cache."),
)


def _path(text: str | None) -> Path | None:
    return None if text is None else local_path(text)


@cli.command(
    examples=[
        "sana-pipe report",
        "sana-pipe report --snapshot round2 --out round2.html",
        "sana-pipe report --run ./runs/sana_1600m_1024 --compare ./runs/lower_rate",
        "sana-pipe report --gallery 8 --set encode.device=cpu",
    ]
)
@_configured
@_shown
@click.option("--compare", metavar="RUN", help="A second run directory: curves over each other, differing options.")
@click.option(
    "--pictures/--no-pictures", default=True, show_default=True, help="Read the sources for thumbnails of rejects."
)
@click.option(
    "--gallery",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Decode that many latents, too: loads the VAE, in a process of its own.",
)
@click.option("--out", default="./report.html", show_default=True, metavar="FILE", help="The page.")
def report(config: Config, run: str | None, compare: str | None, out: str, **options: Any) -> Any:
    """Write one HTML page about a snapshot and a run: numbers, plots, pictures; opens without network.

    A section without data is left out; the page names the command that makes its data.
    """
    from sana_pipe.stages import report as stage

    return stage.run(config, local_path(out), run=_path(run), compare=_path(compare), **options)


@cli.command(
    examples=[
        "sana-pipe inspect",
        "sana-pipe inspect --snapshot round2 --json",
        "sana-pipe inspect --run ./runs/sana_1600m_1024 --json",
    ]
)
@_configured
@_shown
@_json
def inspect(config: Config, run: str | None, snapshot: str | None, as_json: bool) -> Any:
    """Print the numbers of a snapshot and of a run: those of `report`, for scripts."""
    from sana_pipe.stages import inspect as stage

    return stage.run(config, run=_path(run), snapshot=snapshot, as_json=as_json)


@cli.command(
    examples=[
        "sana-pipe view cat.jpg",
        "sana-pipe view 'photos: animals/cat.jpg' --snapshot round2 --out cat.html",
        "sana-pipe view cat.jpg --near",
        "sana-pipe view 12345678901234567890 --json",
    ]
)
@_configured
@click.argument("sample_name", metavar="ID")
@_newest
@click.option("--out", metavar="FILE", help="Also write an HTML page with the picture, its crop and the latent.")
@click.option("--near", is_flag=True, help="Also name the samples that look like it.")
@_json
def view(config: Config, sample_name: str, snapshot: str | None, out: str | None, near: bool, as_json: bool) -> Any:
    """Print one sample: picture, crop, latent, captions, tokens kept, and where its bytes lie.

    ID is a sample id, an item (or 'source: item'), the key of the latent, or the beginning of one that no other sample
    shares.
    """
    from sana_pipe.stages import view as stage

    return stage.run(config, sample_name, snapshot=snapshot, out=_path(out), as_json=as_json, near=near)


@cli.command(
    examples=[
        "sana-pipe verify",
        "sana-pipe verify --repair --data photos=/new/place/photos",
        "sana-pipe verify --sample 0.01",
        "torchrun --standalone --nproc-per-node 4 --no-python sana-pipe verify --snapshot art-v3",
    ]
)
@_configured
@click.option("--repair", is_flag=True, help="Restore documents, and encode the damaged records again.")
@click.option("--data", multiple=True, metavar="NAME=DIR", help="The present place of a moved source (for --repair).")
@click.option("--snapshot", metavar="NAME", help="Read only the shards and tables that this snapshot needs.")
@click.option(
    "--sample",
    type=click.FloatRange(min=0, max=1, min_open=True),
    metavar="SHARE",
    help="Read only this share of the shards (0 to 1), drawn anew by each command.",
)
@click.option("--task-index", type=click.IntRange(min=0), help="This worker among --task-count (job arrays).")
@click.option("--task-count", type=click.IntRange(min=1), help="Workers that share the work.")
@_json
def verify(config: Config, repair: bool, data: tuple[str, ...], **options: Any) -> Any:
    """Read the whole cache and name the damaged records and documents.

    Several processes share one verification. A killed one is continued by the same command.
    """
    if data and not repair:
        raise click.UsageError("--data is for --repair")
    if repair and options["sample"] is not None:
        raise click.UsageError("--repair reads everything that it repairs: leave out --sample")
    from sana_pipe.stages import verify as stage

    return stage.run(config, repair=repair, data=data, **options)


@cli.command(examples=["sana-pipe gc", "sana-pipe gc --yes --older-than-hours 72"])
@_configured
@click.option("--yes", is_flag=True, help="Remove the files; without it they are only listed.")
@click.option("--older-than-hours", type=click.FloatRange(min=0), default=48, show_default=True)
@_json
def gc(config: Config, yes: bool, older_than_hours: float, as_json: bool) -> Any:
    """List or remove files that no commit, snapshot or scan refers to."""
    from sana_pipe.stages import gc as stage

    return stage.run(config, yes=yes, older_than_hours=older_than_hours, as_json=as_json)


@cli.command(
    examples=[
        "sana-pipe config",
        "sana-pipe config train.optim --set train.optim.name=came --set train.optim.eps=null",
        "sana-pipe config bucket.remainder --config sana_600m_512 --json",
        "sana-pipe config --config sana_1600m_1024 > sana-pipe.yaml   # a start for your own file",
    ]
)
@_given
@click.argument("name", required=False, metavar="[OPTION|SECTION]", shell_complete=_complete_options)
@_json
@click.option("--markdown", is_flag=True, help="The reference of all options (docs/configuration.md).")
def config(given: _Given, name: str | None, as_json: bool, markdown: bool) -> Any:
    """Print every option: its meaning, default, value, and what set it (shipped file, --config, --set).

    The output is a configuration file. An option or section alone: sana-pipe config train.optim
    """
    from sana_pipe.config import load_given
    from sana_pipe.stages import config as stage

    if not markdown:
        return stage.run(*load_given(given.path, given.overrides), name, as_json=as_json)
    if name or as_json or given != _NOTHING:
        raise click.UsageError("--markdown is alone: it describes the options, not a configuration")
    return click.echo(stage.markdown())


@cli.command(
    examples=[
        "sana-pipe run /data/dog",
        "sana-pipe run /data/photos /data/drawings --config sana_1600m_1024 --set train.steps=4000",
    ]
)
@_given
@click.argument("data", nargs=-1, required=True, metavar="PATH|URL...")
@click.option(
    "--prompts",
    metavar="FILE|default",
    help="As for encode. Default, with train.pictures: prompts.txt next to the configuration.",
)
def run(given: _Given, data: tuple[str, ...], prompts: str | None) -> Any:
    """Encode, bucket, train, sample and export: the single commands one after the other, each printed as it starts.

    The same command continues after any end. With several GPUs, encode and train run under torchrun. --set goes to the
    commands that read the option. The exit code is that of the first command that fails.
    """
    from sana_pipe.config import load_given
    from sana_pipe.stages import run as stage

    return stage.run(*load_given(given.path, given.overrides), given.path, given.overrides, data, prompts)


_CODES = "exit-codes"


def _topics(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    names = [_CODES, *(name for name, command in cli.commands.items() if not command.hidden)]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@cli.command("help", examples=["sana-pipe help exit-codes", "sana-pipe help snapshots diff"])
@click.argument("topic", nargs=-1, metavar="[COMMAND|exit-codes]", shell_complete=_topics)
@click.pass_context
def show_help(context: click.Context, topic: tuple[str, ...]) -> None:
    """Print the help of a command, or the meaning of the exit codes (`sana-pipe help exit-codes`)."""
    if topic == (_CODES,):
        formatter = context.make_formatter()
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), _meaning(code)) for code in EXIT_CODES])
        return click.echo(formatter.getvalue().rstrip())
    command, above = cast("click.Command", cli), context.find_root()
    for word in topic:
        inner = command.get_command(above, word) if isinstance(command, click.Group) else None
        if inner is None:
            raise click.UsageError(f"There is no command {' '.join(topic)!r}; sana-pipe help lists them.")
        command, above = inner, click.Context(inner, above, word)
    return click.echo(command.get_help(above))


def _meaning(code: int) -> str:
    """Explain an exit code, and say which commands can end with it."""
    meaning, commands = EXIT_CODES[code]
    return meaning if not commands or len(commands) > _SOME else f"{meaning} [{', '.join(commands)}]"


_SOME = 4
"""More commands than this are not listed: those that read the cache."""


@cli.command(examples=["sana-pipe demo", "sana-pipe demo --quick --out demo2"])
@click.option("--out", default="./demo", show_default=True, metavar="DIR", help="Folder of the demonstration.")
@click.option("--quick", is_flag=True, help="A few steps only: shows that every stage runs, draws nothing good.")
def demo(out: str, quick: bool) -> Any:
    """Photographs to generated pictures with small models, on two cores, without downloads."""
    from sana_pipe.stages import demo as stage

    return stage.run(local_path(out), quick=quick)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line; always ends in SystemExit: 0, a UserError's code, 2 for wrong usage, 130 for Ctrl-C."""
    allow_many_files()
    as_json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    try:
        result = cli.main(args=arguments, prog_name="sana-pipe", standalone_mode=False)
    except click.Abort:
        click.echo("sana-pipe: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        if as_json:
            _print_object(Usage(error.format_message()))
        _end_restarts()
        sys.exit(error.exit_code)
    except Exception as error:
        known = shown(error)
        if isinstance(error, OSError) and error.errno in REFUSED and error.filename is not None:
            fix, path = "check the path, and who may read, enter and write its folders", Path(str(error.filename))
            known = not_permitted(path) or UserError(f"{path}: {error.strerror}", fix=fix)
        if as_json:
            _print_object(known if isinstance(known, UserError) else Defect(f"{type(error).__name__}: {error}"))
        if not isinstance(known, UserError):
            raise
        _print_error(known)
        if isinstance(known, ConfigError):
            _end_restarts()
        sys.exit(known.exit_code)
    sys.exit(result if isinstance(result, int) else 0)


class Usage(UserError):
    """A wrong command line, as an object: click prints its text."""


class Defect(UserError):
    """A defect, as an object: its traceback goes to stderr."""

    exit_code = DEFECT


def _print_object(error: UserError) -> None:
    """Print the object of an error in place of the result; once per launch, as the result."""
    with suppress(UserError):
        if not _is_main():
            return
    click.echo(json.dumps(error.as_object()))


def _end_restarts() -> None:
    """Keep torchrun from starting a wrong command line or configuration again and again."""
    from sana_pipe.base.launch import end_restarts

    with suppress(UserError):
        end_restarts()


def _print_error(error: UserError) -> None:
    """Print an error once per launch: rank 0 at once, another rank only errors that rank 0 does not have.

    An error that every rank finds for itself, such as a misspelt option, is not marked `everywhere`. The other ranks
    wait before they print it; rank 0's exit makes the launcher end them first.
    """
    from sana_pipe.base.launch import detect

    try:
        rank = detect().rank
    except UserError:
        rank = 0
    if rank:
        if error.everywhere or was_printed(error):
            return
        time.sleep(OTHER_RANK_DELAY_S)
    print_error(error, f"process {rank}: " if rank else "")


def console() -> NoReturn:
    """The installed command: `main`, then the end of the process. Warnings and log lines of libraries are hidden
    unless Python was asked for them (`PYTHONWARNINGS=default`)."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
    run_and_exit(main)


if __name__ == "__main__":
    console()
