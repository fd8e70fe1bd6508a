"""The reading of a source: captions, masks, control pictures, in a few lines for people, for `init` and `encode`.

Law: nothing that could be a caption, a mask, a control picture or a trigger word is silently taken for something else
or ignored. `Understood.lines` say what was taken for what, with a caption as the model reads it, and what else a name
may mean. Where a default caption or a trigger word would reach pictures that are likely something else, `check` refuses
with both readings; `data.pictures: {}` says that all are pictures of their own.
Price: captions are looked at in a sample of `SHOWN`, names as `pipeline.sources.name_patterns` does.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.arrow import batches, spread_rows
from pipeline.cache.cache import Cache
from pipeline.cache.prompts import has_words
from pipeline.cache.scan_table import ABSENT, places
from pipeline.config import DataConfig, DataGiven, setting
from pipeline.encoding import remarks
from pipeline.encoding.reading import Reading
from pipeline.errors import UserError, escaped
from pipeline.sources import caption_rules, caption_signs, name_patterns, unread_lists
from pipeline.sources.caption_columns import TEXT_FILE, CaptionCandidate, CaptionRule, text_columns
from pipeline.sources.caption_signs import Sign
from pipeline.sources.filenames import extension, shortened, stem
from pipeline.sources.filesystem import Unreadable
from pipeline.sources.name_pairs import Pair
from pipeline.sources.name_patterns import CONTROL, MASK, Pattern
from pipeline.sources.reject_kinds import examples
from pipeline.sources.sidecars import MAX_CAPTION_BYTES, read_sidecar
from pipeline.sources.source import Source
from pipeline.sources.unread_lists import UnreadList

SHOWN = 256
"""Captions of a source that are looked at."""
LENGTH = 160
"""Characters of a caption that are printed."""
ALL_PICTURES = "data.pictures={}"
"""The setting that says that all pictures are pictures of their own."""

_OF_FILES = {"image", "images", "file", "path", "mask", "masks", "control", "conditioning", "canny", "depth"}
"""Words in the names of columns that hold pictures, where only their names are known."""


@dataclass(frozen=True)
class Understood:
    """The reading of a scan: what its files, captions and further pictures were taken for.

    Attributes:
        usable: pictures. captioned: those with a caption of their own, usable or not.
        origins: where captions were read from, as far as this scan read any.
        captions: some of them, as the scan has them, with their items; those of pictures with a caption of their own.
        further: usable pictures with a further picture, by kind. lacking: those without one.
        patterns: what names say of pictures without a caption. regularisation: folders of such pictures.
        loose: files that read as captions of pictures without one, and are not used.
        lists: files that name pictures without a caption, and are not used.
        notes: what else should be looked at, for people. signs: of other meanings, in the captions of the scan.
    """

    source: Source
    data: DataConfig
    usable: int
    captioned: int
    origins: tuple[str, ...]
    captions: tuple[tuple[str, str], ...]
    further: dict[str, int]
    lacking: dict[str, int]
    patterns: tuple[Pattern, ...]
    regularisation: tuple[Pattern, ...]
    loose: tuple[Pattern, ...]
    lists: tuple[UnreadList, ...]
    notes: tuple[str, ...]
    signs: tuple[Sign, ...]

    def lines(self, data: DataConfig, normalisation: str) -> list[str]:
        """Describe it for people. data: the settings that the captions will be made with; normalisation: of the text
        recipe."""
        return [*self.summary(data, normalisation), *self.remarks(data)]

    def summary(self, data: DataConfig, normalisation: str) -> list[str]:
        """Return what was taken for what."""
        further = [f"{kind} pictures: {count} of {self.usable}" for kind, count in self.further.items()]
        return [*self._captions(data, normalisation), *further]

    def remarks(self, data: DataConfig) -> list[str]:
        """Say what was not used, and may be meant. data: the settings that the captions will be made with."""
        patterns = [_said(each, self.source) for each in self.patterns]
        lists = [f"{escaped(each.file)} names pictures without a caption and is not used" for each in self.lists]
        signs = [*self._twice(data), *caption_signs.said(self.signs, data)]
        return [*patterns, *map(_said_loose, self.loose), *lists, *self.notes, *signs]

    def _twice(self, data: DataConfig) -> Iterator[str]:
        """Captions that have the trigger word already."""
        word, before = data.caption_prefix.strip().rstrip(",;:. "), self.data.caption_prefix
        texts = [text.removeprefix(before) for _, text in self.captions if text.startswith(before)]
        if word and (twice := [text for text in texts if has_words(text, word)]):
            yield (
                f"captions: {len(twice)} of {len(texts)} that were looked at have {escaped(word)!r} already and get it "
                f"a second time: {escaped(shortened(twice[0], LENGTH))!r} "
                f"({setting('data.caption_prefix', '')} if all have it)"
            )

    @property
    def remedy(self) -> str | None:
        """Say what a user can do where pictures without a caption are too many; None: their names say nothing."""
        if self.data.caption is not None:
            return None
        lines = [_beside(self.source, each) for each in self.loose]
        lines += _commands(self.patterns, self.source, lambda settings: " ".join(map(_option, settings)))
        return "; ".join(lines) or None

    def _captions(self, data: DataConfig, normalisation: str) -> list[str]:
        lacking = self.usable - self.captioned
        origin = f" ({' and '.join(self.origins)})" if self.origins else ""
        what = f"captions: {self.captioned} of {self.usable} pictures{origin}"
        if lacking > 0 and data.caption is not None:
            what += f"; the other {lacking} get " + setting("data.caption", data.caption).removeprefix("--set ")
        elif lacking > 0:
            what += f"; the other {lacking} are left out"
        lines = [what]
        if self.captions:
            item, text = self.captions[0]
            if data != self.data:
                text = _made(data, text, item, self.source.name)
            seen = escaped(shortened(caption_rules.normalise(text, normalisation), LENGTH))
            lines.append(f"  as the model reads one: {seen!r} ({escaped(item)})")
        elif lacking > 0 and data.caption is not None and data.caption not in ("none", "filename", "folder"):
            text = caption_rules.normalise(_made(data, "", "", self.source.name), normalisation)
            lines.append(f"  as the model reads it: {escaped(shortened(text, LENGTH))!r}")
        return lines


def of(source: Source, scan: pa.Table, data: DataConfig, is_chosen: bool | None = None) -> Understood:
    """Return what a scan was taken for.

    Args:
        data: the settings that it was made with.
        is_chosen: whether the user named the column of the captions; None: if it is not the default one.
    """
    usable = pc.is_null(scan.column("reject"))
    has_caption = _has_caption(scan, data, source.name)
    items, both = scan.column("item"), pc.and_(usable, has_caption)
    some = spread_rows(scan.select(["item", "captions", "meta"]), both, SHOWN).to_pylist()
    is_chosen = not source.rule.is_default if is_chosen is None else is_chosen
    columns = {} if is_chosen else remarks.other_columns(source.rule, some)
    others = [*remarks.said(source.rule, columns), *remarks.unnamed(source, scan)]
    others += [*remarks.several_pictures(source, scan), *remarks.further_members(source)]
    captions = tuple((row["item"], row["captions"][0]["text"]) for row in some)
    by_name = source.further_by & {"suffix", "folder"}
    patterns = name_patterns.further(items, has_caption) if by_name else []
    loose = [each for each in name_patterns.captions(source.loose, items, has_caption) if _reads(source, each.example)]
    files = list[str]()
    if "suffix" in source.further_by:  # of tables, what is ignored are rows
        ignored = (file for some in source.ignored.examples.values() for file in some)
        rejected = _names(scan, pc.invert(usable))
        files = unread_lists.candidates(ignored, rejected)
    bare = _names(scan, pc.and_(usable, pc.invert(has_caption))) if files else []
    lists = unread_lists.naming(source.read_beside, files, bare) if bare else ()
    labelled = bool(data.caption_prefix.strip()) or data.caption is not None
    number, further = _true(usable), _further(scan, data)
    return Understood(
        source,
        data,
        number,
        _true(both),
        _origins(source.rule, columns),
        captions,
        further,
        {kind: number - count for kind, count in further.items()},
        tuple(pattern for pattern in patterns if not _is_used(pattern, data)),
        tuple(name_patterns.regularisation(items)) if by_name and labelled else (),
        tuple(loose),
        tuple(lists),
        (*_notes(source, data, number, _true(both)), *others, *caption_signs.without_variants(scan, data)),
        tuple(caption_signs.signs(scan)),
    )


def check(understood: Understood, command: Callable[[Sequence[str]], str], accepted: Iterable[Pattern] = ()) -> None:
    """Refuse pictures that are likely something else.

    Args:
        command: settings -> the command that uses them.
        accepted: patterns of pictures that an earlier scan took for pictures of their own.

    Raises:
        UserError: with both readings as commands.
    """
    old = {(pattern.way, pattern.value) for pattern in accepted}
    new = [pattern for pattern in understood.patterns if (pattern.way, pattern.value) not in old]
    if new:
        own = f"all are pictures of their own: {command([ALL_PICTURES])}"
        raise UserError(
            f"{sum(pattern.count for pattern in new)} pictures of source {understood.source.name!r} without a caption "
            "look like masks or control pictures of the others",
            expected="pictures that are to be learned, or the setting that says what the others are",
            found="; ".join(f"{pattern.count} such as {escaped(pattern.example)}" for pattern in new),
            fix="; ".join([*_commands(new, understood.source, command), own]),
        )


def check_rest(
    understood: Understood, command: Callable[[Sequence[str]], str], reached: bool, seen: Sequence[Pattern]
) -> None:
    """Refuse pictures that are likely masks or control pictures beside those that `data.pictures` finds.

    Args:
        command: as of `check`. reached: whether they get a default caption. seen: patterns of an earlier scan.

    Raises:
        UserError: they would be trained as pictures, or samples without one get a blank one.
    """
    old, rest = {(pattern.way, pattern.value) for pattern in seen}, list[Pattern]()
    for pattern in understood.patterns:
        given = dict(understood.data.pictures).get(pattern.kind)
        is_blank = given is not None and not given.required and bool(understood.lacking.get(pattern.kind))
        if pattern.kind and (pattern.way, pattern.value) not in old and (reached or is_blank):
            rest.append(pattern)
    if not rest:
        return
    ways = [way for each in rest if (way := _joining(each, understood)) is not None]
    ways += [
        f"move {escaped(each.example)} and the others like it out of the data, and then the same command"
        for each in rest
    ]
    if reached:
        ways.append(f"as pictures with a caption: {command(['data.caption=a picture'])}")
    raise UserError(
        f"{sum(each.count for each in rest)} pictures of source {understood.source.name!r} without a caption look like "
        "masks or control pictures, and data.pictures does not find them",
        expected="masks and control pictures where data.pictures finds them, and no others",
        found="; ".join(f"{each.count} such as {escaped(each.example)} of {escaped(each.of)}" for each in rest),
        fix="; ".join(ways),
    )


def _joining(pattern: Pattern, understood: Understood) -> str | None:
    """The shell command that gives further pictures the suffix that is configured for their kind; None: there is none,
    or their pictures have one."""
    given, source = dict(understood.data.pictures).get(pattern.kind), understood.source
    is_named = given is not None and given.suffix and pattern.way == "suffix" and understood.lacking.get(pattern.kind)
    if not is_named or source.is_remote or source.format != Source.format:
        return None
    assert given is not None and given.suffix is not None
    pair = Pair(pattern.example, pattern.of, "", pattern.value, "", given.suffix)
    return f"as {pattern.kind}: {pair.command(source.location, '')}, and then the same command"


def settles(given: DataGiven, option: str) -> bool:
    """Return whether the user gives an option of `data`, or of a section of this name."""
    return option in {name.partition(".")[0] for name in (*given.overridden, *given.named)}


def refuse(understood: Understood, given: DataGiven, scan: pa.Table, cache: Cache | None) -> None:
    """`check` for `encode`, where a default caption or a prefix reaches pictures that are likely something else.

    Args:
        given: the origin of the settings. cache: which knows what an earlier scan accepted.
    """
    data, source = understood.data, understood.source

    def command(settings: Sequence[str]) -> str:
        return f"the same command with {' '.join(map(_option, settings))}"

    document = None if cache is None else cache.last_scan(source.name)
    if document is None:
        check_loose(understood)
        if not settles(given, "caption"):
            check_lists(understood)
    has_further = any(each is not None for _, each in data.pictures)
    if understood.patterns and (has_further or (data.caption is not None and not settles(given, "pictures"))):
        accepted: list[Pattern] = []
        if cache is not None and document is not None:
            before = cache.table(document["table"], ["item", "captions", "reject"])
            if data.caption is not None:
                before = before.filter(pc.is_null(before.column("reject")))
            accepted = name_patterns.further(before.column("item"), _has_caption(before, data, source.name))
        if not has_further:
            check(understood, command, accepted)
        elif "caption" not in given.overridden and (document or not settles(given, "caption")):
            check_rest(understood, command, data.caption is not None, accepted)
    option = "caption_prefix" if data.caption_prefix.strip() else "caption"
    word = getattr(data, option) or ""
    reached = understood.usable - (understood.captioned if option == "caption" else 0)
    if document is not None or not reached or word in ("", "none", "filename", "folder"):
        return
    if name_patterns.is_regularisation(source.name):
        if option == "caption" and option not in given.overridden:
            raise UserError(
                f"source {source.name!r} is called like regularisation pictures, and its captions would be "
                f"{word!r} (data.caption) like those of the subject",
                expected="captions without the trigger word for regularisation pictures",
                fix=f"without it: {command([f'data.caption={class_of(word)}'])}; with it: "
                f"{command([f'data.caption={word}'])}",
            )
    elif understood.regularisation and not settles(given, "pictures"):
        raise UserError(
            f"the folder {understood.regularisation[0].value!r} of source {source.name!r} is called like "
            f"regularisation pictures, and its captions would get {word!r} (data.{option}) like those of the subject",
            expected="a source for the subject, and another for the regularisation pictures",
            found=_reg_found(understood),
            fix=f"two commands, with --data {shlex.quote(places_of(understood)[0])} and with --data "
            f"{shlex.quote(places_of(understood)[1])}; with it: {command([ALL_PICTURES])}",
        )


def without_trigger(reading: Reading, name: str, scan: dict[str, Any] | None) -> Reading:
    """Say how a source is read, without the prefix of the configuration where it is called like regularisation
    pictures, unless `--set` gives it now or gave it at an earlier scan.

    Args:
        name: of the source. scan: its last scan document.
    """
    prefix = reading.data.caption_prefix
    used = (scan or {}).get("read", {}).get("used", {}).get("caption_prefix", "")
    given = "caption_prefix" in reading.given.overridden or used.strip()
    if not prefix.strip() or given or not name_patterns.is_regularisation(name):
        return reading
    data = reading.data.model_copy(update={"caption_prefix": ""})
    note = (
        f"source {name!r} is called like regularisation pictures: its captions are made without data.caption_prefix "
        f"({setting('data.caption_prefix', prefix)} gives it to them, too)"
    )
    notes = [each for each in reading.notes if "data.caption_prefix" not in each]
    return replace(reading, data=data, notes=(*notes, note))


def places_of(understood: Understood) -> tuple[str, str]:
    """Return where the pictures of the subject and the regularisation pictures are, if two folders have them."""
    root, [first, *_] = understood.source.location.rstrip("/"), understood.regularisation
    return f"{root}/{first.of}".rstrip("/"), f"{root}/{first.value}"


def class_of(trigger: str) -> str:
    """A caption for regularisation pictures: the trigger word without its first word."""
    words = trigger.strip().rstrip(",;:. ").split()
    return " ".join(words[1:]) or "a picture"


def _reg_found(understood: Understood) -> str:
    return "; ".join(f"{each.count} such as {escaped(each.example)}" for each in understood.regularisation)


def settings_of(pattern: Pattern) -> list[str]:
    """The settings of the readings of a pattern."""
    if pattern.pair is not None:
        return [f"data.pictures.{pattern.kind}.folder={pattern.folder}"]
    kinds = [pattern.kind] if pattern.kind else [MASK, CONTROL]
    return [f"data.pictures.{kind}.{pattern.way}={pattern.value}" for kind in kinds]


def check_loose(understood: Understood) -> None:
    """Refuse files that are likely captions of pictures without one.

    Raises:
        UserError: with the command that puts them beside their pictures.
    """
    source, loose = understood.source, understood.loose
    if loose:
        raise UserError(
            f"pictures of source {source.name!r} have no caption, and files that are not read look like theirs",
            expected="captions next to their pictures: X.txt for X.jpg",
            found="; ".join(f"{each.count} such as {escaped(each.example)} for {escaped(each.of)}" for each in loose),
            fix="; ".join(dict.fromkeys(_beside(source, each) for each in loose))
            + f", and then {_then(source, loose)}; or move them out of the data if they are no captions",
        )


def check_lists(understood: Understood) -> None:
    """Refuse files that name pictures without a caption and are not read.

    Raises:
        UserError: with how to make them be read.
    """
    source, lists = understood.source, understood.lists
    if lists:
        first = lists[0]
        fix = first.fix(source.location) if source.format == Source.format else _unpacking(source, first)
        raise UserError(
            f"pictures of source {source.name!r} have no caption, and {escaped(first.file)}, which is not used, names "
            "them with words next to their names",
            expected="captions in a file that is read: docs/encoding.md has a table of them",
            found="; ".join(f"{escaped(each.file)}: {escaped(each.name)}" for each in lists),
            fix=f"{fix}; if it holds no captions, the same command with " + setting("data.caption", "a picture"),
        )


def _beside(source: Source, pattern: Pattern) -> str:
    """Says how files of captions come beside their pictures, on a disk as a shell command."""
    pair = pattern.pair
    assert pair is not None
    ending = "json" if extension(pair.file) == "json" else "txt"
    tars = _tars_of(source, pair)
    if source.is_remote or tars is None or tars[0] != tars[1]:
        return f"store {escaped(pair.file)} as {escaped(stem(pair.picture))}.{ending}, and the others like it"
    numbered = re.fullmatch("[-_. ][0-9]+", pair.after) is not None
    more = f" ({setting('data.caption_parts', 'captions')} with it)" if numbered else ""
    if not (tar := tars[0]):
        return _copying(source.location, pair, ending, numbered) + more
    inside = replace(pair, file=pair.file.removeprefix(f"{tar}/"), picture=pair.picture.removeprefix(f"{tar}/"))
    places = (posixpath.join(place, posixpath.dirname(tar)).rstrip("/") for place in (source.location, _copy(source)))
    old, new = map(shlex.quote, places)
    listed = f'find . -type f | LC_ALL=C sort | tar -cf {new}/"${{t##*/}}" -T -'
    return (
        f'mkdir -p {new} && for t in {old}/*.tar; do d=$(mktemp -d) && tar -xf "$t" -C "$d" && '
        f'(cd "$d" && {_copying(".", inside, ending, numbered)}; {listed}) && rm -r "$d"; done{more}'
    )


def _tars_of(source: Source, pair: Pair) -> tuple[str, str] | None:
    """The tars of a file and of its picture, "" of what is no member; None: the source is neither tars nor a folder."""
    if "suffix" not in source.further_by:
        return None
    tars = [next((tar for tar in source.files if name.startswith(f"{tar}/")), "") for name in (pair.file, pair.picture)]
    return tars[0], tars[1]


def _copy(source: Source) -> str:
    """The folder for tars with captions beside their pictures."""
    return f"{source.location.rstrip('/')}-captions"


def _unpacking(source: Source, first: UnreadList) -> str:
    """Says how tars become a folder with a list of its pictures, on a disk as a shell command."""
    if source.is_remote:
        return f"put the captions of X.jpg into members X.txt in place of {escaped(first.file)}"
    tars, new = shlex.quote(source.location), shlex.quote(f"{source.location.rstrip('/')}-unpacked")
    command = f'mkdir -p {new} && for t in {tars}/*.tar; do tar -xkf "$t" -C {new}; done'
    if not any(first.file.startswith(f"{tar}/") for tar in source.files):
        command += f" && cp -n {shlex.quote(posixpath.join(source.location, first.file))} {new}/"
    return f"{command}, and then the same command with --data {new}"


def _then(source: Source, patterns: Iterable[Pattern]) -> str:
    """The command after those of `_beside`."""
    every = [_tars_of(source, each.pair) for each in patterns if each.pair is not None]
    in_tars = not source.is_remote and all(tars is not None and tars[0] and tars[0] == tars[1] for tars in every)
    return "the same command" + (f" with --data {shlex.quote(_copy(source))}" if in_tars else "")


def _copying(location: str, pair: Pair, ending: str, numbered: bool) -> str:
    """A shell command that copies files of captions beside their pictures. numbered: they are joined."""
    file, picture = pair.file, pair.picture
    above, other = PurePosixPath(file).parent, PurePosixPath(picture).parent
    same = stem(posixpath.basename(file)) == stem(posixpath.basename(picture)) and extension(file) == ending
    if same:
        while above.name == other.name and above.name:
            above, other = above.parent, other.parent
    if above.name and same:
        places = (shlex.quote(f"{location}/{place}".removesuffix("/.")) for place in (above, other))
        return "cp -rn {}/. {}/".format(*places)
    into = posixpath.relpath(posixpath.dirname(picture) or ".", posixpath.dirname(file) or ".")
    return pair.command(location, "" if into == "." else into, ending, "" if numbered else "cp -n")


def _reads(source: Source, file: str) -> bool:
    """Tell whether a file reads as a caption: text of more words than numbers, or a JSON object with such a column."""
    with suppress(Unreadable):
        content = read_sidecar(file, source.read_beside(file, MAX_CAPTION_BYTES))
        if isinstance(content, dict):
            return bool(source.rule.columns) and (
                source.rule.has_caption_column(content) or bool(text_columns(content))
            )
        words = content.split() if isinstance(content, str) else []
        return 2 * sum(any(map(str.isalpha, word)) for word in words) > len(words) and not words[0].startswith("<")
    return False


def _option(text: str) -> str:
    return f"--set {shlex.quote(text)}"


def _commands(patterns: Sequence[Pattern], source: Source, command: Callable[[Sequence[str]], str]) -> list[str]:
    """A command for each choice of one mask and one control picture."""
    masks: list[Pattern | None] = [each for each in patterns if each.kind == MASK]
    controls: list[Pattern | None] = [each for each in patterns if each.kind == CONTROL]
    lines = []
    for mask in masks or [None]:
        for control in controls or [None]:
            chosen = [each for each in (mask, control) if each is not None]
            if chosen:
                names = " and ".join(name for name, each in ((MASK, mask), (CONTROL, control)) if each is not None)
                steps = [_renaming(each, source) for each in chosen if each.pair is not None]
                made = command([settings_of(each)[0] for each in chosen])
                joint = " && " if made.startswith("sana-pipe ") and not source.is_remote else ", then "
                lines.append(f"as {names}: {joint.join([*steps, made])}")
    for pattern in patterns:
        if not pattern.kind:
            lines += [
                f"as {kind}: {command([each])}"
                for kind, each in zip((MASK, CONTROL), settings_of(pattern), strict=True)
            ]
    return lines


def _renaming(pattern: Pattern, source: Source) -> str:
    """Says how further pictures get the names that `data.pictures` needs, on a disk as a shell command."""
    pair = pattern.pair
    assert pair is not None
    into = "" if pair.folder else pattern.folder
    if source.is_remote or source.format != Source.format:
        folder = posixpath.join(posixpath.dirname(pair.file), into)
        name = f"{posixpath.join(folder, stem(posixpath.basename(pair.picture)))}.{extension(pair.file)}"
        return f"name {escaped(pair.file)} {escaped(name)}, and the others like it"
    return pair.command(source.location, into)


def _said(pattern: Pattern, source: Source) -> str:
    what = {MASK: "masks", CONTROL: "control pictures"}.get(pattern.kind, "masks or control pictures")
    ways = " or ".join(map(_option, settings_of(pattern)))
    if pattern.pair is not None:
        ways = f"{_renaming(pattern, source)}, then {ways}"
    return (
        f"{pattern.count} pictures without a caption look like {what} and are not used as such: "
        f"{escaped(pattern.example)} of {escaped(pattern.of)} ({ways})"
    )


def _said_loose(pattern: Pattern) -> str:
    return (
        f"{pattern.count} files that look like captions of pictures without one are not used: "
        f"{escaped(pattern.example)} of {escaped(pattern.of)}"
    )


def _is_used(pattern: Pattern, data: DataConfig) -> bool:
    return any(each is not None and getattr(each, pattern.way, None) == pattern.value for _, each in data.pictures)


def _made(data: DataConfig, text: str, item: str, source: str) -> str:
    """A caption as a source makes it; of no text the default caption."""
    candidates = [CaptionCandidate(text)] if text else []
    made, _ = CaptionRule(data).weigh(candidates, item, source)
    return made[0][0] if made else ""


def _has_caption(scan: pa.Table, data: DataConfig, source: str) -> pa.ChunkedArray:
    """Return whether each item has a caption that is not the default."""
    chunks = []
    for batch in batches(scan.select(["item", "captions"])):
        captions = batch.column("captions")
        there = pc.fill_null(pc.greater(pc.list_value_length(captions), 0), False)
        if data.caption is not None:
            filled = pc.if_else(there, captions, pa.scalar([{"text": "", "weight": 0.0}], captions.type))
            texts = pc.struct_field(pc.list_element(filled, 0), "text")
            default = _default(batch.column("item"), data, source)
            wrapped = pc.binary_join_element_wise(data.caption_prefix, default, "")
            there = pc.and_(there, pc.not_equal(texts, wrapped))
        chunks += there.chunks
    return pa.chunked_array(chunks, pa.bool_())


def _default(items: pa.Array, data: DataConfig, source: str) -> pa.Array | pa.Scalar:
    """Return what `CaptionRule` gives items without a caption."""
    if data.caption == "none":
        return pa.scalar("")
    if data.caption == "filename":
        names = pc.replace_substring_regex(pc.replace_substring_regex(items, r"\.[^./]*$", ""), "^.*/", "")
    elif data.caption == "folder":
        names = pc.replace_substring_regex(items, "(?:^|/)[^/]*$", "")
        names = pc.replace_substring_regex(names, "^.*/", "")
        names = pc.if_else(pc.equal(names, ""), source, names)
        names = pc.replace_substring_regex(names, r"\.(?:tar|parquet)$", "")
        names = pc.replace_substring_regex(names, "^[1-9][0-9]{0,2}_([^_])", r"\1")
    else:
        return pa.scalar(data.caption or "")
    return pc.utf8_trim_whitespace(pc.replace_substring(names, "_", " "))


def _origins(rule: CaptionRule, unused: Collection[str]) -> tuple[str, ...]:
    columns = [column for column in (*rule.columns, *rule.fallback) if column in rule.seen and column not in unused]
    files = ["text files"] if TEXT_FILE in rule.seen else []
    return (*files, *(f"column {escaped(column)!r}" for column in dict.fromkeys(columns)))


def _names(scan: pa.Table, where: pa.ChunkedArray) -> list[str]:
    """Some of the items where `where` is true."""
    return spread_rows(scan.select(["item"]), where, SHOWN).column("item").to_pylist()


def _further(scan: pa.Table, data: DataConfig) -> dict[str, int]:
    counts = {kind: 0 for kind, each in data.pictures if each is not None and not each.made}
    for batch in batches(scan.select(["pictures", "reject"])) if counts else ():
        usable = batch.filter(pc.is_null(batch.column("reject")))
        for kind in counts:
            digests = places(usable, kind).column("digest")
            here = pc.and_(pc.is_valid(digests), pc.not_equal(digests, pa.scalar(ABSENT, pa.binary(16))))
            counts[kind] += _true(here)
    return counts


def _notes(source: Source, data: DataConfig, usable: int, captioned: int) -> Iterator[str]:
    for what, count in source.shared.counts.items():
        yield f"{count} times a {what}: {examples(source.shared.examples[what], count)}"
    rule, taken = source.rule, {each.column for _, each in data.pictures if each is not None}
    named = {
        c for c in rule.seen if name_patterns.kind_of(c) and not _OF_FILES.isdisjoint(re.findall("[a-z]+", c.lower()))
    }
    for column in sorted({*source.unused_columns, *named} - taken - {*rule.columns}):
        kinds = [kind] if (kind := name_patterns.kind_of(column)) else [CONTROL, MASK]
        ways = " or ".join(setting(f"data.pictures.{kind}.column", column) for kind in kinds)
        yield f"the column {escaped(column)!r} of pictures is not used ({ways})"
    if usable and not captioned:
        rest = sorted(rule.seen - {*rule.columns, TEXT_FILE})
        likely = rule.likely(rest) if rest else None
        if likely is not None:
            names = ", ".join(map(repr, map(escaped, rest[:10])))
            yield f"no picture has a caption; other columns: {names} ({setting('data.caption_field', likely)})"
        for kind, count in source.ignored.counts.items():
            if "file without a picture" in kind:
                shown = examples(source.ignored.examples[kind], count)
                yield f"no picture has a caption, and {count} times there is a {kind}: {shown}"


def _true(values: pa.ChunkedArray) -> int:
    return pc.sum(values).as_py() or 0
