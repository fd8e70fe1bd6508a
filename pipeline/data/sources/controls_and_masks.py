"""Control pictures and masks of a sample (`data.pictures`): how a source finds them next to the picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sana_pipe.base.errors import UserError
from sana_pipe.data.sources.config import ControlOrMaskConfig, ControlsAndMasks
from sana_pipe.data.sources.filenames import base, composed


@dataclass(frozen=True)
class ControlOrMask:
    """A kind of control pictures and masks. One of `suffix`, `folder` and `column` is set, as in
    `ControlOrMaskConfig`."""

    kind: str
    suffix: str | None
    folder: str | None
    column: str | None
    required: bool

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
            "suffix": f"put X{self.suffix}.png next to X.jpg",
            "folder": f"put the {self.kind} picture of X.jpg into the data as {(self.folder or '').strip('/')}/X.png",
            "column": f"fill the column {self.column}",
        }
        option = f"data.pictures.{self.kind}"
        return (
            f"{self.option} finds none: {places[self.way]}, or name another place by {option}; "
            f"--set {option}.required=false does without it"
        )

    def owner(self, name: str) -> str | None:
        """The `base` of the pictures that a file is the control picture or mask of; None: it is none by its name."""
        if self.folder is not None:
            above, inside, below = f"/{name}".partition(f"/{self.folder.strip('/')}/")
            return base(f"{above}/{below}"[1:]) if inside else None
        stem, suffix = base(name), composed(self.suffix or "")
        picture = stem[: -len(suffix)]
        belongs = suffix and picture and stem[len(picture) :].lower() == suffix.lower()
        return base(f"{picture}.png") if belongs else None

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
    every: Iterable[tuple[str, ControlOrMaskConfig | None]] = pictures
    return tuple(
        ControlOrMask(kind, given.suffix, given.folder, given.column, given.required)
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
                f"{one.option}: control pictures and masks of a source of the format {format} are not found this way",
                expected=" or ".join(f"data.pictures.{one.kind}.{way}" for way in sorted(ways)) or "none",
            )
