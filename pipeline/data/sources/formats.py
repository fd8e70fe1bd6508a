"""The formats that `--data` may have: what `--format` takes, and where each is described.

A new format is a module with a subclass of `sources.source.Format`, and its line here. Strings, so that the
command line knows the names without importing the modules.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sana_pipe.data.sources.source import Format

FORMATS: dict[str, str] = {
    "folder": "sana_pipe.data.sources.folder:Folder",
    "webdataset": "sana_pipe.data.sources.tars:Webdataset",
    "wids": "sana_pipe.data.sources.tars:Wids",
    "latents": "sana_pipe.data.sources.latent_tars:Latents",
    "parquet": "sana_pipe.data.sources.tables:Parquet",
    "jsonl": "sana_pipe.data.sources.tables:Jsonl",
    "csv": "sana_pipe.data.sources.tables:Csv",
}
"""Name -> `module:class`. Of two that may have a file, the first takes it."""


def formats() -> dict[str, Format]:
    """All formats, by name."""
    every = {}
    for name, place in FORMATS.items():
        module, _, described = place.partition(":")
        every[name] = getattr(importlib.import_module(module), described)(name)
    return every
