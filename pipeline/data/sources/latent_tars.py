"""Tars of latents that others have computed: `KEY.npy` or `KEY.safetensors` with `KEY.json`, which has the caption.

The rules are those of tars of pictures (`sources.tars`). Nothing in a member is executed: arrays are read without
pickle, and pickles (`.pth`, `.pt`, `.pkl`) are rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from sana_pipe.data.sources.filenames import extension
from sana_pipe.data.sources.filesystem import Filesystem
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import Given, Source
from sana_pipe.data.sources.tars import TarSource, Webdataset, tars_of

PICKLES = frozenset({"pth", "pt", "pkl", "pickle", "bin", "ckpt"})
"""Endings of files that can run code when they are read."""


class LatentTars(TarSource):
    """Tars whose items are latents."""

    holds_latents = True
    members: ClassVar[frozenset[str]] = frozenset({"npy", "safetensors"})
    noun: ClassVar[str] = "latent"

    def _lost(self, key: str, fields: Iterable[str], has_item: bool) -> str | None:
        if key in PICKLES:
            return "is a pickle, which can run code when it is read; write the array as .npy or .safetensors"
        return super()._lost(key, fields, has_item)


class Latents(Webdataset):
    """Tars of latents; only `--format latents` chooses them."""

    def shows(self, file: str) -> bool:
        return False  # a folder of tars is one of pictures unless the user says otherwise

    def has(self, filesystem: Filesystem, file: str) -> bool:
        return False

    def divide(self, filesystem: Filesystem) -> tuple[list[str], Kinds]:
        return tars_of(filesystem, lambda file: extension(file) == "tar")

    def source(self, given: Given, files: Iterable[str]) -> Source:
        rule = replace(given.rule, fallback=("prompt", "caption"))
        return LatentTars(given.filesystem, files, rule, given.name, self.name)
