"""`encode --dry-run`: what it says comes true, and it writes nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import sana_pipe.stages.encode
from sana_pipe.base.errors import CacheError, NoSpaceError, RejectRateError, UserError
from sana_pipe.config import Config, dump
from sana_pipe.data.cache import layout, scan_table
from sana_pipe.data.cache.cache import Cache, WorkList
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.index import RecordReject
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.text import TextEncoder, count_rows
from sana_pipe.data.encoding import estimate, scan_rows, unit_records
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.encoding.encoder_settings import EncoderSettings
from sana_pipe.data.encoding.plan import images_of_batch
from sana_pipe.data.encoding.survey import survey
from sana_pipe.data.images import buckets
from sana_pipe.data.signals import Encoders, PictureSignal, encodings
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.phash import RULE, HashEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.sources.folder import FolderSource
from sana_pipe.data.work import disk_space
from sana_pipe.data.work.engine import missing_units
from tests.support.lowered import lower_limits
from tests.support.messages import naming

MakeConfig = Callable[..., Config]


@pytest.fixture
def source(photos: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(photos, tmp_path / "photos"))


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def dry(config: Config, source: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    """The report. Everything on stdout is that one object."""
    capsys.readouterr()
    code = sana_pipe.stages.encode.dry_run(config, data=str(source), as_json=True, **options)
    summary = json.loads(capsys.readouterr().out)
    assert code == (6 if summary["enough_space"] is False else 0)
    return summary


def picture(path: Path, seed: int, size: tuple[int, int] = (90, 70)) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path)
    path.with_suffix(".txt").write_text(f"random picture number {seed}")


def test_an_unknown_free_space_is_not_called_enough(
    source: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "free_bytes", lambda self: None)
        summary = dry(make_config(tmp_path), source, capsys, probe=False)
    assert summary["free_bytes"] is None and summary["enough_space"] is None


@pytest.mark.parametrize("storage", ["bf16", "int8", "bf16-zstd"])
def test_bytes_and_counts_come_true(
    storage: str, source: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, f"encode.storage={storage}")
    summary = dry(config, source, capsys, probe=False)
    assert not Path(config.cache).exists(), "nothing is written"
    assert summary["time"] is None
    done = sana_pipe.stages.encode.run(config, data=str(source))
    assert summary["new"] == {noun: done[noun] for noun in ("images", "captions")}
    cache = Cache(config.cache)
    made = {kind: sum(cache.index(cache.encodings(kind)[0].name).bytes) for kind in ("latent", "text")}
    shares = 0.15 if storage == "bf16-zstd" else 0.02  # zstd's size is a typical one
    for kind, key in (("latent", "images"), ("text", "captions")):
        assert summary["bytes"][key] == pytest.approx(made[kind], rel=shares)
    assert summary["bytes"]["total"] == sum(summary["bytes"][kind] for kind in ("images", "captions", "index"))
    assert summary["tokens"]["total"] == done["speed"]["captions"]["tokens"]
    others = sum(p.stat().st_size for p in Path(config.cache).rglob("*") if p.is_file() and p.suffix != ".tar")
    assert others / 3 < summary["bytes"]["index"] < others * 3


def test_text_bytes_are_exact(tiny_repo: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    """The tokenizer alone knows how many rows the encoder gives."""
    config = make_config(tmp_path).text
    some = ["a red circle", "", "日本の猫", "two small dogs run through green grass " * 80]
    for each in (config, config.model_copy(update={"instruction": ""})):
        encoder = TextEncoder.load(each, "cpu")
        assert count_rows(each, some) == [len(rows) for rows in encoder.encode(some)]


def test_buckets_and_their_crop_loss(
    source: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in list(source.iterdir()):
        path.unlink()
    picture(source / "exact.png", 1, (64, 64))
    picture(source / "half.png", 2, (64, 66))
    picture(source / "wide.png", 3, (160, 48))
    summary = dry(make_config(tmp_path), source, capsys, probe=False)
    result = {(one["height"], one["width"]): one for one in summary["buckets"]}
    assert {shape: one["samples"] for shape, one in result.items()} == {(64, 64): 2, (48, 80): 1}
    assert result[64, 64]["crop_loss"] == pytest.approx((0 + 2 / 66) / 2)
    assert result[48, 80]["crop_loss"] == pytest.approx(0.5)


def test_what_the_cache_holds_is_not_counted_again(
    small_cache_copy: Path,
    source: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tmp_path)
    (source / "coffee.txt").write_text("an empty cup")
    picture(source / "new.png", 7)
    changed = next(p for p in source.iterdir() if p.stem == "astronaut" and p.suffix != ".txt")
    with Image.open(changed) as image:
        image.convert("RGB").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(changed)
    before = state(small_cache_copy)
    summary = dry(config, source, capsys, probe=False)
    assert state(small_cache_copy) == before, "nothing is written"
    assert summary["reused"] == {"images": 11, "captions": 12}
    assert summary["new"] == {"images": 2, "captions": 2}
    done = sana_pipe.stages.encode.run(config, data=str(source))
    assert (done["images"], done["captions"]) == (2, 2)
    summary = dry(config, source, capsys, probe=True)
    assert summary["new"] == {"images": 0, "captions": 0}
    assert summary["bytes"]["total"] == 0
    assert summary["time"]["device_hours"] == 0


def test_pictures_under_other_names_are_found(
    small_cache_copy: Path,
    source: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tmp_path)
    for file in list(source.iterdir()):
        file.rename(source / f"new-{file.name}")
    summary = dry(config, source, capsys, probe=False)
    assert (summary["items"], summary["new"]["images"], summary["unread"]) == (12, 0, 0)
    assert sana_pipe.stages.encode.run(config, data=str(source))["images"] == 0
    for number, file in enumerate(sorted(source.glob("*.[jp]*g"))):
        picture(file.rename(source / f"{number}{file.suffix}"), number)
    for encode in (partial(sana_pipe.stages.encode.dry_run, probe=False), sana_pipe.stages.encode.run):
        with pytest.raises(UserError, match="are missing"):
            encode(config, data=str(source))


def test_rejects_come_from_headers_and_pictures_are_not_read_whole(
    source: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (source / "retina.jpg").unlink()  # it has 2 million pixels
    (source / "noise.jpg").write_bytes(b"this is no picture")
    (source / "noise.txt").write_text("noise")
    picture(source / "small.png", 1, (20, 20))
    picture(source / "mute.png", 2)
    (source / "mute.txt").unlink()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (900, 1400, 3), np.uint8)).save(source / "large.png")
    (source / "large.txt").write_text("large")
    (source / "deep.jpg").write_bytes(b"\xff\xd8" + (b"\xff\xe2\xff\xff" + bytes(65533)) * 20 + b"\xff\xc0")
    (source / "deep.txt").write_text("a header behind the first MiB")
    read: list[int] = []
    real = FolderSource.head
    monkeypatch.setattr(FolderSource, "head", lambda self, key, n: (read.append(n), real(self, key, n))[1])
    whole, read_whole = list[str](), FolderSource.read
    monkeypatch.setattr(
        FolderSource, "read", lambda self, place: (whole.append(place.item), read_whole(self, place))[1]
    )
    config = make_config(tmp_path, "data.min_side=30", "data.max_pixels=1000000")
    summary = dry(config, source, capsys, probe=False)
    assert summary["items"] == 16
    assert sorted(summary["reasons"].values()) == [1, 1, 1, 2]
    for part in ("data.min_side = 30", "max_pixels", "no caption", "not a picture"):
        assert any(part in reason for reason in summary["reasons"]), part
    assert summary["usable"] == summary["new"]["images"] == summary["unread"] == 11
    assert max(read) <= 1 << 20 and whole == ["deep.jpg"], "its header is not in the first MiB"


def test_a_header_at_a_glance_and_the_whole_file_agree(source: Path) -> None:
    for number, (suffix, options) in enumerate(
        [("png", {}), ("jpg", {"quality": 95}), ("webp", {"lossless": True}), ("gif", {}), ("tif", {}), ("bmp", {})]
    ):
        pixels = np.random.default_rng(number).integers(0, 255, (320, 240, 3), np.uint8)
        Image.fromarray(pixels).save(source / f"noise-{number}.{suffix}", **options)
        (source / f"noise-{number}.txt").write_text("noise")
    folder = FolderSource(source, "text")
    for item in folder.items():
        whole = scan_rows.from_bytes(folder, item.place, 10**9)
        header = scan_rows.from_header(folder, item.place, 10**9)
        assert header.pop("digest").startswith(scan_rows.UNREAD)
        assert header == {k: whole[k] for k in ("width", "height")}, item.key


def test_the_probe_measures_and_keeps_nothing(
    source: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path)
    one = dry(config, source, capsys, task_index=0, task_count=4)["time"]
    assert one["probed_images"] >= 3
    assert one["probed_captions"] == 4
    assert 0 < one["device_hours"] < 1
    assert 0 < one["hours_per_task"] - one["load_s"] / 3600 == pytest.approx(one["device_hours"] / 4)
    assert not Path(config.cache).exists()


def test_the_probe_keeps_to_its_time(
    source: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without time left, one picture and one caption are what is measured."""
    sizes: list[int] = []
    for kind in (encoders.LatentEncoder, TextEncoder):
        real = kind.encode
        monkeypatch.setattr(
            kind, "encode", lambda self, batch, real=real: (sizes.append(len(batch)), real(self, batch))[1]
        )
    config = make_config(tmp_path)
    _, opened, reading = sana_pipe.stages.encode.opened(config, str(source), None, None)
    models = Encoders(config.vae, config.text)
    result = survey(opened, reading, None, encodings(models, config.data, config.encode))
    settings = EncoderSettings(models, config.encode, config.data.max_pixels)
    speed = estimate.probe(result.work, opened, result.encodings, settings, "cpu", budget_s=0)
    assert set(sizes) == {1}
    assert speed.pixel_s[result.encodings[0]] and speed.token_s and speed.decode_s


@pytest.mark.parametrize(("cost", "measured", "batches"), [(10.0, (10.0, 1), [1, 1]), (0.1, (0.1, 4), [1, 1, 4, 4])])
def test_a_batch_that_would_take_too_long_is_measured_by_one_picture(
    cost: float,
    measured: tuple[float, int],
    batches: list[int],
    source: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(estimate.time, "monotonic", lambda: clock[0])
    sizes = []

    class Encoder:
        def encode(self, pictures: np.ndarray) -> None:
            sizes.append(len(pictures))
            clock[0] += cost * len(pictures)

    config = make_config(tmp_path)
    latent = encodings(Encoders(config.vae, config.text), config.data, config.encode)[0]
    folder = FolderSource(source, "text")
    items = [item.place for item in folder.items()]
    encoder: Any = Encoder()
    assert isinstance(latent, PictureSignal)
    probe = estimate.ImageProbe(encoder, latent, folder, (64, 64), images_of_batch(config.encode, (64, 64), None))
    result = probe.measure(items, config.data.max_pixels, 60.0)
    assert result == (pytest.approx(measured[0]), measured[1])
    assert sizes == batches
    assert len(probe.decoded) == 4


def test_a_disk_that_is_too_small_is_reported_and_ends_with_6(
    source: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tmp_path)
    need = dry(config, source, capsys, probe=False)["bytes"]["total"]
    monkeypatch.setattr(disk_space, "RESERVE", 0)
    monkeypatch.setattr(Files, "free_bytes", lambda files: need)
    assert sana_pipe.stages.encode.dry_run(config, data=str(source), probe=False) == 0
    monkeypatch.setattr(Files, "free_bytes", lambda files: need - 1)
    capsys.readouterr()
    assert sana_pipe.stages.encode.dry_run(config, data=str(source), probe=False) == NoSpaceError.exit_code == 6
    assert "NOT ENOUGH" in capsys.readouterr().out
    monkeypatch.setattr(disk_space, "RESERVE", 2**30)
    monkeypatch.setattr(Files, "free_bytes", lambda files: need + 2**30 - 1)  # the reserve counts
    assert sana_pipe.stages.encode.dry_run(config, data=str(source), probe=False) == 6


def test_a_folder_that_can_be_no_cache_is_refused(source: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "letters.txt").write_text("dear")
    with pytest.raises(CacheError, match=naming(tmp_path / "cache", "--set cache=DIR")):
        sana_pipe.stages.encode.dry_run(make_config(tmp_path), data=str(source), probe=False)


def test_of_many_captions_a_sample_is_tokenized(
    source: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = dry(make_config(tmp_path), source, capsys, probe=False)
    monkeypatch.setattr(estimate, "SAMPLE", 4)
    summary = dry(make_config(tmp_path), source, capsys, probe=False)
    assert summary["tokens"]["captions_tokenized"] == 4
    assert summary["tokens"]["total"] == pytest.approx(whole["tokens"]["total"], rel=0.5)
    assert sana_pipe.stages.encode.dry_run(make_config(tmp_path), data=str(source), probe=False) == 0
    assert "a sample of 4 of 12" in capsys.readouterr().out


def test_what_is_not_used_is_named_and_captions_are_no_pictures(
    source: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for sidecar in source.glob("*.txt"):
        sidecar.write_text("")
    (source / "notes.md").write_text("")
    config = make_config(tmp_path, "data.caption=none", "encode.max_reject_rate=0")
    summary = dry(config, source, capsys, probe=False)
    assert (summary["items"], summary["usable"], summary["rejects"]) == (12, 12, 0)
    assert sorted(summary["ignored"]["counts"].values()) == [1, 12]
    assert summary["ignored"]["examples"][".md file"] == ["notes.md"]
    assert sana_pipe.stages.encode.dry_run(config, data=str(source), probe=False) == 0
    assert "notes.md" in capsys.readouterr().out
    assert sana_pipe.stages.encode.run(config, data=str(source))["rejects"] == 0
    assert "notes.md" in capsys.readouterr().out
    table = tmp_path / "t.parquet"
    pictures = [path.read_bytes() for path in sorted(source.iterdir()) if path.suffix in (".jpg", ".png")]
    pq.write_table(pa.table({"mask": pictures, "image": pictures, "text": ["said"] * len(pictures)}), table)
    assert dry(config, table, capsys, probe=False)["picture_columns"] == ["image"]
    assert sana_pipe.stages.encode.dry_run(config, data=str(table), probe=False) == 0
    assert "the column 'image'" in capsys.readouterr().out
    (source / "lost.jpg_large").write_bytes(pictures[0])
    with pytest.raises(RejectRateError):
        sana_pipe.stages.encode.run(config, data=str(source))


def test_encode_gives_one_json_object_on_stdout(
    source: Path, make_config: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from sana_pipe.cli import main

    (tmp_path / "config.yaml").write_text(dump(make_config(tmp_path)))
    (source / "noise.jpg").write_bytes(b"this is no picture")
    (source / "noise.txt").write_text("noise")
    with pytest.raises(SystemExit) as ended:
        main(["encode", "--config", str(tmp_path / "config.yaml"), "--data", str(source), "--json"])
    assert ended.value.code == 0
    out, err = capfd.readouterr()
    [line] = out.splitlines()
    summary = json.loads(line)
    assert (summary["images"], summary["captions"], summary["rejects"], summary["left"]) == (12, 13, 1, 0)
    speed = summary["speed"]
    assert speed["captions"]["tokens"] > 0 == speed["images"]["tokens"]
    assert all(0 < one["encoder_busy"] <= 1 and one["per_s"] > 0 for one in speed.values())
    assert "1 rejected" in err


@pytest.mark.parametrize(("decode_s", "bound"), [(1.0, False), (3.0, True)])
def test_hours_are_the_slower_of_encoder_and_decoding_then_the_text(decode_s: float, bound: bool) -> None:
    shape = (64, 64)
    latent, hashed = LatentEncoding(), HashEncoding(rule=RULE)
    pictures = {latent: estimate.Pictures(Counter({shape: 4})), hashed: estimate.Pictures(Counter({shape: 2}))}
    work, sizes = estimate.Wanted(pictures=pictures, captions=1), estimate.Sizes({}, 0, tokens=20, sampled=1)
    pixels = shape[0] * shape[1]
    speed = estimate.Speed({latent: 1.0 / pixels, hashed: 0.5 / pixels}, decode_s, 0.5, 10.0, 1, 1, "cpu")
    result = estimate.times(work, sizes, speed, workers=2, tasks=2)
    seconds = max(4 * 1.0 + 2 * 0.5, 4 * decode_s / 2) + 20 * 0.5
    assert result["device_hours"] == pytest.approx(seconds / 3600)
    assert result["hours_per_task"] == pytest.approx((seconds / 2 + 10) / 3600)
    assert result["decode_bound"] is bound
    unknown = dataclasses.replace(speed, pixel_s={latent: 1.0 / pixels})
    result = estimate.times(work, sizes, unknown, workers=2, tasks=2)
    assert (result["device_hours"], result["decode_bound"]) == (None, False)


def _encoded(cache: Cache, encoding: Encoding, plans: list[WorkList], shape: tuple[int, ...]) -> None:
    """Of every three records one is made, one cannot be made, and one failed for a temporary cause."""
    for plan, unit in missing_units(cache, plans):
        rows = cache.unit_rows(plan, unit).to_pylist()
        keys = [row["key"] for row in rows if row.get("caption", "") is not None]
        made = [unit_records.EncodedRecord(key, np.zeros(shape, np.uint16)) for key in keys[::3]]
        failed = [RecordReject(key.hex(), "?", "is empty") for key in keys[1::3]]
        failed += [RecordReject(key.hex(), "?", "was away", retry=True) for key in keys[2::3]]
        unit_records.write_unit(cache, encoding, plan, unit, [(made, failed)], lambda good, bad: None)


def test_the_work_is_what_a_loop_over_all_items_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latent = LatentEncoding(weights="w", compression=8, channels=2)
    text = TextEncoding(weights="w", width=3, max_length=9)
    table = [(16, 16), (16, 24), (24, 16)]
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(120):
        height, width = table[rng.integers(3)]
        row = dict.fromkeys(scan_table.SCAN.names) | {"item": f"{number:03d}.jpg", "height": height + 3, "width": width}
        row["digest"] = layout.digest(str(rng.integers(60)))
        row["captions"] = [{"text": f"said {n}", "weight": 1.0} for n in rng.integers(0, 90, rng.integers(1, 4))]
        if number % 10 == 3:
            row["reject"] = f"{number:03d}.jpg is not a picture"
        elif number % 10 == 5:
            row["digest"] = scan_rows.UNREAD + layout.digest(row["item"])[:8]
        rows.append(row)
    scan = pa.Table.from_pylist(rows, scan_table.SCAN)
    cache = Cache(tmp_path / "cache", create=True)
    half = pa.Table.from_pylist(
        [row for row in rows[:60] if not row["digest"].startswith(scan_rows.UNREAD)], scan_table.SCAN
    )
    for encoding, work, plan, shape in (
        (latent, planning.image_work(half, "s", latent, table), planning.plan_images, (2, 2, 2)),
        (text, planning.caption_work(half, text), planning.plan_captions, (1, 3)),
    ):
        cache.add_encoding(encoding)
        _encoded(cache, encoding, plan(cache, encoding, work, EncodeConfig()), shape)  # type: ignore[operator]

    expected = {"usable": 0, "unread": 0, "cached": 0, "cached_captions": 0}
    pictures, captions, failed, seen = Counter[tuple[int, int]](), list[str](), 0, set[bytes]()

    def state(encoding: Encoding, key: bytes, cached: str) -> bool:
        """Whether a record is new; others are counted."""
        nonlocal failed
        once = key not in seen
        seen.add(key)
        index = cache.index(encoding.name)
        final = {reject.key for reject in index.rejects if not reject.retry}
        expected[cached] += once and index.has(key)
        failed += once and key.hex() in final
        return once and not index.has(key) and key.hex() not in final

    for row in rows:
        if row["reject"] is not None:
            failed += 1
            continue
        expected["usable"] += 1
        expected["unread"] += row["digest"].startswith(scan_rows.UNREAD)
        for caption in row["captions"]:
            if state(text, text.key(caption["text"]), "cached_captions"):
                captions.append(caption["text"])
        target = buckets.nearest(table, row["height"], row["width"])
        pictures[target] += state(latent, latent.key(row["digest"], *target), "cached")

    for sample in (estimate.SAMPLE, 7):
        if sample == 7:
            lower_limits(monkeypatch)
            monkeypatch.setattr(estimate, "SAMPLE", sample)
            monkeypatch.setattr(estimate, "FIRST", 3)
        work = estimate.wanted(scan, cache, [latent, text], table)
        seen = work.pictures[latent]
        counted = {name: getattr(seen if name == "cached" else work, name) for name in expected}
        assert counted == expected and work.items == len(rows) and work.null
        assert seen.sizes == pictures
        assert {shape: len(set(first)) for shape, first in seen.first.items()} == {
            shape: min(count, estimate.FIRST) for shape, count in pictures.items()
        }
        assert sum(work.rejects.counts.values()) == failed
        assert (work.captions, work.caption_bytes) == (len(captions), sum(map(len, captions)))
        picked = [caption for caption, _ in work.sample]
        assert set(picked) <= set(captions) and all(size == len(caption) for caption, size in work.sample)
        assert len(set(picked)) == len(picked) == min(sample, len(picked)) >= min(sample - 2, len(captions))
    assert min(expected.values()) > 5 and min(pictures.values()) > 5 and failed > 20
