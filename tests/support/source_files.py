"""Tar files to read, and what a source lists."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.source import Fragment, Item, ListedItems, Part, Source

Rows = list[tuple[str, bytes | str | dict[str, Any]]]


def make_tar(path: Path, members: Rows, format: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members:
            data = json.dumps(content).encode() if isinstance(content, dict) else content
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def opened(data: object, format: str | None = None, **config: Any) -> Source:
    return open_source(str(data), DataConfig(**config), None, format)


def cut(source: Source, part: Part, size: int) -> list[Fragment]:
    """The fragments of a part."""
    items = ListedItems(source.scratch)
    fragments = list(source.fragments(part, size, items))
    items.finish()
    return fragments


def listed(source: Source) -> tuple[dict[str, Item], dict[str, str]]:
    items: dict[str, Item] = {}
    rejects: dict[str, str] = {}
    keys = []
    for entry in source.items():
        if isinstance(entry, Item):
            assert entry.key not in items
            items[entry.key] = entry
            keys.append(entry.key)
        else:
            assert entry.reason
            rejects[entry.key] = f"{rejects[entry.key]}; {entry.reason}" if entry.key in rejects else entry.reason
    assert source.has_keys or keys == sorted(keys)
    return items, rejects
