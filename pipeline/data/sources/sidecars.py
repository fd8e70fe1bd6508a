"""Caption files next to a picture or a tar: text, a JSON object, or the JSON files of NVlabs' datasets.

Of `X.jpg` they are `X.txt` and `X.json`; other tools write `X.caption` (kohya's sd-scripts), `X.cap` or `X.jpg.txt`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sana_pipe.data.sources.caption_columns import CaptionRule, PictureCaptions
from sana_pipe.data.sources.filenames import escaped, extension, has_surrogates, short_repr
from sana_pipe.data.sources.filesystem import Unreadable
from sana_pipe.data.sources.source import Reject

MAX_CAPTION_BYTES = 1 << 20
TEXT_ENDINGS = ("txt", "caption", "cap")
CAPTION_ENDINGS = (*TEXT_ENDINGS, "json")
"""Files that hold one caption."""


@dataclass
class SampleColumns:
    """Captions and scores of one sample by column, from files of NVlabs' datasets."""

    captions: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)

    def add(self, values: dict[str, Any]) -> None:
        """Add values by column: numbers are scores, all others captions."""
        for column, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.scores[column] = value
            else:
                self.captions[column] = value


class NoCaption(Reject):
    """The reason why a file is no caption, though it has the name of one."""


Content = str | dict[str, Any] | Reject
"""The content of a caption file; a Reject says why it cannot be used."""


def captions_of(
    rule: CaptionRule, contents: Mapping[str, Content], sample: SampleColumns, name: str
) -> tuple[PictureCaptions, dict[str, Any]]:
    """Return what caption files say about a picture, and all columns that they have.

    Args:
        contents: of the picture's own files, by name.
        sample: what files about many samples say of it.
        name: stands for those in messages.
    """
    picture, row, objects = PictureCaptions(), dict(sample.captions), dict[str, dict[str, Any]]()
    for file, content in contents.items():
        if isinstance(content, Reject):
            picture.problems.append((file, content.reason))
            picture.is_lost |= not isinstance(content, NoCaption) and (extension(file) != "json" or bool(rule.columns))
        elif isinstance(content, dict):
            objects[file] = {**content, **sample.captions}
            row = {**content, **row}
        elif content:
            picture.candidates += rule.text_file(content, sample.scores)
        else:
            picture.problems.append((file, "is empty"))
    for file, columns in (objects or ({name: row} if row else {})).items():
        said = rule.read(columns, sample.scores, file)
        if not rule.has_caption_column(columns):
            said.problems = []
        picture.add(said)
    return picture, row


def read_sidecar(name: str, data: bytes | Unreadable) -> Content:
    """The text of a text file or the object of a .json file, given its bytes."""
    if isinstance(data, Unreadable):
        return Reject(name, f"cannot be read: {str(data).removeprefix(escaped(name) + ': ')}")
    if len(data) > MAX_CAPTION_BYTES:
        return NoCaption(name, f"is larger than {MAX_CAPTION_BYTES:,} bytes, too many for a caption")
    encoding = "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        return Reject(name, f"is not {encoding.removesuffix('-sig').upper()} (byte {error.start})")
    if extension(name) != "json":
        text = text.strip()
        is_caption = not text or any(map(str.isalpha, text))
        return text if is_caption else NoCaption(name, "has no letters, so it is not a caption (numbers of boxes?)")
    value = parse_json(text)
    if isinstance(value, dict):
        return value
    return (NoCaption if text.lstrip()[:1] == "[" and '["' not in "".join(text.split()) else Reject)(name, value)


def parse_json(text: str) -> dict[str, Any] | str:
    """A JSON object, or the reason why the text is not an object. NaN and Infinity, which are not JSON, become null."""
    try:
        value = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    if "\\ud" in text.lower() and has_surrogates(json.dumps(value, ensure_ascii=False)):
        return "has an escape that stands for half a character, which is not valid Unicode"
    return value if isinstance(value, dict) else f"is not a JSON object but {short_repr(value)}"
