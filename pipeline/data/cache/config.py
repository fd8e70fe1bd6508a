"""The section `mirror`, and `encode.storage`: the form in which values are stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sana_pipe.base.config import LocalPath, Section

Storage = Literal["bf16", "bf16-zstd", "int8"]


class StorageConfig(Section):
    """The form in which values are stored; part of the encoding. `storage: int8` sets both kinds.

    bf16: as they are. bf16-zstd: the same bits in 0.7 of the bytes; reading costs CPU time. int8: half the bytes, an
    error below one per cent (`encode` prints it)."""

    latent: Storage = "bf16"
    """Storage of latents."""
    text: Storage = "bf16"
    """Storage of text rows."""

    @classmethod
    def from_word(cls, word: str) -> Any:
        return {"latent": word, "text": word}


class MirrorConfig(Section):
    """Local copies of shards and tables of a cache in an object store (`cache: s3://...`), shared by all processes of
    the machine."""

    path: LocalPath | None = None
    """Folder of the copies; null: `~/.cache/sana-pipe`."""
    gib: Annotated[float, Field(gt=0)] = 64.0
    """Limit in GiB; free disk space limits the copies, too."""
