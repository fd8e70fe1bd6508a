"""Read what the names of pictures say: masks, control pictures, rejected pictures of preference pairs, and
regularisation pictures among the pictures of a source.

`x-masklabel.png` next to `x.jpg` and `masks/x.png` next to `images/x.jpg` belong to `x.jpg`, if they have
no caption themselves. Folders called `reg` hold pictures that keep what a class looks like (kohya's sd-scripts).
Price: of pictures without a caption that may be such `SAMPLED` are compared with the others' names; whatever
the number of pictures, that takes a few passes of Arrow over the names, some rows at a time, and none where every
picture has a caption.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.data.cache import arrow
from sana_pipe.data.sources.filenames import composed, stem
from sana_pipe.data.sources.name_pairs import Pair, pairs
from sana_pipe.data.sources.reject_kinds import Kinds

SAMPLED = 500
"""Pictures whose names are compared with all others."""
SIBLINGS = 50
"""Folders next to a folder that are compared with it."""

MASK, CONTROL, REJECTED, REGULARISATION, UNKNOWN = "mask", "control", "rejected", "regularisation", ""
PAIRED = "_w/_l"
"""The usual names of a preference pair: `x_w.png` is chosen, `x_l.png` rejected."""
CAPTION = "caption"

_WORDS = {
    MASK: "mask masks masklabel masklabels seg segs segm segmentation segmentations matte mattes trimap trimaps label "
    "labels annotation annotations gt groundtruth segmentationclass segmentationobject segmentationmask",
    CONTROL: "control controls controlnet conditioning conditionings condition conditions cond hint hints canny edge "
    "edges depth depths normal normals normalmap normalmaps depthmap depthmaps pose poses openpose dwpose scribble "
    "scribbles lineart linearts hed pidinet sketch sketches softedge mlsd",
}
_KINDS = {word: kind for kind, words in _WORDS.items() for word in words.split()}
_LIKELY = rf"(?i)(?:^|[^a-z])(?:{'|'.join(sorted(_KINDS))}|sources?|l)(?:[^a-z]|$)"
_REGULARISATION = (
    r"(?i)(?:\d+_)?(?:regs?|regulari[sz]ation)(?:[-_ ]?(?:images?|imgs?|data|dir|pictures?|set))?"
    r"|class[-_](?:images?|data|dir|pictures?)"
)
_SUFFIX = re.compile(r"[-_. ](?=[A-Za-z])")
_ENDING = r"\.[^./]*$"


@dataclass(frozen=True)
class Pattern:
    """Pictures that are something else by their names.

    Attributes:
        kind: `MASK`, `CONTROL`, `REJECTED`, `REGULARISATION`, or `UNKNOWN` where it may be a mask or a control picture;
            `CAPTION` for files of text.
        way: `suffix` or `folder`; `name` for names that `data.pictures` cannot say. value: as `data.pictures` takes it.
        count: how many. example: such a picture. of: the picture that it belongs to; of a regularisation picture the
            folder of all others, "" if there is none.
        pair: of the way `name`, both names.
    """

    kind: str
    way: str
    value: str
    count: int
    example: str
    of: str = ""
    pair: Pair | None = None

    @property
    def folder(self) -> str:
        """Return where pictures of the way `name` are to be, under the names of their pictures."""
        assert self.pair is not None
        words = re.findall("[a-z]+", f"{self.pair.before} {self.pair.after}".lower())
        return self.pair.folder or next(word for word in words if word in _KINDS)


def kind_of(name: str) -> str:
    """Return what a folder, a suffix or a column of this name holds: `MASK`, `CONTROL`, or `UNKNOWN`."""
    return next((_KINDS[word] for word in re.findall("[a-z]+", name.lower()) if word in _KINDS), UNKNOWN)


def is_regularisation(folder: str) -> bool:
    """Return whether a folder of this name holds regularisation pictures."""
    return re.fullmatch(_REGULARISATION, folder) is not None


def regularisation(items: pa.ChunkedArray) -> list[Pattern]:
    """The folders of regularisation pictures of a source that holds others, too."""
    matches = pc.match_substring_regex(items, f"{_REGULARISATION.replace('(?i)', '(?i)(?:^|/)(?:', 1)})/")
    if not 0 < _true(matches) < len(items):
        return []
    folders = Counter[str]()
    for item in _spread(items, matches, SAMPLED):
        parts = item.split("/")[:-1]
        place = next((n for n, part in enumerate(parts) if is_regularisation(part)), None)
        if place is not None:
            folders["/".join(parts[: place + 1])] += 1
    others = _spread(items, pc.invert(matches), SAMPLED)
    subject = os.path.commonpath([f"/{item}".rpartition("/")[0] or "/" for item in others]).strip("/")
    subject = subject.partition("/")[0]
    patterns = []
    for folder, _ in folders.most_common(SIBLINGS):
        below = pc.and_(matches, _is_below(items, folder))
        example = next(iter(_spread(items, below, 1)), folder)
        patterns.append(Pattern(REGULARISATION, "folder", folder, _true(below), example, subject))
    return patterns


def controls_and_masks(items: pa.ChunkedArray, has_caption: pa.ChunkedArray) -> list[Pattern]:
    """The patterns of control pictures, masks and rejected pictures, those of the most pictures first.

    Args:
        items: names of all pictures. has_caption: booleans.
    """
    bare = pc.invert(has_caption)
    if not (without := _true(bare)):
        return []
    likely = pc.and_(bare, pc.match_substring_regex(items, _LIKELY))
    samples = [*_spread(items, likely, SAMPLED), *(_spread(items, bare, SAMPLED) if without < len(items) else ())]
    if not samples:
        return []
    folders = _folders(items)
    readings = {item: list(_readings(item, folders)) for item in dict.fromkeys(samples)}
    wanted = pa.array({picture for each in readings.values() for *_, picture in each}, pa.string())
    there, with_caption = dict[str, str](), set[str]()
    for some, captioned in _batches(items, has_caption):
        stems = pc.utf8_normalize(pc.replace_substring_regex(some, _ENDING, ""), form="NFC")
        matches = pc.is_in(stems, value_set=wanted)
        there.update(zip(stems.filter(matches).to_pylist(), some.filter(matches).to_pylist(), strict=True))
        with_caption.update(stems.filter(pc.and_(matches, captioned)).to_pylist())
    found = Counter[tuple[str, str, str]]()
    examples = dict[tuple[str, str, str], tuple[str, str]]()
    for item, each in readings.items():
        usable = (
            (kind, way, value, picture)
            for kind, way, value, picture in each
            if picture in with_caption or (kind and picture in there)
        )
        if (reading := next(usable, None)) is not None:
            found[reading[:3]] += 1
            examples.setdefault(reading[:3], (item, there[reading[3]]))
    patterns = []
    for (kind, way, value), paired in found.items():
        similar = [item for item in readings if _fits(item, way, value)]
        ours = pc.match_substring_regex(items, re.escape(_end(value)) + _ENDING)
        count = _true(pc.and_(bare, ours if way == "suffix" else _is_below(items, value)))
        if 2 * paired >= len(similar) and (kind or 2 * count >= max(4, len(items) - without)):
            patterns.append(Pattern(kind, way, value, count, *examples[kind, way, value]))
    rest = [item for item in readings if not any(_fits(item, each.way, each.value) for each in patterns)]
    patterns += _by_name(rest, items, bare, folders)
    return sorted(patterns, key=lambda pattern: (-pattern.count, pattern.way, pattern.value))


def captions(files: Kinds, items: pa.ChunkedArray, has_caption: pa.ChunkedArray) -> list[Pattern]:
    """The patterns of files of text, next to no picture, that belong to pictures without a caption by their names.

    Args:
        files: by folder and ending, with examples. items, has_caption: as of `controls_and_masks`.
    """
    if not files.total or not _true(pc.invert(has_caption)):
        return []
    kinds = {file: kind for kind, some in files.examples.items() for file in some}
    bare = (some.filter(pc.invert(captioned)) for some, captioned in _batches(items, has_caption))
    paired = pairs(kinds, bare, _folders(items), lambda *names: True)
    patterns = list[Pattern]()
    for kind, some in files.examples.items():
        found = [paired[file] for file in some if file in paired]
        if 2 * len(found) >= len(some) and found:
            count = files.counts[kind]
            patterns.append(Pattern(CAPTION, "name", kind, count, found[0].file, found[0].picture, found[0]))
    return patterns


def _by_name(
    files: list[str], items: pa.ChunkedArray, bare: pa.ChunkedArray, folders: dict[str, list[str]]
) -> list[Pattern]:
    """The patterns of the way `name` among some pictures without a caption, by words that are known.

    Args:
        items, bare: names of all pictures, and which of them have no caption. folders: below each folder.
    """
    files = [file for file in files if re.search(_LIKELY, file)]
    if not files:
        return []

    def usable(file: str, picture: str, more: str) -> bool:
        *above, name = stem(picture).split("/")
        others = [part for part in above if part not in file.split("/")]
        return _kind_of_pair(file, picture, more) != UNKNOWN and not any(map(kind_of, [name, *others]))

    found = dict[tuple[str, str], list[Pair]]()
    for file, pair in pairs(files, (some for [some] in _batches(items)), folders, usable).items():
        kind = _kind_of_pair(file, pair.picture, pair.before + pair.after)
        value = "/".join(filter(None, [pair.folder, f"{pair.before}*{pair.after}"]))
        found.setdefault((kind, value), []).append(pair)
    patterns = []
    for (kind, value), some in found.items():
        pattern = _pattern_of(value)
        if 2 * len(some) >= sum(re.search(pattern, file) is not None for file in files):
            count = _true(pc.and_(bare, pc.match_substring_regex(items, pattern)))
            patterns.append(Pattern(kind, "name", value, count, some[0].file, some[0].picture, some[0]))
    return patterns


def _kind_of_pair(file: str, picture: str, more: str) -> str:
    """The kind of a picture that is paired by name. more: what its name has more than that of the other."""
    above = [part for part in file.split("/")[:-1] if part not in picture.split("/")[:-1]]
    return next(filter(None, map(kind_of, [more, *above])), UNKNOWN)


def _pattern_of(value: str) -> str:
    """The regular expression of the value of a pattern of the way `name`."""
    folder, _, name = value.rpartition("/")
    inside = f"{re.escape(folder)}/(?:.*/)?" if folder else ""
    before, _, after = name.partition("*")
    return f"(?:^|/){inside}{re.escape(before)}[^/]*{re.escape(after)}{_ENDING}"


def _readings(item: str, folders: dict[str, list[str]]) -> Iterator[tuple[str, str, str, str]]:
    """(kind, way, value, stem of the picture, composed) of what a picture's name may mean. folders: below each."""
    for kind, way, value, picture in _spelled_readings(item, folders):
        yield kind, way, value, composed(picture)


def _spelled_readings(item: str, folders: dict[str, list[str]]) -> Iterator[tuple[str, str, str, str]]:
    name = stem(item)
    folder, slash, file = name.rpartition("/")
    chosen, _, rejected = PAIRED.partition("/")
    if file.endswith(rejected):
        yield REJECTED, "suffix", PAIRED, name.removesuffix(rejected) + chosen
    for place in [match.start() for match in _SUFFIX.finditer(file, 1)][-3:]:
        yield kind_of(file[place:]), "suffix", file[place:], f"{folder}{slash}{file[:place]}"
    parts = name.split("/")
    for place, part in enumerate(parts[:-1]):
        above, below = parts[:place], parts[place + 1 :]
        kind = kind_of(part)
        if kind:
            yield kind, "folder", part, "/".join([*above, *below])
        for sibling in folders.get("/".join(above), ())[:SIBLINGS]:
            if sibling == part or (kind and kind_of(sibling)):
                continue
            paired = {part.lower().rstrip("s"), sibling.lower().rstrip("s")} == {"source", "target"}
            if paired and part.lower().startswith("target"):
                continue
            yield CONTROL if paired else kind, "folder", part, "/".join([*above, sibling, *below])


def _folders(items: pa.ChunkedArray) -> dict[str, list[str]]:
    """The names of the folders in each folder."""
    children: dict[str, dict[str, None]] = {}
    for [some] in _batches(items):
        inside = some.filter(pc.match_substring(some, "/"))
        for folder in pc.unique(pc.replace_substring_regex(inside, "/[^/]*$", "")).to_pylist():
            parts = folder.split("/")
            for place, part in enumerate(parts):
                children.setdefault("/".join(parts[:place]), {}).setdefault(part)
    return {folder: sorted(names) for folder, names in children.items()}


def _fits(item: str, way: str, value: str) -> bool:
    return stem(item).endswith(_end(value)) if way == "suffix" else f"/{value}/" in f"/{item}"


def _end(suffix: str) -> str:
    """The end of the names themselves: `_l` of `_w/_l`."""
    return suffix.rpartition("/")[2]


def _is_below(items: pa.ChunkedArray, folder: str) -> pa.ChunkedArray:
    return pc.or_(pc.starts_with(items, f"{folder}/"), pc.match_substring(items, f"/{folder}/"))


def _true(values: pa.ChunkedArray) -> int:
    return pc.sum(values).as_py() or 0


def _spread(items: pa.ChunkedArray, where: pa.ChunkedArray, count: int) -> list[str]:
    """Up to `count` of the items where `where` is true, at equal distances."""
    return arrow.spread_rows(pa.table({"item": items}), where, count).column("item").to_pylist()


def _batches(*columns: pa.ChunkedArray) -> Iterator[tuple[pa.ChunkedArray, ...]]:
    """The rows of some columns, in order, some at a time."""
    for start in range(0, len(columns[0]), arrow.ROWS):
        yield tuple(column.slice(start, arrow.ROWS) for column in columns)
