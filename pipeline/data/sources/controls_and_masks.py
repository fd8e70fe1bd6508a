"""Control pictures, masks and rejected pictures of a sample (`data.pictures`): how a source finds them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sana_pipe.base.errors import UserError
from sana_pipe.data.sources.config import ControlsAndMasks, OtherPictureConfig
from sana_pipe.data.sources.filenames import base, composed, short_repr


@dataclass(frozen=True)
class ControlOrMask:
    """A kind of control pictures, masks or rejected pictures. One of `suffix`, `folder` and `column` is set, and
    `same_area` is, as in `OtherPictureConfig`.

    can_lack: whether `required: false` can be set. label: as in `RejectedPictureConfig`.
    """

    kind: str
    suffix: str | None
    folder: str | None
    column: str | None
    required: bool
    can_lack: bool = field(default=True, repr=False)  # stamps of tars have the repr
    same_area: bool = field(default=True, repr=False)
    label: str | None = None

    @property
    def way(self) -> str:
        """The field that is set."""
        return next(name for name in ("suffix", "folder", "column") if getattr(self, name) is not None)

    @property
    def option(self) -> str:
        """The setting, for messages."""
        return f"data.pictures.{self.kind}.{self.way}: {getattr(self, self.way)}"

    @property
    def lacking(self) -> str:
        """The beginning of the reason of a sample that is rejected without it."""
        return f"has no {self.kind} picture"

    @property
    def remedy(self) -> str:
        """Say what a user can do where samples lack it."""
        places = {
            "suffix": "put X{1}.png next to X{0}.jpg".format(*("/" + (self.suffix or "")).rsplit("/", 2)[-2:]),
            "folder": f"put the {self.kind} picture of X.jpg into the data as {(self.folder or '').strip('/')}/X.png",
            "column": f"fill the column {self.column}",
        }
        option = f"data.pictures.{self.kind}"
        without = f"; --set {option}.required=false does without it" if self.can_lack else ""
        return f"{self.option} finds none: {places[self.way]}, or name another place by {option}{without}"

    def is_better(self, row: Mapping[str, Any]) -> bool | str:
        """Return whether it is better than the sample's picture by the column `label` of a row, so that the two change
        places; or the reason why the row is no pair."""
        if self.label is None:
            return False
        try:
            value = float(row.get(self.label))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            value = math.nan
        if value == 0.5:
            return f"its pair is a tie (data.pictures.{self.kind}.label: {self.label})"
        if value not in (0, 1):
            found = short_repr(row.get(self.label))
            return f"its {self.label!r} is {found}: expected 1, 0, or 0.5 for a tie (data.pictures.{self.kind}.label)"
        return value == 0

    def owner(self, name: str) -> str | None:
        """The `base` of the pictures that a file is the control picture or mask of; None: it is none by its name."""
        if self.folder is not None:
            above, inside, below = f"/{name}".partition(f"/{self.folder.strip('/')}/")
            return base(f"{above}/{below}"[1:]) if inside else None
        of_picture, _, own = (self.suffix or "").rpartition("/")
        stem, suffix = base(name), composed(own)
        picture = stem[: -len(suffix)]
        belongs = suffix and picture and stem[len(picture) :].lower() == suffix.lower()
        return base(f"{picture}{of_picture}.png") if belongs else None

    def owners(self, key: str) -> list[str]:
        """Return what `owner` may give for the control picture or mask of a picture. A folder `train/masks` is next to
        `train/images`, too: a picture's name without `train` counts."""
        if self.folder is None:
            return [base(key)]
        names = [base(key), *sisters(key)]
        if parent := self.folder.strip("/").rpartition("/")[0]:
            above, inside, below = f"/{key}".partition(f"/{parent}/")
            shorter = f"{above}/{below}"[1:]
            names += [base(shorter), *sisters(shorter)] if inside else []
        return list(dict.fromkeys(names))

    def nearest(self, file: str, pictures: list[str]) -> list[str]:
        """List the pictures that are below the folder in which the folder of a control picture or mask is."""
        if self.folder is None or "/" not in self.folder.strip("/"):
            return pictures
        above = file[: f"/{file}".find(f"/{self.folder.strip('/')}/")] + self.folder.strip("/").rpartition("/")[0]
        return [each for each in pictures if each.startswith(f"{above}/")] or pictures


def sisters(key: str) -> list[str]:
    """The `base` of a picture without one of the folders that it is in: what it shares with `masks/x.png` as
    `images/x.jpg`, and with `train/masks/x.png` as `train/images/x.jpg`."""
    parts = base(key).split("/")
    return ["/".join([*parts[:place], *parts[place + 1 :]]) for place in range(len(parts) - 1)]


def wanted(pictures: ControlsAndMasks) -> tuple[ControlOrMask, ...]:
    """Return those that a source has to find; what is made from the sample's picture is none of them."""
    every: Iterable[tuple[str, OtherPictureConfig | None]] = pictures
    return tuple(
        ControlOrMask(
            kind,
            given.suffix,
            given.folder,
            given.column,
            getattr(given, "required", True),
            can_lack="required" in type(given).model_fields,
            same_area=given.same_area,
            label=getattr(given, "label", None),
        )
        for kind, given in every
        if given is not None and (given.suffix or given.folder or given.column)
    )


def remedy(controls_and_masks: Iterable[ControlOrMask], reasons: Iterable[str]) -> str | None:
    """Say what a user can do, if reasons of rejects say that samples lack one; else None."""
    reasons = list(reasons)
    return (
        "; ".join(one.remedy for one in controls_and_masks if any(one.lacking in reason for reason in reasons)) or None
    )


def check(controls_and_masks: Iterable[ControlOrMask], ways: frozenset[str], format: str) -> None:
    """Raises a UserError if a source of this format cannot find one."""
    for one in controls_and_masks:
        if one.way not in ways:
            raise UserError(
                f"{one.option}: pictures of a source of the format {format} are not found this way",
                expected=" or ".join(f"data.pictures.{one.kind}.{way}" for way in sorted(ways)) or "none",
            )
