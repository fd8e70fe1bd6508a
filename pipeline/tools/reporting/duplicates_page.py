"""The page of `bucket --show-duplicates`: the largest groups of pictures that are equal or look the same.

Each picture has the words whether it stays, the bits in which it differs from the first of its group, and the reason
to be in it; each group has the option that keeps what is left out. The page has at most `GROUPS` groups of `MEMBERS`
pictures, and says what it lacks. Pictures are read from their sources: there is no encoder and no decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageOps

from sana_pipe.base.config import setting
from sana_pipe.data.snapshots.duplicates import OPTION, Duplicates, Member
from sana_pipe.data.snapshots.near import DISTANCE
from sana_pipe.tools.reporting import page
from sana_pipe.tools.reporting.blocks import Block, Card, Heading
from sana_pipe.tools.reporting.source_pictures import SIDE, Embedded, embedded

GROUPS, MEMBERS = 50, 12
"""Groups of the page, and pictures of each."""
FRAME, STAYS = 4, (21, 128, 61)
"""Width in pixels, and colour of the frame around a picture that stays."""
SHOW = "--show-duplicates"

Thumbnail = Callable[[str, str], Image.Image | None]
"""Source and item -> the picture, small; None if it can no longer be read."""


def write(every: Sequence[Duplicates], kept: Sequence[str], thumbnail: Thumbnail, out: Path) -> None:
    """Write the page. every: groups by kind; kept: `bucket.dedup_keep`. Errors: as of `page.write`."""
    sections = [(_heading(groups), _blocks(groups, kept, thumbnail)) for groups in every]
    page.write("Duplicates", sections, out, option=SHOW)


def _heading(groups: Duplicates) -> Heading:
    return Heading(groups.kind, "Pictures that look the same" if groups.kind == "near" else "Equal files")


def _blocks(groups: Duplicates, kept: Sequence[str], thumbnail: Thumbnail) -> list[Block]:
    """A line on all groups, then a card for each of the largest."""
    report = groups.report()
    lines: list[Block] = [
        f"{report['groups']} groups of {report['pictures']} pictures, of which {report['left_out']} are left out."
        f"{f' Shown are the {GROUPS} largest groups.' if len(groups) > GROUPS else ''} The first picture of a group "
        f"stays; what stays has a frame. `bucket` without --dry-run lists all groups in a CSV file."
    ]
    if groups.kind == "near":
        lines.append(
            f"Distance: the bits of 128 in which a picture's hash differs from that of the first one. Up to {DISTANCE} "
            f"look the same; a group may have more, as A looks like B and B like C."
        )
    if flat := report["not_compared"]["pictures"]:
        lines.append(f"{flat} pictures have too little detail to be compared.")
    cards = [
        _card(count, members, kept, thumbnail, groups.kind == "near")
        for count, members in groups.largest(GROUPS, MEMBERS)
    ]
    return [*lines, *cards]


def _card(count: int, members: list[Member], kept: Sequence[str], thumbnail: Thumbnail, near: bool) -> Card:
    title = f"Group {members[0].group}: {count} pictures"
    if count > len(members):
        title += f", of which {len(members)} are shown"
    left_out = [member.name for member in members if not member.stays]
    keep = f"To keep what is left out here: {setting(OPTION, [*kept, *left_out])}" if left_out else "All of them stay."
    return Card([_picture(member, thumbnail, near) for member in members], title, keep)


def _picture(member: Member, thumbnail: Thumbnail, near: bool) -> Embedded:
    picture = thumbnail(member.source, member.item)
    if picture is not None and member.stays:
        picture.thumbnail((SIDE - 2 * FRAME, SIDE - 2 * FRAME))
        picture = ImageOps.expand(picture, FRAME, STAYS)
    parts = ["stays" if member.stays else "left out", member.why]
    if near and member.why:
        parts.append("other colours" if member.bits is None else f"distance {member.bits}")
    said = ", ".join(part for part in parts if part)
    return embedded(picture, f"{said}: {member.name} ({member.width} x {member.height})", SIDE)
