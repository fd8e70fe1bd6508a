"""Further pictures of a sample: found in the layouts that people use, cropped as the picture, stored as records, and
refused with a reason."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import stages.bucket
import stages.encode
from pipeline.cache import audit
from pipeline.cache.root import Cache
from pipeline.config import Config
from pipeline.errors import ConfigError, RejectRateError, UserError
from pipeline.images import decoding
from pipeline.loader.loader import Loader
from pipeline.models.encoders import LatentEncoder
from pipeline.models.frozen import from_bits
from pipeline.signals.control import ControlRecipe
from pipeline.signals.mask import MaskRecipe
from tests.support.loading import loader_settings

MakeConfig = Callable[..., Config]
SIDES = [(96, 64), (64, 96), (80, 80), (130, 90)]


def encoded(picture: np.ndarray, format: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, format)
    return out.getvalue()


class Samples:
    """Pictures with a control and a mask each, and the layouts in which they are laid out."""

    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        self.names = [f"{number:02d}" for number in range(len(SIDES))]
        pixels = lambda height, width: draws.integers(0, 255, (height, width, 3), np.uint8)  # noqa: E731
        self.pictures = [encoded(pixels(*side)) for side in SIDES]
        self.controls = [encoded(pixels(*side)) for side in SIDES]
        self.masks = [encoded(pixels(height // 2, width // 2)[..., 0]) for height, width in SIDES]
        self.captions = [f"picture {name}" for name in self.names]

    def __iter__(self) -> Any:
        return zip(self.names, self.pictures, self.controls, self.masks, self.captions, strict=True)

    def suffix(self, folder: Path) -> list[str]:
        for name, picture, control, mask, caption in self:
            (folder / f"{name}.png").write_bytes(picture)
            (folder / f"{name}.control.png").write_bytes(control)
            (folder / f"{name}-masklabel.png").write_bytes(mask)
            (folder / f"{name}.txt").write_text(caption)
        return ["suffix=.control", "suffix=-masklabel"]

    def sister_folders(self, folder: Path) -> list[str]:
        for part in ("photos", "edges", "masks"):
            (folder / part).mkdir()
        for name, picture, control, mask, caption in self:
            (folder / f"photos/{name}.png").write_bytes(picture)
            (folder / f"edges/{name}.png").write_bytes(control)
            (folder / f"masks/{name}.png").write_bytes(mask)
            (folder / f"photos/{name}.txt").write_text(caption)
        return ["folder=edges", "folder=masks/"]

    def imagefolder(self, folder: Path) -> list[str]:
        rows = []
        for name, picture, control, mask, caption in self:
            for part, data in (("image", picture), ("conditioning_image", control), ("mask", mask)):
                (folder / part).mkdir(exist_ok=True)
                (folder / f"{part}/{name}.png").write_bytes(data)
            at = {"conditioning_image": f"conditioning_image/{name}.png", "mask": f"mask/{name}.png"}
            rows.append(json.dumps({"file_name": f"image/{name}.png", **at, "text": caption}))
        (folder / "metadata.jsonl").write_text("\n".join(rows))
        return ["column=conditioning_image", "column=mask"]

    def listing(self, folder: Path) -> list[str]:
        self.imagefolder(folder)
        rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
        (folder / "metadata.jsonl").unlink()
        with (folder / "all.csv").open("w") as sheet:
            writer = csv.DictWriter(sheet, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return ["column=conditioning_image", "column=mask"]

    def webdataset(self, folder: Path) -> list[str]:
        with tarfile.open(folder / "00.tar", "w") as tar:
            for name, picture, control, mask, caption in self:
                members = {".png": picture, ".control.png": control, ".mask.png": mask, ".txt": caption.encode()}
                for ending, data in members.items():
                    info = tarfile.TarInfo(name + ending)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        return ["suffix=.control", "suffix=.mask"]

    def parquet(self, folder: Path) -> list[str]:
        columns = {"image": self.pictures, "conditioning_image": self.controls, "mask": self.masks}
        structs = {key: [{"bytes": data, "path": None} for data in values] for key, values in columns.items()}
        pq.write_table(pa.table({**structs, "text": self.captions}), folder / "all.parquet", row_group_size=3)
        return ["column=conditioning_image", "column=mask"]

    def parquet_of_names(self, folder: Path) -> list[str]:
        self.imagefolder(folder)
        rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
        (folder / "metadata.jsonl").unlink()
        pq.write_table(pa.Table.from_pylist(rows), folder / "all.parquet")
        return ["column=conditioning_image", "column=mask"]


LAYOUTS = ["suffix", "sister_folders", "imagefolder", "listing", "webdataset", "parquet", "parquet_of_names"]


@pytest.fixture(scope="module")
def samples() -> Samples:
    return Samples()


def laid_out(samples: Samples, layout: str, folder: Path) -> tuple[str, list[str]]:
    """`--data`, and the settings that find the further pictures."""
    data = folder / "data"
    data.mkdir(parents=True)
    control, mask = getattr(samples, layout)(data)
    return str(data), [f"data.pictures.control.{control}", f"data.pictures.mask.{mask}"]


def configured(make_config: MakeConfig, folder: Path, *options: str) -> Config:
    return make_config(folder, "encode.unit_images=2", *options)


def keys(config: Config, kind: str) -> set[bytes]:
    cache = Cache.of(config)
    [recipe] = cache.recipes(kind)
    return {bytes(key) for key in cache.index(recipe.name).keys}


def values(config: Config, kind: str) -> dict[str, np.ndarray]:
    """The records of a snapshot by the picture's name, uint16."""
    snapshot, result = Cache.of(config).open_snapshot(), {}
    reader = snapshot.reader(kind)
    for row in range(len(snapshot)):
        sample = snapshot.sample(row)
        place, into = sample.pictures[kind], np.empty(snapshot.shape(kind, sample.bucket), np.uint16)
        reader.read(place.shard, place.offset, place.key, place.checksum, into.reshape(-1, *into.shape[2:]))
        result[snapshot.source_item(row)[1]] = into
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_records(
    samples: Samples, layout: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    wanted: dict[str, set[bytes]] = {}
    for one in dict.fromkeys(["suffix", layout]):
        data, options = laid_out(samples, one, tmp_path / one)
        config = configured(make_config, tmp_path / one, *options)
        done = stages.encode.run(config, data)
        assert done["items"] == done["images"] == done["controls"] == done["masks"] == len(SIDES)
        assert done["rejects"] == done["left"] == 0 and not list(audit.verify(Cache.of(config)))
        for kind in ("latent", "control", "mask"):
            assert wanted.setdefault(f"{kind}", keys(config, kind)) == keys(config, kind)
        assert stages.encode.dry_run(config, data, probe=False) == 0
        again = stages.encode.run(config, data)
        assert again["images"] == again["controls"] == again["masks"] == 0 and again["reused"]["masks"] == len(SIDES)
        stages.bucket.run(config)
        assert sorted(Cache.of(config).open_snapshot().pictures) == ["control", "latent", "mask"]
