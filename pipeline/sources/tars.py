"""Webdataset tars: samples are members that share a name up to its first dot.

What: `TarSource` lists tars (each one is a part of the source) and reads pictures by their byte range.
Rules, those of webdataset: `dir/000.jpg` and `dir/000.txt` are one sample; the field is all behind the first dot of the
base name, in lower case; folders and names of the form `__x__` mean nothing. Of a sample, every field that is a picture
(`jpg`, `jpeg`, `png`, `webp`, ...; not `seg.png`) becomes an item; `txt` and the caption columns of `json` are its
captions.
NVlabs' layout is the same with captions and scores in files beside the tar, `<tar without .tar><anything>.json`:
{sample: {column: text}} and {sample: {column: score}}; they are known by what they hold. A tar that does not hold as
many samples as `wids-meta.json` says (`nsamples`) is told.

Keys are `<tar>/<member>`: names inside tars are often counted anew in each. Pictures that change tars change their
sample ids, but nothing is encoded again, since records are found by content.

Refused by name: members of one sample that do not stand together (a sequential reader would see two samples; joining
them here would train on what others do not see), names that stand twice, links and other specials, names that are
absolute or climb, a tar that ends early, is compressed, or goes on behind its end.
Price: a tar's headers and captions are read whenever its size, its time (ETag) or the caption rule has changed: 50 us a
member on a disk. All places are held in memory, some 150 bytes an item.
"""

from __future__ import annotations

import io
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from pipeline.cache.layout import digest
from pipeline.errors import UserError
from pipeline.sources.caption_columns import Candidate, CaptionRule
from pipeline.sources.filenames import EXTENSIONS, error_text, escaped, unsafe_reason
from pipeline.sources.filesystem import BoundedReader, Filesystem, Unreadable
from pipeline.sources.range_prefetch import Place, RangePrefetch
from pipeline.sources.sidecars import MAX_CAPTION_BYTES, SampleColumns, parse_json, read_sidecar
from pipeline.sources.source import Item, Part, Reject, Source

RULE = "tar-1"
"""Counts the rules of this module, so that a later version lists again what this one has listed."""

MAX_SIDECAR_BYTES = 1 << 30
_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


@dataclass
class _Sample:
    """Members that share a name. fields: field -> (member, offset, size)."""

    fields: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    texts: dict[str, bytes | Unreadable] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class TarSource(Source):
    """Tars of a store.

    Args:
        store: where they are.
        files: their names.
        rule: which captions.
        name: the source's name in sample identities.
        format: `webdataset` or `wids`.
        told: tar -> the number of samples that an index says it holds; a tar that holds another is a reject beside
            its items, because samples are missing, or the index is of other tars.
    """

    def __init__(
        self,
        filesystem: Filesystem,
        files: Iterable[str],
        rule: CaptionRule,
        name: str,
        format: str = "webdataset",
        told: Mapping[str, Any] | None = None,
    ):
        self.rule: CaptionRule
        self._told = {file: count for file, count in (told or {}).items() if count is not None}
        self.filesystem, self.rule, self.name, self.format = filesystem, rule, name, format
        self.location = filesystem.location
        self.files = sorted(set(files), key=lambda file: file + "/")
        self.ignored_kinds: Counter[str] = Counter()
        self._versions: dict[str, tuple[int, int]] = {}
        self._places: dict[str, tuple[str, int, int]] = {}
        self._beside: dict[str, list[str]] = {}

    # ------------------------------------------------------------ listing

    def parts(self) -> list[Part]:
        self.filesystem.refresh()
        self._versions = self.filesystem.require(self.files)
        self.ignored_kinds.clear()
        self.ignored = 0
        self._beside = self._find_sidecars()
        return [Part(file, self._stamp(file)) for file in self.files]

    def items(self) -> Iterator[Item | Reject]:
        for part in self.parts():
            yield from self.part(part.name)

    def part(self, name: str) -> Iterator[Item | Reject]:
        rejects: list[Reject] = []
        samples: dict[str, _Sample] = {}
        try:
            self._versions[name] = self.filesystem.stat(name)
            with self.filesystem.open(name, spool=True) as stream:
                self._walk(name, stream, samples, rejects)
        except Unreadable as error:
            rejects.append(Reject(escaped(name), f"unreadable: {str(error).removeprefix(escaped(name) + ': ')}"))
        told = self._read_sidecars(name, rejects) if samples else {}
        items: list[Item] = []
        missing: list[str] = []
        pictures = 0
        for prefix, sample in samples.items():
            own = [key for key in sample.fields if key in EXTENSIONS]
            pictures += len(own)
            if sample.problems:
                rejects.append(Reject(escaped(f"{name}/{prefix}"), "; ".join(sample.problems)))
            elif own:
                self._sample(name, prefix, sample, own, told, items, rejects, missing)
            else:
                self.ignored_kinds["sample without a picture"] += 1
            for key in sample.fields.keys() - set(own) - {"txt", "json"}:
                self.ignored_kinds[f".{escaped(key)} member"] += 1
        if missing and not items and len(missing) == pictures:
            raise UserError(
                f"{self.filesystem.location}/{name}: none of its {pictures} pictures has a caption",
                expected=f"a .txt member, or {' or '.join(map(repr, self.rule.columns))} in its .json "
                f"({self.rule.setting})",
                found=missing[0],
                fix="--set data.caption_field=NAME",
            )
        if name in self._told and self._told[name] != len(samples):
            count = escaped(repr(self._told[name]))
            rejects.append(Reject(escaped(name), f"holds {len(samples)} samples, wids-meta.json says {count}"))
        if not pictures and not rejects:
            rejects.append(Reject(escaped(name), "holds no picture"))
        self.ignored = self.ignored_kinds.total()
        yield from sorted(rejects, key=lambda reject: reject.key)
        for item in sorted(items, key=lambda item: item.key):
            assert item.where is not None
            self._place(item.key, name, item.where)
            yield item

    def _walk(self, part: str, stream: BinaryIO, samples: dict[str, _Sample], rejects: list[Reject]) -> None:
        """Sort a tar's members into samples."""
        size = self._versions[part][0]
        start = stream.read(512)
        packed = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
        if packed or not start:
            reason = f"is compressed ({packed}) and cannot be read by range; unpack it" if packed else "is empty"
            rejects.append(Reject(escaped(part), reason))
            return
        stream.seek(0)
        buffered = BoundedReader(stream, 1 << 16) if isinstance(stream, io.RawIOBase) else stream
        end = 0
        before: str | None = None
        try:
            with tarfile.open(fileobj=buffered, mode="r:", errorlevel=0) as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined] # it keeps them all
                    end = tar.offset
                    before = self._member(part, member, before, buffered, size, samples, rejects)
        except (tarfile.TarError, OSError, ValueError, EOFError) as error:
            if isinstance(error, Unreadable):
                raise
            rejects.append(Reject(escaped(part), f"is no whole tar: {error_text(error)} (behind byte {end})"))
            return
        self._check_end(part, buffered, end, size, rejects)

    def _check_end(self, part: str, stream: Any, end: int, size: int, rejects: list[Reject]) -> None:
        """tarfile takes a damaged header for the end, and the end for the end of the file; neither is sure."""
        at = end
        stream.seek(at)
        while piece := stream.read(1 << 20):
            if piece.count(0) != len(piece):
                start = at + len(piece) - len(piece.lstrip(b"\0"))
                rejects.append(
                    Reject(
                        escaped(part),
                        f"is damaged or has another tar behind its end: the {size - start:,} bytes from {start} on are "
                        "not read",
                    )
                )
                return
            at += len(piece)
        if at - end < 512:
            rejects.append(Reject(escaped(part), "ends without an end mark; it may have been cut"))

    def _member(
        self,
        part: str,
        member: tarfile.TarInfo,
        before: str | None,
        stream: Any,
        size: int,
        samples: dict[str, _Sample],
        rejects: list[Reject],
    ) -> str | None:
        """Enter one member; returns the sample that it belongs to (or the one before, if to none)."""
        if member.isdir():
            return before
        name = member.name
        while name.startswith("./"):
            name = name[2:]
        if re.search(r"(^|/)__[^/]*__($|/)", name):
            self.ignored_kinds["__x__ member"] += 1
            return before
        parts = _FIELD.match(name)
        problem = unsafe_reason(name)
        if problem is None and (member.issym() or member.islnk()):
            problem = "is a link"
        elif problem is None and (not member.isreg() or member.sparse is not None):
            problem = "is not a regular file"
        elif problem is None and member.offset_data + member.size > size:
            problem = f"is cut: the tar ends after {size - member.offset_data:,} of its {member.size:,} bytes"
        if problem is not None:
            rejects.append(Reject(escaped(f"{part}/{name}"), problem))
        if parts is None:
            if problem is None:
                self.ignored_kinds["member without an extension"] += 1
            return before
        prefix, key = parts[1], parts[2].lower()
        if problem is not None:
            # The rest of its sample must not pass for whole; the picture itself has its own reject.
            if key not in EXTENSIONS:
                samples.setdefault(prefix, _Sample()).problems.append(f"its .{escaped(key)} {problem}")
            return prefix
        known = prefix in samples
        sample = samples.setdefault(prefix, _Sample())
        if known and prefix != before and not any("stand together" in p for p in sample.problems):
            sample.problems.append(
                "its members do not stand together in the tar; write it again with the members sorted by name"
            )
        if key in sample.fields:
            sample.problems.append(f"has two members .{escaped(key)}")
        sample.fields[key] = (name, member.offset_data, member.size)
        if key in ("txt", "json"):
            stream.seek(member.offset_data)
            sample.texts[key] = stream.read(min(member.size, MAX_CAPTION_BYTES + 1))
        return prefix

    def _sample(
        self,
        part: str,
        prefix: str,
        sample: _Sample,
        pictures: list[str],
        told: dict[str, SampleColumns],
        items: list[Item],
        rejects: list[Reject],
        missing: list[str],
    ) -> None:
        candidates: list[Candidate] = []
        problems: list[str] = []
        row: dict[str, Any] = {}
        if "txt" in sample.texts and self.rule.text_weight is not None:
            text = read_sidecar("its .txt", sample.texts["txt"])
            if isinstance(text, Reject):
                problems.append(f"{text.key} {text.reason}")
            elif isinstance(text, str) and text:
                candidates.append(self.rule.text_file(text))
            else:
                problems.append("its .txt is empty")
        if "json" in sample.texts:
            value = _json(sample.texts["json"])
            if isinstance(value, str):
                problems.append(f"its .json {value}")
            else:
                row = value
        beside = told.get(prefix) or told.get(posixpath.basename(prefix)) or SampleColumns()
        row = {**row, **beside.captions}
        found = self.rule.read(row, beside.scores)
        candidates += found.candidates
        if any(column in row for column in (*self.rule.columns, *self.rule.fallback)):
            problems += [f"its .json {problem}" for problem in found.problems]
        captions, dropped = self.rule.weigh(candidates, f"{part}/{sample.fields[pictures[0]][0]}", self.name)
        if dropped:
            self.ignored_kinds["caption that is never drawn (its score is below data.score_threshold)"] += dropped
        meta = {column: value for column, value in row.items() if column not in self.rule.columns}
        for key in pictures:
            name, offset, size = sample.fields[key]
            if captions:
                items.append(Item(f"{part}/{name}", captions, meta, f"{offset}+{size}"))
            else:
                reason = "; ".join(problems)
                if not reason:
                    columns = ", ".join(repr(escaped(column)) for column in row)
                    reason = f"has no caption: no .txt, and {f'its .json has only {columns}' if row else 'no .json'}"
                    missing.append(reason)
                rejects.append(Reject(escaped(f"{part}/{name}"), reason))
        if captions:
            rejects.extend(Reject(escaped(f"{part}/{prefix}"), problem) for problem in problems)

    # ------------------------------------------------------------ captions and scores beside a tar

    def _find_sidecars(self) -> dict[str, list[str]]:
        """Tar -> the .json files beside it whose names begin like its own (the longest such tar has them)."""
        found: dict[str, list[str]] = {}
        chosen = set(self.files)
        for folder in sorted({posixpath.dirname(file) for file in self.files}):
            names = self.filesystem.names(folder)
            # All tars that are there have their own, also those that were not asked for.
            tars = [name for name in {*names, *chosen} if name.endswith(".tar") and posixpath.dirname(name) == folder]
            stems = {file.removesuffix(".tar"): file for file in tars}
            for name in names:
                if not name.endswith(".json") or posixpath.basename(name) in ("wids-meta.json", "meta_data.json"):
                    continue
                own = next((name[:n] for n in range(len(name), len(folder), -1) if name[:n] in stems), None)
                if own is not None:
                    found.setdefault(stems[own], []).append(name)
        return found

    def _read_sidecars(self, part: str, rejects: list[Reject]) -> dict[str, SampleColumns]:
        told: dict[str, SampleColumns] = {}
        for name in self._beside.get(part, []):
            try:
                data = self.filesystem.read(name, MAX_SIDECAR_BYTES)
                value: dict[str, Any] | str = parse_json(data.decode("utf-8-sig"))
            except Unreadable as error:
                value = str(error)
            except UnicodeDecodeError:
                value = "is not UTF-8"
            if isinstance(value, str):
                rejects.append(Reject(escaped(name), value))
                continue
            if not value or not all(isinstance(entry, dict) for entry in value.values()):
                self.ignored_kinds[".json file beside a tar that is about no samples"] += 1
                continue
            for key, entry in value.items():
                told.setdefault(key, SampleColumns()).add(entry)
        return told

    # ------------------------------------------------------------ reading

    def recall(self, places: Iterable[tuple[str, str, str]]) -> None:
        for key, part, where in places:
            self._place(key, part, where)

    def stat(self, key: str) -> tuple[int, int]:
        part, _, size = self._found(key)
        version = self._versions.get(part)
        if version is None:
            version = self._versions[part] = self.filesystem.stat(part)
        return size, version[1]

    def read(self, key: str) -> bytes:
        return self.filesystem.read_range(*self._found(key))

    def head(self, key: str, length: int) -> bytes:
        part, offset, size = self._found(key)
        return self.filesystem.read_range(part, offset, min(size, length))

    @property
    def is_remote(self) -> bool:
        return self.filesystem.is_remote

    @contextmanager
    def reading(self, keys: Iterable[str]) -> Iterator[Callable[[str], bytes]]:
        if not self.is_remote:
            yield self.read
            return
        places = ((key, Place(*self._places[key])) for key in keys if key in self._places)
        with RangePrefetch(self.filesystem, places, self.read) as ahead:
            yield ahead.read

    def _place(self, key: str, part: str, where: str) -> None:
        offset, _, size = where.partition("+")
        self._places[key] = (part, int(offset), int(size))

    def _found(self, key: str) -> tuple[str, int, int]:
        try:
            return self._places[key]
        except KeyError:
            raise Unreadable(f"{escaped(key)}: is in none of the tars that were listed") from None

    def _stamp(self, file: str) -> str | None:
        try:
            versions = [self._versions[file], *map(self.filesystem.stat, self._beside.get(file, []))]
        except Unreadable:
            return None
        told = [repr(self._told[file])] if file in self._told else []
        numbers = [str(number) for version in versions for number in version]
        return digest(RULE, self.rule.identity(), *numbers, *told).hex()


def _json(data: bytes | Unreadable) -> dict[str, Any] | str:
    outcome = read_sidecar("x.json", data)
    return outcome.reason if isinstance(outcome, Reject) else outcome
