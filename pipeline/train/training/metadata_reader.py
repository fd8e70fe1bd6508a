"""Read a checkpoint's tensors without executing code from it.

What: `TensorOnlyReader` is torch's `FileSystemReader` whose `read_metadata` admits only the classes of DCP's metadata.
Why: `.metadata` is a pickle, a pickle can call any function it names, and checkpoints are exchanged between people.
Entries with Python objects are refused, too, since torch's planner would unpickle them unchecked; our checkpoints hold
tensors only. File names must stay inside the folder.
Price: if a version of torch writes another class into `.metadata`, its name must be added to `_CLASSES`.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from sana_pipe.base.errors import UserError, not_permitted

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),  # admitted, so that the error can name the entry
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}


class CheckpointError(UserError):
    """A checkpoint that is damaged, incomplete, or does not belong to this run."""

    exit_code = 7


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a file that may be whole, but cannot be read now."""
    return not_permitted(path, CheckpointError) or CheckpointError(
        f"{path}: cannot be read: {error}", fix="check the disk and the permissions, then run the same command again"
    )


class TensorOnlyReader(dcp.FileSystemReader):
    """Torch's reader; raises CheckpointError for metadata with anything but tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        metadata = read_metadata(Path(path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(path: Path) -> Metadata:
    """DCP's metadata of the tensors; anything else is refused."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        entries = metadata.state_dict_metadata.items()
        no_tensors = [name for name, entry in entries if not isinstance(entry, TensorStorageMetadata)]
        for info in metadata.storage_data.values():
            info.relative_path = str(info.relative_path)  # a pickled path can read otherwise than it shows itself
        names = {info.relative_path for info in metadata.storage_data.values()}
        outside = [name for name in names if "/" in name or name in ("", ".", "..")]
    except Exception as error:  # an unpickler may raise anything on unexpected bytes
        raise CheckpointError(
            f"{path}: is refused: it is damaged, or would run code when it is read",
            expected="the classes of torch's distributed checkpoint",
            found=f"{type(error).__name__}: {error}",
            fix=FIX,
        ) from None
    if no_tensors or outside:
        what = "names files outside the checkpoint" if outside else "holds entries that are no tensors"
        raise CheckpointError(f"{path}: {what}", found=", ".join(sorted(outside or no_tensors)[:5]), fix=FIX)
    return metadata


FIX = "use a checkpoint that sana-pipe wrote, from a source you trust"


def _member(of: Any, name: str) -> Enum:
    """A member of an enumeration; not `getattr`, which leads from any class to code."""
    if not isinstance(of, EnumType):
        raise pickle.UnpicklingError(f"builtins.getattr({of}, {name})")
    return of.__members__[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # its name in Python 3.13
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickle a member of an enumeration
            return _member
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)
