"""Webdataset tars: members that share a name up to its first dot are one sample.

The rules are webdataset's; every field of a sample that is a picture becomes an item. Keys are `<tar>/<member>`,
because names inside tars often start anew in each tar; a picture that moves to another tar is not encoded again.
Samples whose members are not adjacent are rejected: a sequential reader would see two samples, and joining them here
would train on something others do not see. NVlabs' captions and scores in .json files next to a tar are recognised by
their content.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, ClassVar

from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.layout import digest
from sana_pipe.data.sources.caption_columns import CaptionRule
from sana_pipe.data.sources.controls_and_masks import ControlOrMask
from sana_pipe.data.sources.filenames import (
    EXTENSIONS,
    error_text,
    escaped,
    extension,
    is_text,
    kind_of_file,
    lost_picture,
    stem,
    unsafe_reason,
)
from sana_pipe.data.sources.filesystem import BoundedReader, Filesystem, Unreadable, is_read_error, unreadable_reason
from sana_pipe.data.sources.range_prefetch import FileRange
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.sidecars import (
    CAPTION_ENDINGS,
    MAX_CAPTION_BYTES,
    TEXT_ENDINGS,
    Content,
    SampleColumns,
    captions_of,
    parse_json,
    read_sidecar,
)
from sana_pipe.data.sources.source import FilesSource, Format, Given, Item, Place, Reject, Source, divided

RULE = "tar-2"
"""Version of this module's rules; another version lists every tar again."""

MAX_SIDECAR_BYTES = 1 << 30
NO_PICTURE = "sample without a picture"
WIDS = "wids-meta.json"
INDEXES = (WIDS, "meta_data.json")
"""Files of NVlabs' loader about all tars of a folder."""

_INDEX_BYTES = 1 << 16
"""Bytes of a .json file that say whether it is an index."""

_NAMED = {ending: place for place, ending in enumerate(CAPTION_ENDINGS)}
_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


@dataclass
class _Sample:
    """Members that share a name.

    fields: field -> (member, offset, size in bytes). texts: field -> bytes of the .txt and .json members.
    lost: whether one of its items was rejected as a member, so that its texts are not without one.
    """

    fields: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    texts: dict[str, bytes | Unreadable] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lost: bool = False


@dataclass
class _Tar:
    """The listing of one tar.

    pictures: how many members are pictures. without_caption: reasons of those without any caption.
    advice: as `CaptionRule.advice`, of the first of those that has one.
    """

    name: str
    samples: dict[str, _Sample] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    pictures: int = 0
    without_caption: list[str] = field(default_factory=list)
    advice: str | None = None

    def reject(self, key: str, reason: str) -> None:
        self.rejects.append(Reject(escaped(key), reason))


class TarSource(FilesSource):
    """Tars of a filesystem.

    `dir/000.jpg` and `dir/000.txt` are one sample; the field is everything after the first dot of the base name, in
    lower case; folders, names of the form `__x__` and hidden files are skipped. Pictures are fields such as `jpg`, not
    `seg.png`; captions are `txt` (`caption`, `cap`) and the caption columns of `json`. Files next to the tar are named
    `<tar without .tar><anything>.json` and hold {sample: {column: text or score}}.

    Args:
        files: names of the tars.
        rule: which captions.
        name: the source's name in sample identities.
        format: `webdataset` or `wids`.
    """

    WHERE = re.compile(r"(?P<offset>\d+)\+(?P<size>\d+)")
    paired_by = frozenset({"suffix", "folder"})
    shares_captions = True
    members: ClassVar[Set[str]] = EXTENSIONS
    """Endings of the fields that are items."""
    noun: ClassVar[str] = "picture"

    def __init__(
        self,
        filesystem: Filesystem,
        files: Iterable[str],
        rule: CaptionRule,
        name: str,
        format: str = "webdataset",
    ):
        super().__init__(filesystem, files, rule, name)
        self.format = format
        self._sidecars: dict[str, list[str]] = {}

    # ------------------------------------------------------------ listing

    def _prepare(self) -> None:
        self._sidecars = self._find_sidecars()

    def part(self, name: str) -> Iterator[Item | Reject]:
        tar = _Tar(name)
        try:
            self._versions[name] = self.filesystem.stat(name)
            with self.filesystem.open(name, spool=True) as stream:
                self._walk(tar, stream, self._versions[name][0])
            whole = True
        except OSError as error:
            tar.reject(name, unreadable_reason(name, error))
            whole = False
        columns = self._read_sidecars(tar) if tar.samples else {}
        controls_and_masks = self._take_controls_and_masks(tar)
        for prefix, sample in tar.samples.items():
            self._add_items(tar, prefix, sample, columns, controls_and_masks)
        if whole:
            self._check(tar)
        yield from sorted(tar.rejects, key=lambda reject: reject.key)
        yield from sorted(tar.items, key=lambda item: item.key)

    def _check(self, tar: _Tar) -> None:
        """Compare a listed tar as a whole with what is expected of it.

        Raises:
            UserError: none of its pictures has a caption.
        """
        missing = tar.without_caption
        if missing and not tar.items and len(missing) == tar.pictures:
            raise UserError(
                f"{self.filesystem.location}/{tar.name}: none of its {tar.pictures} pictures has a caption",
                expected=f"a .txt member, or {' or '.join(map(repr, self.rule.columns))} in its .json "
                f"({self.rule.setting})",
                found=missing[0],
                fix=tar.advice or "put the caption of X.jpg into a member X.txt",
            )
        if not tar.pictures and not tar.rejects:
            tar.reject(tar.name, f"holds no {self.noun}")

    def _walk(self, tar: _Tar, stream: BinaryIO, size: int) -> None:
        """Sort the members of a tar into samples. size: of the tar in bytes."""
        start = stream.read(512)
        compression = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
        if compression:
            tar.reject(tar.name, f"is compressed ({compression}) and cannot be read by range; unpack it")
            return
        if not start:
            tar.reject(tar.name, "is empty")
            return
        stream.seek(0)
        buffered = BoundedReader(stream, 1 << 16) if isinstance(stream, io.RawIOBase) else stream
        end = 0
        previous: str | None = None
        try:
            with tarfile.open(fileobj=buffered, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined] # tarfile would keep all of them
                    end = archive.offset
                    previous = self._add_member(tar, member, previous, buffered, size)
        except (tarfile.TarError, OSError, ValueError, EOFError) as error:
            if is_read_error(error):
                raise
            # Reasons of rejects enter the ids of snapshots: they keep their text.
            tar.reject(tar.name, f"is not a whole tar: {error_text(error)} (after byte {end})")
            return
        _check_end(tar, buffered, end, size)

    def _add_member(
        self, tar: _Tar, member: tarfile.TarInfo, previous: str | None, stream: Any, size: int
    ) -> str | None:
        """Add one member to its sample.

        Args:
            previous: the sample of the member before it.
            size: of the tar in bytes.

        Returns:
            The name of its sample; `previous` if it belongs to none.
        """
        if member.isdir():
            return previous
        name = member.name
        while name.startswith("./"):
            name = name[2:]
        if re.search(r"(^|/)__[^/]*__($|/)", name):
            self._ignore("__x__ member", 1, [f"{tar.name}/{name}"])
            return previous
        if posixpath.basename(name).startswith("."):  # macOS writes `._x` before each `x`
            self._ignore("hidden member", 1, [f"{tar.name}/{name}"])
            return previous
        parts = _FIELD.match(name)
        problem = _member_problem(name, member, size)
        if problem is not None:
            tar.reject(f"{tar.name}/{name}", problem)
        if parts is None:
            if problem is None:
                self._ignore("member without an extension", 1, [f"{tar.name}/{name}"])
            return previous
        prefix, key = parts[1], parts[2].lower()
        if problem is not None:
            # The rest of its sample must not count as complete; a picture has its own reject.
            sample = tar.samples.setdefault(prefix, _Sample())
            if key in self.members:
                sample.lost = True
            else:
                sample.problems.append(f"its .{escaped(key)} {problem}")
            return prefix
        resumed = prefix in tar.samples and prefix != previous
        sample = tar.samples.setdefault(prefix, _Sample())
        if resumed and not any("stand together" in p for p in sample.problems):
            sample.problems.append(
                "its members do not stand together in the tar; write it again with the members sorted by name"
            )
        if key in sample.fields:
            sample.problems.append(f"has two members .{escaped(key)}")
        sample.fields[key] = (name, member.offset_data, member.size)
        if self._is_caption(key):
            stream.seek(member.offset_data)
            sample.texts[key] = stream.read(min(member.size, MAX_CAPTION_BYTES + 1))
        return prefix

    def _is_caption(self, key: str) -> bool:
        """Return whether a field is read: `txt`, `jpg.txt`, or one that a caption column names: `prompt.txt`,
        `meta.json`."""
        name, ending = stem(key), extension(f"x.{key}")
        if ending not in CAPTION_ENDINGS or key in CAPTION_ENDINGS or name in EXTENSIONS:
            return ending in CAPTION_ENDINGS
        return any(f"{column.lower()}.".startswith(f"{key}.") for column in self.rule.columns)

    def _lost(self, key: str, fields: Iterable[str], has_item: bool) -> str | None:
        """Say why a field that is no item and no caption is rejected, or None: it is ignored."""
        return _lost_picture(key, set(fields), has_item)

    def _take_controls_and_masks(self, tar: _Tar) -> dict[tuple[ControlOrMask, str], list[Place]]:
        """Take the control pictures and masks out of the samples: by kind and the name of the sample that they belong
        to."""
        found: dict[tuple[ControlOrMask, str], list[Place]] = {}
        for prefix, sample in list(tar.samples.items()) if self.controls_and_masks else ():
            for key, (name, offset, size) in list(sample.fields.items()):
                for one in self.controls_and_masks if extension(name) in EXTENSIONS else ():
                    if (owner := one.owner(name)) is not None:
                        place = Place(f"{tar.name}/{name}", tar.name, f"{offset}+{size}")
                        found.setdefault((one, owner), []).append(place)
                        sample.fields.pop(key, None)
            if not sample.fields and not sample.problems:
                del tar.samples[prefix]
        owners = {
            owner for prefix in tar.samples for one in self.controls_and_masks for owner in one.owners(f"{prefix}.png")
        }
        for (one, owner), places in found.items():
            if owner not in owners:
                self._ignore(f"{one.kind} picture of no picture", len(places), [places[0].item])
        return found

    def _add_items(
        self,
        tar: _Tar,
        prefix: str,
        sample: _Sample,
        columns: dict[str, SampleColumns],
        controls_and_masks: Mapping[tuple[ControlOrMask, str], list[Place]],
    ) -> None:
        """Add the items and rejects of a sample. columns: sample -> what the files next to the tar say;
        controls_and_masks: as of `_take_controls_and_masks`."""
        pictures = [key for key in sample.fields if key in self.members]
        tar.pictures += len(pictures)
        if sample.problems:
            tar.reject(f"{tar.name}/{prefix}", "; ".join(sample.problems))
            return
        lost = sample.lost
        for key in sorted(sample.fields.keys() - set(pictures) - {*CAPTION_ENDINGS} - sample.texts.keys()):
            name = f"{tar.name}/{sample.fields[key][0]}"
            problem = self._lost(key, sample.fields.keys(), bool(pictures))
            if problem is None:
                self._ignore(f".{escaped(key)} member", 1, [name])
            else:
                tar.reject(name, problem)
                lost = True
        if not pictures:
            if not lost:
                texts = sorted(sample.texts, key=lambda key: (_NAMED[extension(f"x.{key}")], key))
                name = sample.fields[texts[0]][0] if texts else prefix
                self._ignore(NO_PICTURE, 1, [f"{tar.name}/{name}"])
            return
        columns_here = columns.get(prefix) or columns.get(posixpath.basename(prefix)) or SampleColumns()
        usable = CAPTION_ENDINGS if self.rule.text_weight is not None else ("json",)
        contents, named = dict[str, Content](), dict[str, Any]()
        for key, data in sorted(sample.texts.items(), key=lambda each: (_NAMED[extension(f"x.{each[0]}")], each[0])):
            content = read_sidecar(f"its .{key}", data)
            if "." in key and stem(key) not in EXTENSIONS and not isinstance(content, Reject):
                named[key] = content
            elif extension(f"x.{key}") in usable:
                contents[f"its .{key}"] = content
        columns_here = SampleColumns({**columns_here.captions, **named}, columns_here.scores)
        said, row = captions_of(self.rule, contents, columns_here, "its .json")
        otherwise = f"has no caption: no .txt, and {f'its .json {self.rule.lacking(row)}' if row else 'no .json'}"
        for key in pictures:
            name, offset, size = sample.fields[key]
            entry = self._captioned(Place(f"{tar.name}/{name}", tar.name, f"{offset}+{size}"), said, otherwise)
            if isinstance(entry, Item):
                names = {one: one.owners(f"{prefix}.{key}") for one in self.controls_and_masks}
                owned = {
                    one: [place for name in names[one] for place in controls_and_masks.get((one, name), ())]
                    for one in names
                }
                entry = self._with_controls_and_masks(entry, owned)
            elif entry.reason == otherwise:
                tar.without_caption.append(otherwise)
                others = [each for each in sample.fields if "." in each and extension(each) in TEXT_ENDINGS]
                tar.advice = tar.advice or self.rule.advice({**row, **dict.fromkeys(others, "text")})
            if isinstance(entry, Item):
                tar.items.append(entry)
            else:
                tar.reject(entry.key, entry.reason)

    # ------------------------------------------------------------ captions and scores next to a tar

    def _find_sidecars(self) -> dict[str, list[str]]:
        """Tar -> the .json files next to it whose names begin with its name (the tar with the longest name counts)."""
        sidecars: dict[str, list[str]] = {}
        chosen = set(self.files)
        for folder in sorted({posixpath.dirname(file) for file in self.files}):
            names = self.filesystem.names(folder)
            # Tars that are not part of the source have sidecars, too.
            tars = [name for name in {*names, *chosen} if name.endswith(".tar") and posixpath.dirname(name) == folder]
            stems = {file.removesuffix(".tar"): file for file in tars}
            for name in names:
                tar = tar_of(name, stems)
                if tar is not None and posixpath.basename(name) not in INDEXES:
                    sidecars.setdefault(tar, []).append(name)
        return sidecars

    def _read_sidecars(self, tar: _Tar) -> dict[str, SampleColumns]:
        columns: dict[str, SampleColumns] = {}
        for name in self._sidecars.get(tar.name, []):
            try:
                data = self.filesystem.read(name, MAX_SIDECAR_BYTES)
                value: dict[str, Any] | str = parse_json(data.decode("utf-8-sig"))
            except Unreadable as error:
                value = unreadable_reason(name, error)
            except UnicodeDecodeError:
                value = "is not UTF-8"
            if isinstance(value, str):
                tar.reject(name, value)
            elif not value or not all(isinstance(entry, dict) for entry in value.values()):
                self._ignore(".json file next to a tar that describes no samples", 1, [name])
            else:
                for key, entry in value.items():
                    columns.setdefault(key, SampleColumns()).add(entry)
        return columns

    # ------------------------------------------------------------ reading

    @property
    def loose(self) -> Kinds:  # type: ignore[override]
        """Members and files of text among those that are ignored; an unchanged tar is not listed for it again."""
        loose = Kinds()
        for what, files in self.ignored.examples.items():
            if texts := [file for file in files if (what.startswith(".") or what == NO_PICTURE) and is_text(file)]:
                loose.note(what, self.ignored.counts[what], texts)
        return loose

    def read_next_to(self, file: str, limit: int) -> bytes:
        """See `Source`. A member is looked for from the beginning of its tar, on a disk only."""
        tar = next((tar for tar in self.files if file.startswith(f"{tar}/")), None)
        if tar is None:
            return super().read_next_to(file, limit)
        if self.filesystem.is_remote:
            raise Unreadable(f"{escaped(file)}: is read with its tar only")
        with suppress(tarfile.TarError, OSError), self.filesystem.open(tar) as stream:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    if f"{tar}/{member.name.removeprefix('./')}" == file and (data := archive.extractfile(member)):
                        return data.read(limit + 1)
        raise Unreadable(f"{escaped(file)}: is no longer a member")

    def stat(self, place: Place) -> tuple[int, int]:
        part, where = self._located(place)
        return int(where["size"]), self._version(part)

    def _range(self, place: Place) -> FileRange:
        part, where = self._located(place)
        return FileRange(part, int(where["offset"]), int(where["size"]))

    def _stamp(self, file: str) -> str | None:
        try:
            versions = [self._versions[file], *map(self.filesystem.stat, self._sidecars.get(file, []))]
        except Unreadable:
            return None
        numbers = [str(number) for version in versions for number in version]
        return digest(RULE, self.rule.identity(), repr(self.controls_and_masks), *numbers).hex()


class Webdataset(Format):
    """Tars."""

    endings: tuple[str, ...] = ("tar",)

    def divide(self, filesystem: Filesystem) -> tuple[list[str], Kinds]:
        return tars_of(filesystem, self.shows)

    def source(self, given: Given, files: Iterable[str]) -> Source:
        return TarSource(given.filesystem, files, given.rule, given.name, self.name)


class Wids(Format):
    """The index of NVlabs' loader, which lists tars."""

    named_endings = ("json",)
    replaces = "webdataset"

    def shows(self, file: str) -> bool:
        return file == WIDS

    def has(self, filesystem: Filesystem, file: str) -> bool:
        if posixpath.basename(file) == WIDS:
            return True
        try:
            return extension(file) == "json" and b'"shardlist"' in filesystem.read(file, _INDEX_BYTES)
        except Unreadable:  # is reported where it is read
            return False

    def files(self, given: Given) -> tuple[Iterable[str], Kinds]:
        """The tars of the index."""
        index, filesystem = (given.files or [WIDS])[0], given.filesystem
        place = f"{filesystem.location}/{index}"
        try:
            value = parse_json(filesystem.read(index).decode("utf-8-sig"))
        except (Unreadable, UnicodeDecodeError) as error:
            raise UserError(
                f"{place}: the index of tars cannot be read",
                found=error_text(error),
                fix="make it readable, or read the tars without it: --format webdataset",
            ) from None
        shards = value.get("shardlist") if isinstance(value, dict) else None
        shards = [shard for shard in shards if isinstance(shard, dict)] if isinstance(shards, list) else []
        if not shards or not all(isinstance(shard.get("url"), str) for shard in shards):
            raise UserError(
                f"{place}: is not an index of tars",
                expected='{"shardlist": [{"url": "0000.tar", ...}, ...]}',
                found=value if isinstance(value, str) else json.dumps(value)[:80],
            )
        folder = posixpath.dirname(index)
        tars = {posixpath.normpath(posixpath.join(folder, shard["url"])) for shard in shards}
        return tars, tars_of(filesystem, tars.__contains__)[1] if given.files is None else Kinds()

    def source(self, given: Given, files: Iterable[str]) -> Source:
        rule = replace(given.rule, fallback=("prompt",))
        return TarSource(given.filesystem, files, rule, given.name, self.name)


def tars_of(filesystem: Filesystem, wanted: Callable[[str], bool]) -> tuple[list[str], Kinds]:
    """Divide as `divided` does; the .json files next to tars are not among the others."""
    files, others = divided(filesystem, lambda file: wanted(file) or extension(file) == "json")
    tars = [file for file in files if wanted(file)]
    stems = {file.removesuffix(".tar"): file for file in tars}
    for file in files:
        if not wanted(file) and tar_of(file, stems) is None and posixpath.basename(file) not in INDEXES:
            others.note(kind_of_file(file), 1, [file])
    return tars, others


def tar_of(name: str, stems: Mapping[str, str]) -> str | None:
    """The tar that a .json file next to tars is about; None if there is none. stems: tars by name without ending."""
    if not name.endswith(".json"):
        return None
    return next((stems[name[:n]] for n in range(len(name), name.rfind("/") + 1, -1) if name[:n] in stems), None)


def _lost_picture(key: str, fields: Set[str], has_picture: bool) -> str | None:
    """Say why a field that was a picture by its file's name is none of the sample, or None. `seg.png` next to a picture
    is another thing, unless it has a caption of its own."""
    captioned = not fields.isdisjoint(f"{stem(key)}.{ending}" for ending in CAPTION_ENDINGS)
    if extension(key) in EXTENSIONS and (captioned or not has_picture):
        return "its name has a dot too many: in a tar a sample's name ends at the first dot; write _ for the others"
    return lost_picture(f"x.{key}")


def _member_problem(name: str, member: tarfile.TarInfo, size: int) -> str | None:
    """Say why a member must not be used, or None. size: of the tar in bytes."""
    problem = unsafe_reason(name)
    if problem is not None:
        return problem
    if member.issym() or member.islnk():
        return "is a link"
    if not member.isreg() or member.sparse is not None:
        return "is not a regular file"
    if member.offset_data + member.size > size:
        return f"is cut: the tar ends after {size - member.offset_data:,} of its {member.size:,} bytes"
    return None


def _check_end(tar: _Tar, stream: Any, end: int, size: int) -> None:
    """Check that only zeros follow the last member: for tarfile, a damaged header and the end of the file also end a
    tar."""
    position = end
    stream.seek(position)
    while piece := stream.read(1 << 20):
        if piece.count(0) != len(piece):
            start = position + len(piece) - len(piece.lstrip(b"\0"))
            unread = f"the {size - start:,} bytes from {start} on are not read"
            tar.reject(tar.name, f"is damaged or has another tar after its end: {unread}")
            return
        position += len(piece)
    if position - end < 512:
        tar.reject(tar.name, "ends without an end mark; it may have been cut")
