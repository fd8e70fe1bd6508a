"""Control pictures and masks of a sample: found in the layouts that people use, cropped as the picture, stored as
records, and refused with a reason."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
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
import sana_pipe.stages.forget
import sana_pipe.stages.pack
import sana_pipe.stages.plan
import sana_pipe.stages.report
import sana_pipe.stages.train
import sana_pipe.stages.verify
import sana_pipe.stages.view
from sana_pipe.base.errors import ConfigError, IntegrityError, RejectRateError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache import audit
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.encoders.frozen import from_bits
from sana_pipe.data.encoders.vae import LatentEncoder
from sana_pipe.data.encoding import scan_rows, unit_records
from sana_pipe.data.images import decoding
from sana_pipe.data.loader.loader import Loader
from sana_pipe.data.signals import Encoders
from sana_pipe.data.signals.control import ControlEncoding
from sana_pipe.data.signals.mask import MaskEncoding
from sana_pipe.tools.reporting import sample_view
from sana_pipe.tools.reporting.controls_and_masks import ControlOrMask, controls_and_masks
from sana_pipe.tools.reporting.source_pictures import SourcePictures
from tests.support.constants import constants, unit_sizes
from tests.support.loading import loader_settings
from tests.support.messages import naming
from tests.support.trees import files

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
    """`--data`, and the settings that find the control pictures and masks."""
    data = folder / "data"
    data.mkdir(parents=True)
    control, mask = getattr(samples, layout)(data)
    return str(data), [f"data.pictures.control.{control}", f"data.pictures.mask.{mask}"]


@pytest.fixture(scope="module", autouse=True)
def small_units(small_cache: Path) -> Iterator[None]:
    """Small units. The cache that tests share is made before, with usual ones."""
    with constants(unit_sizes(2, 512)):
        yield


def configured(make_config: MakeConfig, folder: Path, *options: str) -> Config:
    return make_config(folder, *options)


def keys(config: Config, kind: str) -> set[bytes]:
    cache = Cache(config.cache)
    [encoding] = cache.encodings(kind)
    return {bytes(key) for key in cache.index(encoding.name).keys}


def values(config: Config, kind: str) -> dict[str, np.ndarray]:
    """The records of a snapshot by the picture's name, uint16."""
    snapshot, result = Cache(config.cache).open_snapshot(), {}
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
        done = sana_pipe.stages.encode.run(config, data)
        assert done["items"] == done["images"] == done["controls"] == done["masks"] == len(SIDES)
        assert done["rejects"] == done["left"] == 0 and not list(audit.verify(Cache(config.cache)))
        for kind in ("latent", "control", "mask"):
            assert wanted.setdefault(f"{kind}", keys(config, kind)) == keys(config, kind)
        assert sana_pipe.stages.encode.dry_run(config, data, probe=False) == 0
        again = sana_pipe.stages.encode.run(config, data)
        assert again["images"] == again["controls"] == again["masks"] == 0 and again["reused"]["masks"] == len(SIDES)
        sana_pipe.stages.bucket.run(config)
        assert sorted(Cache(config.cache).open_snapshot().pictures) == ["control", "latent", "mask"]


@pytest.fixture(scope="module")
def made(samples: Samples, make_config: MakeConfig, made_once: Callable[..., Path]) -> Path:
    """A folder with `data` (layout `suffix`) and its `cache`. Do not write into it: take `copied`."""

    def make(folder: Path) -> None:
        data, options = laid_out(samples, "suffix", folder)
        config = configured(make_config, folder, *options)
        sana_pipe.stages.encode.run(config, data)
        sana_pipe.stages.bucket.run(config)

    return made_once("controls and masks", make)


SUFFIXES = ("data.pictures.control.suffix=.control", "data.pictures.mask.suffix=-masklabel")


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copied"))


def rejects(config: Config) -> dict[str, str]:
    with Path(config.cache, "reports/rejects-data.csv").open() as sheet:
        return {row["item"]: row["reason"] for row in csv.DictReader(sheet)}


def test_records_are_of_the_pixels_at_the_buckets_of_the_pictures(
    samples: Samples, made: Path, make_config: MakeConfig
) -> None:
    config = configured(make_config, made, *SUFFIXES)
    snapshot, vae = Cache(config.cache).open_snapshot(), LatentEncoder.load(config.vae, torch.device("cpu"))
    sizes = {}
    for row in range(len(snapshot)):
        bucket = snapshot.buckets[snapshot.sample(row).bucket]
        sizes[snapshot.source_item(row)[1]] = bucket.height, bucket.width
    assert len(set(sizes.values())) > 2
    controls, masks, encoding = values(config, "control"), values(config, "mask"), snapshot.encoding(ControlEncoding)
    side = snapshot.encoding(MaskEncoding).compression
    for name, _, control, mask, _ in samples:
        item, size = f"{name}.png", sizes[f"{name}.png"]
        pixels = decoding.load(control, size, decoder=encoding.decoder)
        assert from_bits(controls[item]).float().allclose(from_bits(vae.encode(pixels[None])[0]).float(), atol=0.02)
        gray = decoding.load(mask, size, decoder=encoding.decoder)[..., 0].astype(np.float64) / 255
        cells = gray.reshape(size[0] // side, side, size[1] // side, side).mean((1, 3))
        assert from_bits(masks[item])[0].float().numpy() == pytest.approx(cells, abs=2**-8)


def test_a_loader_reads_what_is_asked_for(made: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = list[str](), ShardReader.read_batch

    def read_batch(self: ShardReader, *args: Any, **options: Any) -> Any:
        read.append(self.encoding)
        return real(self, *args, **options)

    monkeypatch.setattr(ShardReader, "read_batch", read_batch)
    config = configured(make_config, made)
    snapshot = Cache(config.cache).open_snapshot()
    plain = [batch for step, _ in Loader(snapshot, loader_settings(stop_step=4)) for batch in step]
    assert {encoding.split("-")[0] for encoding in read} == {"latent", "text"} and not plain[0].pictures
    asking = Loader(snapshot, loader_settings(stop_step=4, pictures=("control", "mask")))
    batches = [batch for step, _ in asking for batch in step]
    stored = {kind: values(config, kind) for kind in ("control", "mask")}
    items = {snapshot.sample(row).sample_id: snapshot.source_item(row)[1] for row in range(len(snapshot))}
    for batch, other in zip(batches, plain, strict=True):
        assert batch.sample_ids == other.sample_ids and batch.latents.equal(other.latents)
        for kind, of_kind in batch.pictures.items():
            for sample_id, record in zip(batch.sample_ids, of_kind, strict=True):
                assert record.equal(from_bits(stored[kind][items[sample_id]]))


def test_a_sample_without_a_required_picture_is_rejected_with_the_reason(
    copied: Path, make_config: MakeConfig, samples: Samples
) -> None:
    data = copied / "data"
    (data / "00.control.png").unlink()
    (data / "01.control.png").write_bytes(b"no picture")
    (data / "02.control.png").write_bytes(encoded(np.zeros((40, 80, 3), np.uint8)))
    (data / "03-masklabel.jpg").write_bytes(encoded(np.zeros((65, 45), np.uint8), "JPEG"))
    config = configured(make_config, copied, *SUFFIXES, "encode.max_shrink=1")
    with pytest.raises(RejectRateError):
        sana_pipe.stages.encode.run(config, str(data))
    reasons = rejects(config)
    assert reasons["00.png"] == "has no control picture (data.pictures.control.suffix: .control)"
    assert reasons["01.png"].startswith("its control picture 01.control.png: not a picture")
    assert "has 80x40 pixels, another aspect ratio than the picture's 80x80" in reasons["02.png"]
    assert reasons["03.png"] == "has 2 mask pictures: 03-masklabel.jpg, 03-masklabel.png"
    with pytest.raises(RejectRateError):
        sana_pipe.stages.encode.dry_run(config, str(data), probe=False)
    for name, _, control, _, _ in samples:
        (data / f"{name}.control.png").write_bytes(control)
    (data / "03-masklabel.jpg").unlink()
    done = sana_pipe.stages.encode.run(config, str(data))
    assert done["rejects"] == done["controls"] == done["images"] == 0 and done["reused"]["controls"] == len(SIDES)


def test_a_source_without_any_names_the_place_that_was_looked_at(
    samples: Samples, make_config: MakeConfig, tmp_path: Path
) -> None:
    ways = {
        "suffix": ("suffix=.edges", "put X.edges.png next to X.jpg"),
        "sister_folders": ("folder=lines/", "into the data as lines/X.png"),
        "parquet": ("column=meta", "fill the column meta"),
    }
    for layout, (option, place) in ways.items():
        data, _ = laid_out(samples, layout, tmp_path / layout)
        config = configured(make_config, tmp_path / layout, f"data.pictures.control.{option}")
        if layout == "parquet":
            table = pq.read_table(next(Path(data).glob("*.parquet")))
            empty = pa.nulls(len(table), pa.string())
            pq.write_table(table.append_column("meta", empty), next(Path(data).glob("*.parquet")))
        for end in (sana_pipe.stages.encode.run, partial(sana_pipe.stages.encode.dry_run, probe=False)):
            with pytest.raises(RejectRateError) as error:
                end(config, data)
            assert place in str(error.value.fix)
            assert "--set data.pictures.control.required=false" in str(error.value.fix)


def test_an_option_that_finds_no_picture_of_a_source_that_was_read_before_is_named(
    copied: Path, make_config: MakeConfig
) -> None:
    config = configured(make_config, copied, *SUFFIXES, "data.pictures.control.suffix=.edges")
    for end in (sana_pipe.stages.encode.run, partial(sana_pipe.stages.encode.dry_run, probe=False)):
        with pytest.raises(UserError, match="are missing") as error:
            end(config, str(copied / "data"))
        fix = str(error.value.fix)
        assert fix.startswith("data.pictures.control.suffix: .edges finds none: put X.edges.png next to X.jpg")
        assert "put them back" not in fix and "encode.max_shrink=1" in fix


def test_a_sample_may_lack_a_picture_that_is_not_required(
    copied: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    data = copied / "data"
    for name in ("00.control.png", "00-masklabel.png", "01-masklabel.png"):
        (data / name).unlink()
    relaxed = [f"data.pictures.{kind}.required=false" for kind in ("control", "mask")]
    config = configured(make_config, copied, *SUFFIXES, *relaxed)
    assert sana_pipe.stages.encode.dry_run(config, str(data)) == 0
    done = sana_pipe.stages.encode.run(config, str(data))
    printed = capsys.readouterr().out
    for line in ("1 samples have no control picture: a black one", "2 samples have no mask picture: a white one"):
        assert printed.count(line) == 2, "of the dry run, and of the run"
    assert done["rejects"] == done["left"] == done["images"] == 0 and done["controls"] == 1 and done["masks"] == 2
    again = sana_pipe.stages.encode.run(config, str(data))
    assert again["images"] == again["controls"] == again["masks"] == 0
    assert capsys.readouterr().out.count("1 samples have no control picture") == 1, "also with nothing to do"
    sana_pipe.stages.bucket.run(config)
    assert (from_bits(values(config, "mask")["00.png"]) == 1).all()
    figures = controls_and_masks(Cache(config.cache).open_snapshot())
    assert figures is not None and {each.kind: each.blank for each in figures.kinds} == {
        "control": 1,
        "mask": 2,
    }
    photos = SourcePictures(config.data, Cache(config.cache))
    [source] = Cache(config.cache).sources()
    encoding = Cache(config.cache).open_snapshot().encoding(MaskEncoding)
    white, black = (photos.control_or_mask(source, "00.png", each, (64, 64)) for each in (encoding, ControlEncoding()))
    assert white is not None and black is not None
    assert white.getextrema() == ((255, 255),) * 3 and black.getextrema() == ((0, 0),) * 3
    vae, snapshot = LatentEncoder.load(config.vae, torch.device("cpu")), Cache(config.cache).open_snapshot()
    control = values(config, "control")["00.png"]
    black = np.zeros((1, *(side * snapshot.encoding(ControlEncoding).compression for side in control.shape[1:]), 3))
    assert from_bits(control).float().allclose(from_bits(vae.encode(black.astype(np.uint8))[0]).float(), atol=0.02)

    before = files(Path(config.cache))
    for path in Path(config.cache).glob("shards/mask-*/*/*.tar"):
        content = bytearray(path.read_bytes())
        content[1024:1600] = bytes(b ^ 1 for b in content[1024:1600])
        path.write_bytes(content)
    assert list(audit.verify(Cache(config.cache))) and sana_pipe.stages.verify.run(config, repair=True) == 0
    assert files(Path(config.cache)) == before


@pytest.mark.parametrize("kind", ["control", "mask"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_wrong_bit_is_found_and_never_trained_on(
    packed: bool, kind: str, copied: Path, make_config: MakeConfig
) -> None:
    config = configured(make_config, copied, *SUFFIXES)
    if packed:
        sana_pipe.stages.pack.run(config)
    cache = Cache(config.cache)
    snapshot = cache.open_snapshot(next(name for name in cache.snapshot_names() if packed == name.endswith(".packed")))
    truth, before = values(config, kind), files(cache.root)
    for row in range(len(snapshot)):
        place = snapshot.sample(row).pictures[kind]
        path = cache.root / snapshot.shard_path(kind, place.shard)
        content = bytearray(path.read_bytes())
        content[place.offset + row] ^= 1 << row
        path.write_bytes(content)
        asking = {"stop_step": len(snapshot) * 2, "prefetch": 0}
        with pytest.raises(IntegrityError, match=place.key.hex()):
            list(Loader(snapshot, loader_settings(**asking, pictures=(kind,))))
        list(Loader(snapshot, loader_settings(**asking)))  # who does not ask for it does not read it
        [finding] = audit.verify(cache)
        assert finding.records == (place.key.hex(),)
        assert sana_pipe.stages.verify.run(config, repair=True) == 0
        assert files(cache.root) == before
    assert all((record == truth[item]).all() for item, record in values(config, kind).items())


def test_only_what_has_changed_is_made_again(copied: Path, make_config: MakeConfig, samples: Samples) -> None:
    data, config = copied / "data", configured(make_config, copied, *SUFFIXES)
    (data / "00.control.png").write_bytes(samples.pictures[0])
    done = sana_pipe.stages.encode.run(config, str(data))
    assert done["images"] == done["masks"] == 0 and done["controls"] == 1
    before = values(config, "control")
    sana_pipe.stages.bucket.run(config)
    changed = [item for item, record in values(config, "control").items() if (record != before[item]).any()]
    assert changed == ["00.png"]


def test_a_picture_that_is_taken_out_takes_its_controls_and_masks_along(
    copied: Path, make_config: MakeConfig, samples: Samples, capsys: pytest.CaptureFixture[str]
) -> None:
    """But not those that another picture has, too."""
    data, config = copied / "data", configured(make_config, copied, *SUFFIXES)
    (data / "04.png").write_bytes(encoded(np.random.default_rng(9).integers(0, 255, (*SIDES[0], 3), np.uint8)))
    (data / "04.control.png").write_bytes(samples.controls[0])
    (data / "04-masklabel.png").write_bytes(samples.masks[1] if SIDES[0] == SIDES[1] else samples.masks[0])
    (data / "04.txt").write_text("another picture")
    sana_pipe.stages.encode.run(config, str(data))
    sana_pipe.stages.bucket.run(config)
    before = {kind: keys(config, kind) for kind in ("latent", "control", "mask")}
    assert {kind: len(some) for kind, some in before.items()} == {"latent": 5, "control": 4, "mask": 4}
    assert sana_pipe.stages.forget.run(config, items=["00.png"]) == 0
    assert [len(keys(config, kind)) for kind in before] == [4, 4, 4], "picture 04 has its control and mask"
    assert sana_pipe.stages.forget.run(config, items=["01.png"]) == 0
    assert [len(keys(config, kind)) for kind in before] == [3, 3, 3]
    assert not list(audit.verify(Cache(config.cache)))
    capsys.readouterr()
    done = sana_pipe.stages.encode.run(config, str(data))
    assert done["images"] == done["controls"] == done["masks"] == 0
    assert "2 items were met again" in capsys.readouterr().out
    assert sana_pipe.stages.forget.run(config, items=["04.png"]) == 0
    assert [len(keys(config, kind)) for kind in before] == [2, 2, 2]


def test_a_cache_gets_controls_and_masks_without_latents(
    samples: Samples, made: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A source is read as before, so that the settings need not be given again."""
    plain, data = configured(make_config, tmp_path), tmp_path / "data"
    data.mkdir()
    for name, picture, _, _, caption in samples:
        (data / f"{name}.png").write_bytes(picture)
        (data / f"{name}.txt").write_text(caption)
    sana_pipe.stages.encode.run(plain, str(data))
    samples.suffix(data)
    done = sana_pipe.stages.encode.run(configured(make_config, tmp_path, *SUFFIXES), str(data))
    assert done["images"] == done["captions"] == done["rejects"] == 0 and done["controls"] == done["masks"] == len(
        SIDES
    )
    again = sana_pipe.stages.encode.run(plain, str(data))
    assert again["rejects"] == again["controls"] == 0 and again["reused"]["controls"] == len(SIDES)
    assert keys(plain, "mask") == keys(configured(make_config, made), "mask")


def test_killed_work_is_finished_byte_for_byte(
    samples: Samples, made: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    data, options = laid_out(samples, "suffix", tmp_path)
    config, real, calls = configured(make_config, tmp_path, *options), unit_records.UnitWriter.commit, list[int]()

    def killed(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) % 2:
            return real(self, *args)
        raise Killed

    monkeypatch.setattr(unit_records.UnitWriter, "commit", killed)
    for _ in range(40):
        try:
            sana_pipe.stages.encode.run(config, data)
            break
        except Killed:
            pass
    shards = lambda folder: {p.name: p.read_bytes() for p in (folder / "cache").glob("shards/*/*/*.tar")}  # noqa: E731
    assert shards(tmp_path) == shards(made) and len(calls) > 6


def test_two_tasks_share_the_scan_and_the_units(samples: Samples, make_config: MakeConfig, tmp_path: Path) -> None:
    for layout in ("suffix", "imagefolder", "webdataset", "parquet"):
        data, options = laid_out(samples, layout, tmp_path / layout)
        config = configured(make_config, tmp_path / layout, *options)
        done = [sana_pipe.stages.encode.run(config, data, task_index=task, task_count=2) for task in (0, 1)]
        assert sum(one["controls"] for one in done) == sum(one["masks"] for one in done) == len(SIDES)
        assert sana_pipe.stages.encode.run(config, data)["controls"] == 0


def test_pictures_of_no_picture_are_counted(
    copied: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "data/other.control.png").write_bytes((copied / "data/00.control.png").read_bytes())
    sana_pipe.stages.encode.run(configured(make_config, copied, *SUFFIXES), str(copied / "data"))
    assert "1  control picture of no picture" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["suffix", "webdataset", "parquet"])
def test_a_picture_that_could_not_be_read_once_is_read_by_the_next_scan(
    samples: Samples, layout: str, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, options = laid_out(samples, layout, tmp_path)
    config = configured(make_config, tmp_path, *options, "encode.max_reject_rate=0.9")
    read = scan_rows.from_bytes

    def failing(source: Any, place: Any, *limits: Any) -> dict[str, Any]:
        if "mask" in place.item and ("02" in place.item or str(place.where).startswith("0:2+")):
            return {"reject": "unreadable: connection reset"}
        return read(source, place, *limits)

    with monkeypatch.context() as patch:
        patch.setattr(scan_rows, "from_bytes", failing)
        assert sana_pipe.stages.encode.run(config, data)["rejects"] == 1
    assert "unreadable: its mask picture" in next(iter(rejects(config).values()))
    done = sana_pipe.stages.encode.run(config, data)
    assert done["rejects"] == 0 and done["masks"] == 1


@pytest.mark.parametrize("name", ["../data/mask/00.png", "/etc/passwd", "mask/none.png", ""])
def test_a_column_that_names_no_file_of_the_source(
    samples: Samples, name: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    data, options = laid_out(samples, "imagefolder", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "data/metadata.jsonl").read_text().splitlines()]
    rows[0]["mask"] = name
    (tmp_path / "data/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = configured(make_config, tmp_path, *options, "encode.max_reject_rate=0.9")
    done = sana_pipe.stages.encode.run(config, data)
    assert done["masks"] == done["images"] == len(SIDES) - 1 and done["rejects"] >= 1
    assert (f"names {name!r}" in str(rejects(config))) == (name[:1] in "./" and name != "")


def test_masks_of_the_transparency(samples: Samples, make_config: MakeConfig, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    alpha = np.zeros((64, 64), np.uint8)
    alpha[:, 32:] = 255
    rgba = np.dstack([np.full((64, 64, 3), 90, np.uint8), alpha])
    for name, pixels in (("half", rgba), ("opaque", rgba[..., :3])):
        (data / f"{name}.png").write_bytes(encoded(pixels))
        (data / f"{name}.txt").write_text(name)
    config = configured(make_config, tmp_path, "data.pictures.mask.made=alpha")
    assert sana_pipe.stages.encode.run(config, str(data))["masks"] == 2
    sana_pipe.stages.bucket.run(config)
    masks = {item: from_bits(record)[0].float() for item, record in values(config, "mask").items()}
    width = masks["half.png"].shape[1]
    assert (masks["opaque.png"] == 1).all()
    assert (masks["half.png"][:, : width // 2 - 1] == 0).all() and (masks["half.png"][:, width // 2 + 1 :] == 1).all()


def test_controls_of_the_edges(samples: Samples, make_config: MakeConfig, tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    data, _ = laid_out(samples, "suffix", tmp_path)
    for path in Path(data).glob("*[-.]*l*.png"):
        path.unlink()
    config = configured(make_config, tmp_path, "data.pictures.control.made=canny")
    assert sana_pipe.stages.encode.run(config, data)["controls"] == len(SIDES)
    sana_pipe.stages.bucket.run(config)
    snapshot, vae = Cache(config.cache).open_snapshot(), LatentEncoder.load(config.vae, torch.device("cpu"))
    encoding, stored = snapshot.encoding(ControlEncoding), values(config, "control")
    for name, picture, *_ in samples:
        record = stored[f"{name}.png"]
        pixels = decoding.load(
            picture, tuple(s * encoding.compression for s in record.shape[1:]), decoder=encoding.decoder
        )
        edges = np.repeat(cv2.Canny(pixels, 100, 200)[..., None], 3, axis=2)
        assert from_bits(record).float().allclose(from_bits(vae.encode(edges[None])[0]).float(), atol=0.02)


def test_edges_need_opencv(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    config = configured(make_config, tmp_path, "data.pictures.control.made=canny")
    with pytest.raises(UserError, match="needs OpenCV") as error:
        ControlEncoding.wanted(Encoders(config.vae, config.text), config.data, config.encode)
    assert "sana-pipe[control]" in str(error.value.fix)


def test_settings_that_do_not_go_together(samples: Samples, make_config: MakeConfig, tmp_path: Path) -> None:
    for options, message in {
        ("control.suffix=.a", "control.column=b"): "one of suffix, folder, column and made",
        ("control.folder=/data/edges",): "folder is relative to the data",
        ("mask.folder=s3://data/masks",): "folder is relative to the data",
        ("control.folder=../edges",): "folder is relative to the data",
        ("control.folder=./edges",): "folder is relative to the data",
        ("mask.made=alpha", "mask.required=false"): "required: false goes with",
    }.items():
        with pytest.raises(ConfigError, match=message):
            configured(make_config, tmp_path, *(f"data.pictures.{option}" for option in options))
    data, _ = laid_out(samples, "webdataset", tmp_path)
    with pytest.raises(ConfigError, match=naming("data.pictures.control.suffix")):
        sana_pipe.stages.encode.run(configured(make_config, tmp_path, "data.pictures.control.required=false"), data)
    with pytest.raises(UserError, match=r"data\.pictures\.control\.column: edges: pictures of a source"):
        sana_pipe.stages.encode.run(configured(make_config, tmp_path, "data.pictures.control.column=edges"), data)
    data, _ = laid_out(samples, "parquet", tmp_path / "table")
    with pytest.raises(UserError, match="has no column 'edges'"):
        sana_pipe.stages.encode.run(configured(make_config, tmp_path, "data.pictures.control.column=edges"), data)


def test_controls_and_masks_that_a_training_does_not_use_are_noted(
    made: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, unused in (([], {"mask", "control"}), (["train.mask={}"], {"control"})):
        config, lines = configured(make_config, made, *options), list[str]()
        cache = Cache(config.cache)
        sana_pipe.stages.train.open_inputs(config, cache, cache.open_snapshot(), None, lines.append)
        assert {kind for kind in ("mask", "control") if any(f"has {kind} records" in line for line in lines)} == unused
        capsys.readouterr()
        sana_pipe.stages.plan.run(config, sana_pipe.stages.plan.Options(gpu="4090", snapshot="latest"))
        noted = capsys.readouterr().err
        assert {kind for kind in ("mask", "control") if f"has {kind} records" in noted} == unused


def test_view_shows_controls_and_masks(
    made: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(make_config, made)
    sana_pipe.stages.view.run(config, "00.png", out=tmp_path / "page.html")
    printed, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    assert "control, its three main components" in page and "mask, from 0 to 1" in page
    for kind in ("control", "mask"):
        assert re.search(rf'<img src="data:[^>]* alt="{kind} at \d+x\d+"', page), kind
    mask = from_bits(values(config, "mask")["00.png"]).float().numpy()
    assert re.search(rf"^mask: +1 x \d+ x \d+, mean {mask.mean(dtype=np.float64):.4g}, ", printed, re.M)
    assert re.search(r"^control: +\d+ x \d+ x \d+, mean ", printed, re.M)
    shown = np.asarray(sample_view.projected(mask))
    scale = shown.shape[0] // mask.shape[1]
    assert (shown[::scale, ::scale, 0] == np.round(mask[0] * 255)).all()


def alts(page: Path) -> list[str]:
    """Of the pictures of a page."""
    return re.findall(r'<img src="data:[^>]* alt="([^"]*)"', page.read_text())


@pytest.mark.parametrize("layout", ["suffix", "webdataset"])
def test_the_report_counts_and_shows_controls_and_masks(
    samples: Samples, make_config: MakeConfig, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, found = laid_out(samples, layout, tmp_path)
    config = configured(make_config, tmp_path, *found)
    sana_pipe.stages.encode.run(config, data)
    sana_pipe.stages.bucket.run(config)
    assert f"{len(SIDES)} samples with control, mask, " in capsys.readouterr().out
    snapshot = Cache(config.cache).open_snapshot()
    figures = controls_and_masks(snapshot)
    assert figures is not None
    assert figures.kinds == [ControlOrMask(kind, len(SIDES), 0, "") for kind in ("control", "mask")]
    means = [float(from_bits(mask).float().mean()) for mask in values(config, "mask").values()]
    assert figures.learned is not None and figures.learned.read == len(SIDES)
    assert figures.learned.mean == pytest.approx(np.mean(means), abs=1e-6)
    sana_pipe.stages.report.run(config, tmp_path / "page.html")
    shown = alts(tmp_path / "page.html")
    assert [shown.count(name) for name in ("picture", "control", "mask")] == [len(SIDES)] * 3
    sana_pipe.stages.report.run(config, tmp_path / "page.html", pictures=False)
    assert not alts(tmp_path / "page.html") and "Control pictures and masks" in (tmp_path / "page.html").read_text()
    row, photos = snapshot.source_item(0), SourcePictures(config.data, Cache(config.cache))
    encoding, bucket = snapshot.encoding(ControlEncoding), snapshot.buckets[0]
    control = photos.control_or_mask(*row, encoding, (bucket.height, bucket.width))
    expected = samples.controls[samples.names.index(Path(row[1]).stem)]
    assert (np.asarray(control) == encoding.pixels(expected, (bucket.height, bucket.width), 10**9)).all()

    for path in Path(config.cache).glob("shards/mask-*/*/*.tar"):
        path.unlink()
    damaged = controls_and_masks(Cache(config.cache).open_snapshot())
    assert damaged is not None and damaged.learned is None and damaged.kinds == figures.kinds


def test_members_that_belong_to_no_picture_are_counted(
    samples: Samples, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, options = laid_out(samples, "webdataset", tmp_path)
    with tarfile.open(Path(data, "00.tar"), "a") as tar:
        info = tarfile.TarInfo("other.control.png")
        info.size = len(samples.controls[0])
        tar.addfile(info, io.BytesIO(samples.controls[0]))
    done = sana_pipe.stages.encode.run(configured(make_config, tmp_path, *options), data)
    assert done["rejects"] == 0 and done["controls"] == len(SIDES)
    assert "1  control picture of no picture" in capsys.readouterr().out
