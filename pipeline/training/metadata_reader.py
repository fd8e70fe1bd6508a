"""Reading a checkpoint's tensors without running what is in it.

What: `Reader` is torch's `FileSystemReader` with a `read_metadata` that admits the classes of DCP's metadata alone.
Why: `.metadata` is a pickle, and a pickle calls whatever it names; checkpoints are passed on between people.
Entries that hold Python objects are refused, too, since torch's planner would unpickle them without a check; a
checkpoint of ours holds tensors only. Names of files stay inside the folder.
Price: a version of torch that writes another class into `.metadata` needs its name in `_CLASSES`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from pipeline.errors import UserError

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),  # admitted to be refused by the name of its entry
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


class Reader(dcp.FileSystemReader):
    """As torch's. Raises CheckpointError for metadata that names anything else than DCP's tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        metadata = read_metadata(Path(path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(path: Path) -> Metadata:
    """DCP's description of the tensors.

    Raises:
        CheckpointError: a file that cannot be read, or that holds something else.
    """
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
        odd = [
            name for name, entry in found.state_dict_metadata.items() if not isinstance(entry, TensorStorageMetadata)
        ]
        names = {str(info.relative_path) for info in found.storage_data.values()}
        outside = [name for name in names if Path(name).name != name]
    except Exception as error:  # an unpickler fails in any way on bytes that are not what it expects
        raise CheckpointError(
            f"{path}: is refused: it is damaged, or would run code when it is read",
            expected="the classes of torch's distributed checkpoint",
            found=f"{type(error).__name__}: {error}",
            fix=_FIX,
        ) from None
    if odd or outside:
        what = "names files outside the checkpoint" if outside else "holds entries that are no tensors"
        raise CheckpointError(f"{path}: {what}", found=", ".join(sorted(outside or odd)[:5]), fix=_FIX)
    return found


_FIX = "use a checkpoint that sana-pipe wrote, from somebody you trust"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)
