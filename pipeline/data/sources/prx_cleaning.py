"""The cleaning of a prompt before PRX's text encoder: what `PRXPipeline` of diffusers does to it, restated as tables.

Why without ftfy, which that pipeline imports: a caption's value must not depend on an installed package or its version.
Of ftfy's repairs the ones that are rules are here (entities, C1 controls, ligatures, widths, quotes, line breaks,
control characters, composition). Price: text that was decoded wrongly ("cafÃ©"), which ftfy guesses at, stays so.
"""

from __future__ import annotations

import html
import html.entities
import re
import unicodedata
from urllib.parse import unquote_plus

_URL = (
    r"\b((?:https?|www):(?:\/{1,3}|[a-zA-Z0-9%])|"
    r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b\/?(?!@))"
)
_DASHES = (
    "\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
    "\ufe31\ufe32\ufe58\ufe63\uff0d"
)
_FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"


def _rules(*pairs: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


_BEFORE = _rules(
    ("<person>", "person"),
    (_URL, ""),
    (r"@\w+\b", ""),  # nicknames
    ("[\u31c0-\u9fff]+", ""),  # strokes of CJK, enclosed and compatible forms, ideographs
    (f"[{_DASHES}]+", "-"),
    ("[`´«»¨]", '"'),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # addresses of computers
    (r"\d:\d\d\s+$", ""),  # numbers of articles
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{_FILES})", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_JOINTS = re.compile("[-_]")
_AFTER = _rules(
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # codes
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILES})(\simage[s]?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)


_WORD = r"[A-Za-z]+(?:['-][A-Za-z]+)*"
PLAIN = rf"^{_WORD}(?:[,.]? {_WORD})*\.?$"
"""A pattern of captions of which `clean` changes capitals alone, unless `UNUSUAL` is found in them, too."""
UNUSUAL = rf"(?i)-.*-.*-.*-|shipping|download|click|{_FILES}"


def clean(caption: str) -> str:
    """The caption as PRX's tokenizer receives it."""
    text = _replaced(unquote_plus(caption).strip().lower(), _BEFORE)
    if len(_JOINTS.findall(text)) > 3:  # this-is-my-cute-cat
        text = _JOINTS.sub(" ", text)
    text = html.unescape(html.unescape(repaired(text))).strip()
    return _replaced(text, _AFTER).strip()


def _replaced(text: str, rules: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


# ---------------------------------------------------------------- the rules of ftfy

_ENTITY = re.compile(r"&#?[0-9A-Za-z]{1,24};")
_TERMINAL = re.compile("\x1b\\[[\\d;]*[a-zA-Z]")
_C1 = {code: bytes([code]).decode("cp1252", "ignore") or chr(code) for code in range(0x80, 0xA0)}
_LIGATURES = {
    "Ĳ": "IJ",
    "ĳ": "ij",
    "ŉ": "\u02bcn",
    "Ǳ": "DZ",
    "ǲ": "Dz",
    "ǳ": "dz",
    "Ǆ": "DŽ",
    "ǅ": "Dž",
    "ǆ": "dž",
    "Ǉ": "LJ",
    "ǈ": "Lj",
    "ǉ": "lj",
    "Ǌ": "NJ",
    "ǋ": "Nj",
    "ǌ": "nj",
    "ﬀ": "ff",
    "ﬁ": "fi",
    "ﬂ": "fl",
    "ﬃ": "ffi",
    "ﬄ": "ffl",
    "ﬅ": "ſt",
    "ﬆ": "st",
}
_WIDTHS = {code: unicodedata.normalize("NFKC", chr(code)) for code in (0x3000, *range(0xFF01, 0xFFF0))}
_QUOTES = {**dict.fromkeys(range(0x201C, 0x2020), '"'), **dict.fromkeys((0x02BC, *range(0x2018, 0x201C)), "'")}
_LINES = str.maketrans({"\r": "\n", "\u2028": "\n", "\u2029": "\n", "\x85": "\n"})
_CONTROLS = dict.fromkeys(
    (*range(9), 0x0B, *range(0x0E, 0x20), 0x7F, *range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFD))
)
_PLAIN = re.compile(r"[\n -%'-~]*")
"""Text that none of the rules changes."""


def repaired(text: str) -> str:
    """ftfy's `fix_text` without its guess at wrongly decoded text."""
    if _PLAIN.fullmatch(text):
        return text
    parts, entities = [], True
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        entities = entities and "<" not in line  # markup: entities are meant
        parts.append(_repaired_line(line, entities))
    return "".join(parts)


def _repaired_line(line: str, entities: bool) -> str:
    before = None
    while line != before:
        before = line
        if entities:
            line = _ENTITY.sub(_character, line)
        line = line.translate(_C1).translate(_LIGATURE_TABLE).translate(_WIDTHS).translate(_QUOTES)
        line = _TERMINAL.sub("", line.replace("\r\n", "\n").translate(_LINES))
        line = unicodedata.normalize("NFC", line.translate(_CONTROLS))
    return line


_LIGATURE_TABLE = str.maketrans(_LIGATURES)


def _character(match: re.Match[str]) -> str:
    entity = match[0]
    if entity.startswith("&#"):
        character = html.unescape(entity)
        return entity if ";" in character else character
    return html.entities.html5.get(entity[1:], entity)
