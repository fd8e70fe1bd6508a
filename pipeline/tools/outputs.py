"""Check where a command may write: never over what the configuration reads, nor over files that the product did not
write.

What: `check` refuses a place that holds an input, or lies in one. `recorded` lists the files of a folder with their
digests when it is written; `foreign` names those that somebody added or changed since, which `carry` takes along.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sana_pipe.base.disk import file_digest
from sana_pipe.base.errors import UserError
from sana_pipe.base.options import flat
from sana_pipe.config import Config
from sana_pipe.tools.locations import cache_location

_READ = ("id", "start", "image_root", "caches", "cache")
"""The last parts of the options that name a file or a folder to read."""
_DECODER = "vae.decoder"
"""Another such option; `data.decoder` is a word."""


def inputs(config: Config) -> Iterator[tuple[str, Path]]:
    """The files and folders on a disk that a configuration reads, with the option that names each; last the sources of
    its cache. It walks all options of all sections, since any of them may name a file."""
    for name, value in flat(config.model_dump()):
        if name != _DECODER and name.rpartition(".")[2] not in _READ:
            continue
        for place in value if isinstance(value, list) else [value]:
            if isinstance(place, str) and Path(place).exists():
                yield name, Path(place).resolve()
    if "://" not in config.cache:
        with suppress(UserError, OSError):
            cache = cache_location(config).open_if_there()
            for source in cache.sources() if cache is not None else ():
                root = str((cache.last_scan(source) or {}).get("root", "")) if cache is not None else ""
                if root and "://" not in root and Path(root).exists():
                    yield f"the source {source}", Path(root).resolve()


def check(
    config: Config, out: Path, *, whole: bool = False, option: str = "--out", sources: Sequence[str] = ()
) -> None:
    """Refuse a place to write to that is an input of the configuration, or lies in one.

    Args:
        config: with all options, as in `inputs`.
        whole: everything at `out` is replaced, so no input may lie below it either.
        option: names `out`.
        sources: that are not in the cache yet.

    Raises:
        UserError: it is one. A cache, or a source around it, may be a project's folder, where results lie, too.
    """
    place, cache = out.resolve(), Path(config.cache).resolve()
    given = [(f"the source {source}", Path(source).resolve()) for source in sources if Path(source).exists()]
    for name, path in (*inputs(config), *given):
        guarded = name.startswith("the source ") or name.endswith((".id", ".start", _DECODER))
        inside = guarded and path in place.parents and path not in cache.parents
        if place == path or inside or (whole and place in path.parents):
            relation = "is" if place == path else "lies in" if inside else "holds"
            raise UserError(
                f"{option} {out}: {relation} what this configuration reads",
                expected="a place outside of weights, cache and pictures",
                found=f"{name}: {path}",
                fix=f"another {option}",
            )


def recorded(folder: Path) -> dict[str, str]:
    """Path in the folder -> digest of each file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in files}


def foreign(folder: Path, record: Mapping[str, Any], *also: str) -> list[Path]:
    """Files and links below a folder, relative to it, that its record does not name or that have changed since.

    Args:
        also: names of the product's files that no record names.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if inside.as_posix() in also or (path.is_dir() and not path.is_symlink()):
            continue
        digest = record.get(inside.as_posix())
        if digest is None or path.is_symlink() or not path.is_file() or file_digest(path) != digest:
            found.append(inside)
    return found


def carry(old: Path, new: Path, paths: list[Path]) -> list[tuple[Path, Path]]:
    """Put files of the old folder into the new one, under a free name; until the old folder is removed both have them.

    Returns:
        Those that got another name, with it.
    """
    renamed = []
    for path in paths:
        target, number = path, 1
        while os.path.lexists(new / target):
            number += 1
            target = path.with_name(f"{path.stem}.kept{'' if number == 2 else f'-{number - 1}'}{path.suffix}")
        (new / target).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(old / path, new / target, follow_symlinks=False)
        except OSError:  # a file system without hard links
            shutil.copy2(old / path, new / target, follow_symlinks=False)
        if target != path:
            renamed.append((path, target))
    return renamed
