"""The contact sheet: one card per caption, with several pictures side by side.

It shows at a glance whether a model draws what its captions say, which no number does. Captions are drawn with Pillow's
built-in font, which has Latin letters only; the full text is in `samples.jsonl` next to the sheet.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from sana_pipe.base.disk import replacing

MARGIN = 12
LINE = 17
CAPTION_LINES = 3
MIN_SIDE, MAX_SIDE = 160, 320
_INK, _PALE, _PAPER, _EMPTY = (30, 30, 30), (120, 120, 120), (255, 255, 255), (235, 235, 235)


@dataclass(frozen=True)
class SheetRow:
    """A caption and its pictures, one for each title of the sheet; None where a picture is missing."""

    caption: str
    pictures: tuple[Image.Image | None, ...]


def contact_sheet(cards: Sequence[SheetRow], titles: Sequence[str], path: Path) -> None:
    """Write the sheet as one PNG, whole or not at all.

    Args:
        cards: each with as many pictures as there are titles. Pictures are scaled to fit a square cell, up
            (bicubic) or down (Lanczos).
        titles: of the columns of pictures.
        path: the PNG.

    Raises:
        ValueError: no cards, or a card with another number of pictures than there are titles.
    """
    across = 2 if len(cards) > 4 else 1
    largest = max((max(p.size) for card in cards for p in card.pictures if p is not None), default=MIN_SIDE)
    side = min(max(largest, MIN_SIDE), MAX_SIDE)
    font = ImageFont.load_default(13)

    card_width = len(titles) * (side + MARGIN) - MARGIN
    captions = [_wrap(card.caption, card_width, font) for card in cards]
    card_height = max(map(len, captions)) * LINE + side + MARGIN
    rows = -(-len(cards) // across)
    sheet = Image.new(
        "RGB",
        (across * (card_width + 2 * MARGIN) + MARGIN, LINE + 2 * MARGIN + rows * (card_height + MARGIN)),
        _PAPER,
    )
    draw = ImageDraw.Draw(sheet)
    for number, card in enumerate(cards):
        left = MARGIN + number % across * (card_width + 2 * MARGIN)
        top = LINE + 2 * MARGIN + number // across * (card_height + MARGIN)
        for i, (title, picture) in enumerate(zip(titles, card.pictures, strict=True)):
            x = left + i * (side + MARGIN)
            if number < across:
                draw.text((x, MARGIN), title, _PALE, font)
            _paste(sheet, draw, picture, (x, top), side, font)
        for i, line in enumerate(captions[number]):
            draw.text((left, top + side + 4 + i * LINE), line, _INK, font)
    with replacing(path) as work:
        sheet.save(work, format="PNG")


_Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


def _paste(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    picture: Image.Image | None,
    place: tuple[int, int],
    side: int,
    font: _Font,
) -> None:
    x, y = place
    if picture is None:
        draw.rectangle((x, y, x + side - 1, y + side - 1), _EMPTY)
        draw.text((x + 8, y + 8), "no picture", _PALE, font)
        return
    scale = min(side / picture.width, side / picture.height)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    scaled = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC if scale > 1 else Image.Resampling.LANCZOS)
    sheet.paste(scaled, (x + (side - size[0]) // 2, y + (side - size[1]) // 2))


def _wrap(text: str, width: int, font: _Font) -> list[str]:
    """Break a caption into at most CAPTION_LINES lines that fit, by the mean width of a letter; an ellipsis marks a
    cut."""
    text = " ".join(text.split())[: CAPTION_LINES * width]  # a letter is at least a pixel wide
    letters = int(0.9 * width * len(text) / max(1.0, font.getlength(text)))
    return textwrap.wrap(text, max(4, letters), max_lines=CAPTION_LINES, placeholder="...")
