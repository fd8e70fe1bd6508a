"""A random search: whatever a control or mask holds, its sample has the right record or is rejected with a reason."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
from sana_pipe.config import Config
from sana_pipe.data.cache import audit
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoders.frozen import from_bits
from sana_pipe.data.encoders.vae import LatentEncoder
from sana_pipe.data.images import decoding
from sana_pipe.data.signals.latent import LatentEncoding
from tests.support.constants import set_constants, unit_sizes
from tests.support.trees import files

MakeConfig = Callable[..., Config]
LAYOUTS = ("suffix", "folder", "tar", "parquet")
NAMES = (
    "{:02}",
    "{:02}.b.c",
    "{:02} ünï",
    "{:02}\N{LATIN SMALL LETTER U}\N{COMBINING DIAERESIS}",
    "UP {:02}",
    "{:02}-x",
)
COUNT = 24


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def forms(draws: np.random.Generator, width: int, height: int, kind: str) -> dict[str, tuple[bytes | None, str | None]]:
    """Files that may stand for a control picture or mask of (width, height), and a part of its reject; None: it is
    used.

    A mask's are of gray pixels: colours are refused. The palette of RGB has colours for gray pixels, too.
    """
    image = palette = Image.fromarray(draws.integers(0, 255, (height, width, 3), np.uint8))
    if kind == "mask":
        palette = image.convert("L")
        image = palette.convert("RGB")
    png, turned = saved(image, "PNG"), image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray(draws.integers(0, 1 << 16, (height, width)).astype(np.uint16))
    clear = image.copy()
    clear.putalpha(Image.fromarray(draws.integers(0, 255, (height, width), np.uint8)))
    return {
        "plain": (png, None),
        "twice as large": (saved(image.resize((2 * width, 2 * height)), "PNG"), None),
        "a pixel less": (saved(image.resize((width - 1, height - 1)), "PNG"), None),
        "turned by EXIF": (saved(turned, "JPEG", exif=exif), None),
        "palette": (saved(palette.convert("P"), "PNG"), None),
        "gray": (saved(image.convert("L"), "WEBP", lossless=True), None),
        "two colours": (saved(image.convert("1"), "PNG"), None),
        "CMYK": (saved(image.convert("CMYK"), "JPEG"), None),
        "16 bits": (saved(deep, "PNG"), None),
        "alpha": (saved(clear, "PNG"), None),
        "turned": (saved(turned.resize((height + 40, width)), "PNG"), "aspect ratio"),
        "wider": (saved(image.resize((width * 3 // 2, height)), "PNG"), "aspect ratio"),
        "cut": (png[: len(png) // 2], ""),
        "its head": (png[:40], ""),
        "empty": (b"", ""),
        "text": (b"not a picture", ""),
        "missing": (None, "picture (data.pictures."),
    }


class Samples:
    """Names, pictures, and of each sample a control of some form. expected: of a reject, by the sample's key."""

    def __init__(self, seed: int, layout: str, kind: str, data: Path):
        draws = np.random.default_rng(seed)
        self.controls: dict[str, bytes | None] = {}
        self.expected: dict[str, str | None] = {}
        self.form: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        rows = list[tuple[str, bytes, bytes | None]]()
        for number in range(10, 10 + COUNT):
            width, height = (int(side) for side in draws.integers(48, 160, 2))
            picture = saved(Image.fromarray(draws.integers(0, 255, (height, width, 3), np.uint8)), "PNG")
            every = forms(draws, width, height, kind)
            form = str(draws.choice(list(every)))
            name = NAMES[number % len(NAMES)].format(number)
            control, reason = every[form]
            rows.append((name, picture, control))
            self.controls[name], self.expected[name], self.form[name] = control, reason, form
            self.keys[name] = f"{number:02}"
        getattr(self, layout)(data, rows)

    def suffix(self, data: Path, rows: list[tuple[str, bytes, bytes | None]]) -> None:
        for name, picture, control in rows:
            (data / f"{name}.png").write_bytes(picture)
            (data / f"{name}.txt").write_text("x")
            if control is not None:
                (data / f"{name}.control.PNG").write_bytes(control)

    def folder(self, data: Path, rows: list[tuple[str, bytes, bytes | None]]) -> None:
        (data / "control").mkdir()
        for name, picture, control in rows:
            (data / f"{name}.png").write_bytes(picture)
            (data / f"{name}.txt").write_text("x")
            if control is not None:
                (data / f"control/{name}.jpg").write_bytes(control)

    def tar(self, data: Path, rows: list[tuple[str, bytes, bytes | None]]) -> None:
        with tarfile.open(data / "00.tar", "w") as tar:
            for name, picture, control in rows:
                for ending, content in {"png": picture, "txt": b"x", "control.png": control}.items():
                    if content is not None:
                        info = tarfile.TarInfo(f"{name.replace('.', '_')}.{ending}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))

    def parquet(self, data: Path, rows: list[tuple[str, bytes, bytes | None]]) -> None:
        names, pictures, controls = zip(*rows, strict=True)
        columns = {"name": names, "image": pictures, "control": controls, "text": ["x"] * len(rows)}
        pq.write_table(pa.table({key: list(values) for key, values in columns.items()}), data / "00.parquet")


WAYS = {"suffix": "suffix=.control", "folder": "folder=control", "tar": "suffix=.control", "parquet": "column=control"}


def record(kind: str, content: bytes, size: tuple[int, int], decoder: str, vae: LatentEncoder, side: int) -> Any:
    """What the record of a control picture or mask should be, fp32: the pixels at the bucket by the way of any
    picture."""
    pixels = decoding.load(content, size, decoder=decoder)
    if kind == "control":
        return from_bits(vae.encode(pixels[None])[0]).float().numpy()
    gray = np.asarray(Image.fromarray(pixels).convert("L")).astype(np.float64) / 255
    return gray.reshape(1, size[0] // side, side, size[1] // side, side).mean((2, 4))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 20))])
@pytest.mark.parametrize("kind", ["control", "mask"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_sample_has_the_right_record_or_a_reason(
    layout: str, kind: str, seed: int, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, unit_sizes(4, 512))
    data = tmp_path / "data"
    data.mkdir()
    samples = Samples(seed, layout, kind, data)
    option = f"data.pictures.{kind}.{WAYS[layout]}"
    names = ["data.key_field=name"] if layout == "parquet" else []
    config = make_config(tmp_path, "encode.max_reject_rate=1", option, *names)
    done = sana_pipe.stages.encode.run(config, str(data))
    refused = {name for name, reason in samples.expected.items() if reason is not None}
    with Path(config.cache, "reports/rejects-data.csv").open() as sheet:
        reasons = {row["item"]: row["reason"] for row in csv.DictReader(sheet)}
    assert done["items"] == COUNT and done["rejects"] == len(reasons) == len(refused), reasons
    for name in refused:
        [reason] = [f"{item}: {text}" for item, text in reasons.items() if samples.keys[name] in item]
        assert str(samples.expected[name]) in reason and (kind in reason or "control" in reason), (
            samples.form[name],
            reason,
        )
    before, again = files(Path(config.cache)), sana_pipe.stages.encode.run(config, str(data))
    assert again[f"{kind}s"] == again["images"] == 0 and again["rejects"] == len(refused)
    assert not list(audit.verify(Cache(config.cache))) and files(Path(config.cache)).keys() >= before.keys()
    sana_pipe.stages.bucket.run(config)
    snapshot, vae = Cache(config.cache).open_snapshot(), LatentEncoder.load(config.vae, torch.device("cpu"))
    assert len(snapshot) == COUNT - len(refused)
    encoding, reader = snapshot.pictures[kind], snapshot.reader(kind)
    side = snapshot.encoding(LatentEncoding).compression
    for row in range(len(snapshot)):
        sample, item = snapshot.sample(row), snapshot.source_item(row)[1]
        [name] = [name for name, key in samples.keys.items() if key in item]
        bucket, place = snapshot.buckets[sample.bucket], sample.pictures[kind]
        into = np.empty(snapshot.shape(kind, sample.bucket), np.uint16)
        reader.read(place.shard, place.offset, place.key, place.checksum, into.reshape(-1, *into.shape[2:]))
        content = samples.controls[name]
        assert content is not None and samples.expected[name] is None, samples.form[name]
        wanted = record(kind, content, (bucket.height, bucket.width), encoding.decoder, vae, side)
        assert from_bits(into).float().numpy() == pytest.approx(wanted, abs=0.02), samples.form[name]
