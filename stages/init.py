"""`sana-pipe init`: look at the pictures, the card and the disk, and write a commented configuration.

What: scans the sources by their headers, as `encode --dry-run` does, asks `planning.recommend` which shipped
file fits and what to change in it, and writes `sana-pipe.yaml` and `prompts.txt`. Prints each change with its reason,
and what `plan` predicts.
Nothing is encoded, and no model is read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sana_pipe.base.amounts import amount
from sana_pipe.base.config import setting
from sana_pipe.base.disk import replacing
from sana_pipe.base.errors import UserError, escaped, writing
from sana_pipe.base.gpus import CPU, GIB
from sana_pipe.base.launch import Launch, gpus, unusable
from sana_pipe.base.processes import shown
from sana_pipe.base.yaml_text import from_yaml
from sana_pipe.config import LOCAL_NAME, Config, load, read_tree, validated
from sana_pipe.data.cache.cache import check_source_name
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.keys import fixed
from sana_pipe.data.encoders.latent_shape import latent_shape
from sana_pipe.data.encoders.text_kind import max_length, normalisation
from sana_pipe.data.encoding import estimate, refusals, scan_rows
from sana_pipe.data.encoding.look import Looked, check_usable
from sana_pipe.data.encoding.picture_commands import ALL_PICTURES
from sana_pipe.data.encoding.reading import settles
from sana_pipe.data.encoding.regularisation import class_of, places_of
from sana_pipe.data.encoding.survey import ScanSettings
from sana_pipe.data.images import buckets
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots.selection import is_held_out
from sana_pipe.data.sources import name_patterns
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.source import Place
from sana_pipe.tools.planning import auto, predict, recommend
from sana_pipe.tools.planning.expected import disk_lines, run_lines
from sana_pipe.tools.planning.predict import Data, Machine
from sana_pipe.tools.planning.recommend import Facts, Recommendation

PROMPTS = "prompts.txt"
COUNTED = 200
"""Up to so many pictures are read as a whole, to count those that a held-out part would have."""
SHOWN = 256
"""Captions of a source that are looked at."""
_OUT = "--out FILE in a folder that you may write to"


@dataclass(frozen=True)
class Options:
    """The options of the command line. purpose, trigger, model: see `recommend`. gpu, gpu_memory, gpus: of another
    machine; None: this one. force: replace the files. overrides: `a.b=c`, written into the file."""

    purpose: str | None = None
    trigger: str | None = None
    out: Path = Path(LOCAL_NAME)
    force: bool = False
    gpu: str | None = None
    gpu_memory: str | None = None
    gpus: int | None = None
    overrides: tuple[str, ...] = ()
    model: str = recommend.SANA


def run(data: Sequence[str], options: Options) -> int:
    """Write the configuration for one source or several.

    Raises:
        UserError: the file exists, a source cannot be read, nothing suits the pictures or the card (see `recommend`).
    """
    if options.out.exists() and not options.force:
        raise UserError(f"{options.out} exists already", fix="--force replaces it, --out FILE writes another file")
    _check_replaced(options.out)
    with writing(options.out, _OUT), tempfile.TemporaryFile(dir=options.out.parent):
        pass  # before hours of scanning
    machine = _machine(options)
    config = load(recommend.models_of(options.model), ["data.caption=none", *options.overrides])
    names = [open_source(each, config.data, patience_s=config.patience_s).name for each in data]
    for name in names:
        check_source_name(name)
        if names.count(name) > 1:
            raise UserError(
                "two sources have the same name", found=name, fix="rename a folder; its name is the source's"
            )
    latent = latent_shape(config.vae)
    shapes = buckets.table(config.data, predict.COMPRESSION if latent is None else latent[0])
    settings = ScanSettings(config.data, config.encode.workers, shapes)
    looked = [Looked.of(each, settings, config.patience_s) for each in data]
    for line in [*(line for each in looked for line in each.lines()), *_card(machine)]:
        click.echo(line)
    for each in looked:
        _refuse(config, each, data, options)
    check_usable(looked)
    trigger = None if options.trigger is None else " ".join(options.trigger.split())
    subject = _subject(looked, trigger)
    facts = _facts(config, subject, machine, options.gpus or 1)
    made = recommend.recommend(facts, options.purpose, trigger or None, options.model)
    _add_reading(made, looked, data)
    made.override(options.overrides)
    text = made.file(shown("init", *_words(data, options)))
    written = validated(from_yaml(text), options.out, {text.partition("=")[0]: text for text in options.overrides})
    regularisation = [each for each in looked if each not in subject]
    lines = [line for each in looked if each in subject for line in _taken(each, written)]
    lines += made.notes
    lines.append(f"  {made.origin}; what is changed for these pictures and this card:")
    lines += [choice.line() for choice in made.choices]
    lines += expected(written, made, looked, machine)
    lines += _write(options, text, made)
    lines += [line for each in regularisation for line in _regularisation(each, written, options)]
    for line in [*lines, *_next(options, data, machine)]:
        click.echo(line)
    return 0


def _check_replaced(out: Path) -> None:
    """Raise a UserError if a file is there that is no configuration: `--force` would replace it."""
    if out.exists():
        try:
            if read_tree(out).keys() <= Config.model_fields.keys():
                return
        except UserError:
            pass
        raise UserError(f"{out} exists and is not a configuration of sana-pipe", fix="--out FILE writes another file")


def _refuse(config: Config, each: Looked, data: Sequence[str], options: Options) -> None:
    """Raises a UserError for pictures that are likely masks, control pictures or regularisation pictures, and for files
    that are likely captions."""
    refusals.check_loose(each.taken)
    if not any(text.startswith("data.caption=") for text in options.overrides):
        refusals.check_lists(each.taken)

    def command(settings: Sequence[str], places: Sequence[str] = data) -> str:
        words = _words(places, options)
        words += [word for text in (*options.overrides, *settings) for word in ("--set", text)]
        machine = (("--gpu", options.gpu), ("--gpu-memory", options.gpu_memory), ("--gpus", options.gpus))
        words += [word for name, value in machine if value is not None for word in (name, str(value))]
        words += ["--force"] * options.force
        return shown("init", *words, *(["--out", str(options.out)] if _config(options) else []))

    if settles(config.data_given, "pictures"):
        reached = options.trigger is not None or not each.taken.captioned
        if not any(text.startswith("data.caption=") for text in options.overrides) and any(
            given is not None for _, given in config.data.pictures
        ):
            refusals.check_rest(each.taken, command, reached, ())
        return
    refusals.check(each.taken, command)
    if each.taken.regularisation and (options.trigger is not None or not each.taken.captioned):
        subject, other = places_of(each.taken)
        apart = [place for one in data for place in ([subject, other] if one == each.data else [one])]
        found = [f"{one.count} such as {escaped(one.example)}" for one in each.taken.regularisation]
        raise UserError(
            f"the folder {each.taken.regularisation[0].value!r} of {each.data!r} is named like regularisation "
            "pictures, which would be learned as the subject",
            expected="a source for the subject, and another for the regularisation pictures",
            found="; ".join(found),
            fix=f"as two sources: {command([], apart)}; if all are of the subject: {command([ALL_PICTURES])}",
        )


def _subject(looked: Sequence[Looked], trigger: str | None) -> list[Looked]:
    """The sources that get the trigger word: all but those of regularisation pictures."""
    others = [each for each in looked if not name_patterns.is_regularisation(each.source.name)]
    needs_word = trigger is not None or not any(each.taken.captioned for each in others)
    return others if others and needs_word else list(looked)


def _regularisation(each: Looked, config: Config, options: Options) -> list[str]:
    """Say how a source of regularisation pictures is encoded: without the trigger word."""
    trigger = config.data.caption_prefix or config.data.caption or ""
    what = (
        f"the name of source {each.source.name!r} says that it has regularisation pictures: encode gives it no trigger "
        "word"
    )
    if each.taken.captioned == each.taken.usable:
        return [what]
    settings = [f"data.caption={class_of(trigger)}"]
    words = ["encode", "--data", each.data, *_config(options)]
    words += [word for text in settings for word in ("--set", text)]
    return [f"{what}. First, for those without a caption: {shown(*words)}"]


def _add_reading(made: Recommendation, looked: Sequence[Looked], data: Sequence[str]) -> None:
    """Put the column of the captions among the choices, and what uses the masks.

    Raises:
        UserError: sources have their captions in different columns.
    """
    fields = {each.field for each in looked if each.taken.captioned or each.field}
    if len(fields) > 1:
        first = next(each for each in looked if each.field)
        raise UserError(
            "the sources have their captions in different columns",
            found="; ".join(f"{each.data}: {each.field or each.source.rule.columns[0]}" for each in looked),
            fix=f"leave {first.data} out, and then {shown('encode', '--data', first.data)} "
            f"{setting('data.caption_field', first.field)}, which it remembers",
        )
    for field in filter(None, fields):
        made.add("data.caption_field", field, "the column that holds the captions")
    if any(each.taken.controls_and_masks.get(name_patterns.MASK) for each in looked):
        made.add("train.mask", {}, "the pictures have masks: what is white in them is learned")
    for kind, page in ((name_patterns.CONTROL, "controlnet"), (name_patterns.REJECTED, "preferences")):
        if any(each.taken.controls_and_masks.get(kind) for each in looked):
            made.notes.append(
                f"{kind} pictures are encoded, and {made.purpose} training does not use them: docs/guides/{page}.md"
            )


def _taken(each: Looked, config: Config) -> list[str]:
    """Say what a source was taken for, with captions as the file makes them."""
    return each.taken.lines(config.data, normalisation(config.text))


def _facts(config: Config, looked: Sequence[Looked], machine: Machine | None, gpus: int) -> Facts:
    usable = pa.concat_tables([each.usable for each in looked])
    sized = usable.filter(pc.is_valid(usable.column("width")))
    heights, widths = (sized.column(side).to_numpy().astype(np.int64) for side in ("height", "width"))
    captioned, shown = 0, list[str]()
    for each in looked:
        texts = each.captions() if each.usable.num_rows else pa.array([], pa.string())
        texts = texts.filter(pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0))
        captioned += len(texts)
        rows = np.unique(np.linspace(0, max(0, len(texts) - 1), SHOWN).astype(np.int64))
        shown += texts.take(pa.array(rows)).to_pylist() if len(texts) else []
    return Facts(
        heights,
        widths,
        usable.num_rows,
        captioned,
        tuple(shown),
        _held_out(config, looked) if usable.num_rows <= COUNTED else None,
        None if machine is None else machine.memory / GIB,
        gpus if machine is None else machine.gpus,
    )


def _held_out(config: Config, looked: Sequence[Looked]) -> int:
    """Count how many of a few pictures the share of `recommend.HELDOUT` holds out: their digests decide."""
    digests = [
        digest
        for each in looked
        for place in each.usable.select(Place._fields).to_pylist()
        if (digest := scan_rows.from_bytes(each.source, Place(**place), config.data.max_pixels).get("digest"))
        is not None
    ]
    column = fixed(pa.array(digests, pa.binary(16)))
    return int(is_held_out(column, recommend.HELDOUT[-1][1]).sum()) if digests else 0


def _machine(options: Options) -> Machine | None:
    """The cards that were asked for, else those that are here; None: no GPU."""
    if options.gpu == CPU:
        return None
    if options.gpu is not None or options.gpu_memory is not None:
        return auto.named(options.gpu, options.gpu_memory, options.gpus or 1)
    there = gpus()
    if there.problem is not None:
        refused = unusable(there, "train.device")
        raise UserError(refused.what, found=refused.found, fix=f"{there.fix}; or name the card: --gpu 4090, --gpu cpu")
    if not there.count:
        return None
    here = auto.present(torch.device("cuda", 0), Launch())
    return replace(here, gpus=options.gpus or there.count)


def _words(data: Sequence[str], options: Options) -> list[str]:
    """The words of the command that say what to make of what."""
    words = [word for each in data for word in ("--data", each)]
    words += [] if options.model == recommend.SANA else ["--model", options.model]
    words += [] if options.purpose is None else ["--for", options.purpose]
    return words + ([] if options.trigger is None else ["--trigger", options.trigger])


def _write(options: Options, text: str, made: Recommendation) -> list[str]:
    with writing(options.out, _OUT):
        with replacing(options.out) as work:
            work.write_text(text, encoding="utf-8")
        prompts = options.out.with_name(PROMPTS)
        if prompts.exists() and not options.force:
            return [f"{prompts} exists already and is left unchanged (--force replaces it, too)"]
        if made.prompts:
            with replacing(prompts) as work:
                work.write_text("".join(f"{line}\n" for line in made.prompts), encoding="utf-8")
    return []


def _card(machine: Machine | None) -> list[str]:
    if machine is None:
        return ["card: no GPU here; the values are for any card with enough memory (--gpu NAME chooses for one)"]
    name = f"{machine.card.name}'s speed" if machine.assumed else machine.card.name
    return [f"card: {machine.gpus} x {amount(machine.memory)} ({name})"]


def expected(config: Config, made: Recommendation, looked: Sequence[Looked], machine: Machine | None) -> list[str]:
    """Memory, time and disk space, by what `plan` and `encode --dry-run` compute.

    Raises:
        NothingFitsError: nothing fits into the card, as predicted.
    """
    longest, latent = max_length(config.text), latent_shape(config.vae)
    compression = None if latent is None else latent[0]
    data = Data.configured(config.model, config.data, config.bucket, longest, compression)
    data = replace(data, samples=made.trained)
    shape = predict.architecture(config.model, config.data.resolution, data)
    pixels, channels = latent or (data.compression, data.channels)
    pictures = LatentEncoding(compression=pixels, channels=channels)
    captions = TextEncoding(max_length=longest, width=data.text_width)
    cache = sum(estimate.likely_bytes(each.table, config.data, pictures, captions) for each in looked)
    free = Files(config.cache, config.mirror, config.patience_s).free_bytes()
    return [
        *run_lines(config.train, shape, data, machine, config.supports),
        *disk_lines(config.train, shape, data, cache, free),
    ]


def _config(options: Options) -> list[str]:
    return [] if options.out == Path(LOCAL_NAME) else ["--config", str(options.out)]


def _next(options: Options, data: Sequence[str], machine: Machine | None) -> list[str]:
    """Say where the file is, and the command that uses it."""
    config = _config(options)
    lines = [f"written: {options.out}"]
    if machine is not None and machine.nodes > 1:
        lines.append(f"for {machine.nodes} nodes: sana-pipe encode, bucket and train, as in configs/launch")
    where = "" if machine is not None else "   # on a machine with a GPU"
    return [*lines, f"next: {shown('run', *data, *config)}{where}"]
