"""What people have in place of pictures that can be read, and the way to bring it into a form that can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from pipeline.sources.filenames import extension
from pipeline.sources.filesystem import Filesystem, Unreadable

_DATASETS = "python -c \"from datasets import {name}; {make}\" && sana-pipe encode --data '{out}'"
_MAKE_DICT = "[part.to_parquet('{place}-' + name + '.parquet') for name, part in load_from_disk('{place}').items()]"
_WAYS = {
    "archives": ({"zip", "rar", "7z"}, "unpack them: a folder of pictures, or of .tar files"),
    "files of DVC in place of the data": ({"dvc"}, "dvc pull"),
    "TFRecord files": ({"tfrecord", "tfrecords"}, "write their pictures and captions into webdataset tars or parquet"),
    "LMDB databases": ({"mdb", "lmdb"}, "write their pictures and captions into webdataset tars or parquet"),
    "arrays": ({"npy", "npz", "pt", "pth", "h5", "hdf5", "pkl"}, "write the pictures as .png files, captions as .txt"),
    "videos": ({"mp4", "mov", "mkv", "webm", "avi"}, "take pictures out of them: ffmpeg -i VIDEO -r 1 %06d.png"),
}


def explain(filesystem: Filesystem, files: Iterable[str] | None = None) -> tuple[str, str] | None:
    """What files without a picture are, with an example, and how to make them readable; None if that is unknown."""
    for file in filesystem.find() if files is None else files:
        ending, place = extension(file), f"{filesystem.location}/{file}"
        if ending == "arrow":
            return f"data sets of the `datasets` library ({file})", _of_datasets(filesystem, file)
        for what, (endings, way) in _WAYS.items():
            if ending in endings:
                return f"{what} ({place})", way
    return None


def _of_datasets(filesystem: Filesystem, file: str) -> str:
    """The command that writes a folder of `save_to_disk`, or a single file of the library's cache, as parquet."""
    for folder in _above(file):
        place = f"{filesystem.location}/{folder}".rstrip("/")
        for mark, make, out in (
            ("dataset_dict.json", _MAKE_DICT.replace("{place}", place), f"{place}-*.parquet"),
            ("state.json", f"load_from_disk('{place}').to_parquet('{place}.parquet')", f"{place}.parquet"),
        ):
            with suppress(Unreadable):
                filesystem.stat(f"{folder}/{mark}".lstrip("/"))
                return _DATASETS.format(name="load_from_disk", make=make, out=out)
    place = f"{filesystem.location}/{file}"
    make = f"Dataset.from_file('{place}').to_parquet('{place}.parquet')"
    return _DATASETS.format(name="Dataset", make=make, out=f"{place}.parquet")


def _above(file: str) -> Iterator[str]:
    """The folders above a file, the root ("") first."""
    parts = file.split("/")[:-1]
    yield from ("/".join(parts[:length]) for length in range(len(parts) + 1))
