"""Preference pairs: a sample's rejected picture is found, cropped to the chosen one's bucket, stored, weighted, and no
picture of a held-out pair is trained on."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
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
import sana_pipe.stages.pack
import sana_pipe.stages.verify
from sana_pipe.base.errors import ConfigError, RejectRateError
from sana_pipe.config import Config
from sana_pipe.data.cache import audit
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import content_digest
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.encoders.frozen import from_bits
from sana_pipe.data.encoders.vae import LatentEncoder
from sana_pipe.data.images import decoding
from sana_pipe.data.loader.inputs import check_pictures
from sana_pipe.data.loader.loader import Loader
from sana_pipe.data.signals.rejected import RejectedEncoding
from sana_pipe.data.snapshots.heldout import check_disjoint
from sana_pipe.data.snapshots.pairs import linked
from tests.support.constants import constants, unit_sizes
from tests.support.loading import loader_settings

MakeConfig = Callable[..., Config]
CHOSEN = [(96, 64), (64, 96), (80, 80)]
REJECTED = [(64, 96), (64, 96), (130, 90)]
"""(height, width) of the pictures of each pair."""


def picture(height: int, width: int, seed: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


CHOSEN_FILES = [picture(*side, number) for number, side in enumerate(CHOSEN)]
REJECTED_FILES = [picture(*side, 100 + number) for number, side in enumerate(REJECTED)]


@pytest.fixture(scope="module", autouse=True)
def small_units(small_cache: Path) -> Iterator[None]:
    with constants(unit_sizes(2, 512)):
        yield


def row_name(one: bytes) -> str:
    return f"pairs.parquet/{content_digest(one)}"


def by_suffix(data: Path) -> str:
    for number, (one, other) in enumerate(zip(CHOSEN_FILES, REJECTED_FILES, strict=True)):
        (data / f"{number}_w.png").write_bytes(one)
        (data / f"{number}_l.png").write_bytes(other)
        (data / f"{number}_w.txt").write_text(f"picture {number}")
    return "suffix=_w/_l"


def by_folder(data: Path) -> str:
    for folder, files in ("good", CHOSEN_FILES), ("bad", REJECTED_FILES):
        (data / folder).mkdir()
        for number, content in enumerate(files):
            (data / f"{folder}/{number}.png").write_bytes(content)
            (data / f"good/{number}.txt").write_text(f"picture {number}")
    return "folder=bad"


def by_listing(data: Path) -> str:
    by_folder(data)
    with (data / "pairs.csv").open("w") as sheet:
        writer = csv.writer(sheet)
        writer.writerow(["image", "worse", "text"])
        writer.writerows([f"good/{n}.png", f"bad/{n}.png", f"picture {n}"] for n in range(len(CHOSEN)))
    return "column=worse"


def by_table(data: Path, **columns: list[Any]) -> str:
    table = {"image": CHOSEN_FILES, "worse": REJECTED_FILES, "text": [f"picture {n}" for n in range(len(CHOSEN))]}
    pq.write_table(pa.table({**table, **columns}), data / "pairs.parquet")
    return "column=worse"


def configured(make_config: MakeConfig, folder: Path, way: str, *options: str) -> tuple[Config, str]:
    return make_config(folder, f"data.pictures.rejected.{way}", *options), str(folder / "data")


def new(folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    return folder / "data"


def snapshot(config: Config) -> Any:
    return Cache(config.cache).open_snapshot()


def keys(config: Config) -> dict[str, set[bytes]]:
    cache = Cache(config.cache)
    return {kind: {bytes(key) for key in cache.index(cache.encodings(kind)[0].name).keys} for kind in KINDS}


KINDS = ("latent", "rejected")


@pytest.mark.parametrize("layout", [by_folder, by_listing, by_table])
def test_every_layout_gives_the_same_pairs(
    layout: Callable[[Path], str], make_config: MakeConfig, tmp_path: Path
) -> None:
    found = []
    for one in (by_suffix, layout):
        config, data = configured(make_config, tmp_path / one.__name__, one(new(tmp_path / one.__name__)))
        done = sana_pipe.stages.encode.run(config, data)
        assert done["items"] == done["images"] == done["rejected pictures"] == len(CHOSEN) and not done["rejects"]
        assert not list(audit.verify(Cache(config.cache)))
        assert sana_pipe.stages.encode.dry_run(config, data, probe=False) == 0
        again = sana_pipe.stages.encode.run(config, data)
        assert again["rejected pictures"] == 0 and again["reused"]["rejected pictures"] == len(CHOSEN)
        found.append(keys(config))
    assert found[0] == found[1]


def test_a_rejected_picture_has_the_bucket_and_the_crop_of_the_chosen_one(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config, data = configured(make_config, tmp_path, by_suffix(new(tmp_path)))
    sana_pipe.stages.encode.run(config, data)
    sana_pipe.stages.bucket.run(config)
    made, vae = snapshot(config), LatentEncoder.load(config.vae, torch.device("cpu"))
    encoding = made.encoding(RejectedEncoding)
    assert made.head.encodings.keys() >= {"latent", "rejected"} and len(made) == len(CHOSEN)
    sizes = set()
    for row in range(len(made)):
        sample, number = made.sample(row), int(made.source_item(row)[1][0])
        size = made.buckets[sample.bucket].height, made.buckets[sample.bucket].width
        pixels = decoding.load(REJECTED_FILES[number], size, decoder=encoding.decoder)
        values = from_bits(made.picture(sample, "rejected")).float()
        assert values.allclose(from_bits(vae.encode(pixels[None])[0]).float(), atol=0.02)
        assert made.shape("rejected", sample.bucket) == made.shape("latent", sample.bucket)
        sizes.add(size)
    assert len(sizes) == len(CHOSEN)


def test_the_loader_hands_over_rejected_pictures_with_the_weights_of_their_pairs(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is asked for them; else it reads none of their records."""
    read, real = list[str](), ShardReader.read_batch

    def read_batch(self: ShardReader, *args: Any, **options: Any) -> Any:
        read.append(self.encoding.split("-")[0])
        return real(self, *args, **options)

    monkeypatch.setattr(ShardReader, "read_batch", read_batch)
    by_table(new(tmp_path), votes=[2.0, 0.5, 3.0])
    config, data = configured(make_config, tmp_path, "column=worse", "data.pictures.rejected.weight=votes")
    sana_pipe.stages.encode.run(config, data)
    sana_pipe.stages.bucket.run(config)
    plain = snapshot(config)
    packed = Cache(config.cache).open_snapshot(sana_pipe.stages.pack.run(config))
    votes = tmp_path / "votes.jsonl"
    votes.write_text(json.dumps({"item": row_name(CHOSEN_FILES[1]), "votes": 7.0}) + "\n")
    rules = config.bucket.model_copy(update={"metadata": str(votes)})
    sana_pipe.stages.bucket.run(config.model_copy(update={"bucket": rules}))
    for made, second in (plain, 0.5), (packed, 0.5), (snapshot(config), 7.0):
        seen = dict[int, float]()
        settings = loader_settings(stop_step=6, pictures=("rejected",))
        read.clear()
        for step, _ in Loader(made, settings):
            for batch in step:
                assert batch.pair_weight is not None and batch.pair_weight.dtype == torch.float32
                assert batch.pictures["rejected"].shape == batch.latents.shape
                seen |= dict(zip(batch.sample_ids, batch.pair_weight.tolist(), strict=True))
        names = {made.sample(row).sample_id: made.source_item(row)[1] for row in range(len(made))}
        assert {names[key]: weight for key, weight in seen.items()} == {
            row_name(one): weight
            for one, other, weight in zip(CHOSEN_FILES, REJECTED_FILES, [2.0, second, 3.0], strict=True)
        }
        assert {"latent", "text", "rejected"} <= set(read)
        read.clear()
        [[[batch, *_], _]] = Loader(made, loader_settings(stop_step=1))
        assert batch.pair_weight is None and not batch.pictures and set(read) == {"latent", "text"}


def test_a_picture_without_a_rejected_one_is_rejected_with_the_reason(make_config: MakeConfig, tmp_path: Path) -> None:
    way = by_suffix(new(tmp_path))
    (tmp_path / "data/1_l.png").unlink()
    (tmp_path / "data/2_l.png").write_bytes(b"no picture")
    config, data = configured(make_config, tmp_path, way, "encode.max_shrink=1")
    with pytest.raises(RejectRateError):
        sana_pipe.stages.encode.run(config, data)
    with Path(config.cache, "reports/rejects-data.csv").open() as sheet:
        reasons = {row["item"]: row["reason"] for row in csv.DictReader(sheet)}
    assert reasons["1_w.png"] == "has no rejected picture (data.pictures.rejected.suffix: _w/_l)"
    assert reasons["2_w.png"].startswith("its rejected picture 2_l.png: not a picture")


def test_a_source_without_pairs_names_the_place_that_was_looked_at(make_config: MakeConfig, tmp_path: Path) -> None:
    by_suffix(new(tmp_path))
    config, data = configured(make_config, tmp_path, "suffix=_w/_bad")
    with pytest.raises(RejectRateError) as error:
        sana_pipe.stages.encode.run(config, data)
    assert "put X_bad.png next to X_w.jpg" in str(error.value.fix) and "required" not in str(error.value.fix)


def test_a_listing_with_two_pairs_of_one_chosen_picture_says_so(make_config: MakeConfig, tmp_path: Path) -> None:
    way = by_listing(new(tmp_path))
    with (tmp_path / "data/pairs.csv").open("a") as sheet:
        sheet.write("good/0.png,bad/1.png,picture 0\n")
    config, _ = configured(make_config, tmp_path, way)
    done = sana_pipe.stages.encode.run(config, str(tmp_path / "data/pairs.csv"))
    assert done["images"] == len(CHOSEN) - 1 and done["rejects"] == 1
    [report] = Path(config.cache, "reports").glob("rejects-*.csv")
    assert "has 2 rejected pictures: bad/0.png, bad/1.png" in report.read_text()


def test_a_damaged_record_of_a_rejected_picture_is_found_and_repaired(make_config: MakeConfig, tmp_path: Path) -> None:
    config, data = configured(make_config, tmp_path, by_suffix(new(tmp_path)))
    sana_pipe.stages.encode.run(config, data)
    sana_pipe.stages.bucket.run(config)
    shard = next(Path(config.cache).glob("shards/rejected-*/*/*.tar"))
    content = bytearray(shard.read_bytes())
    made = snapshot(config)
    place = next(
        place for row in range(len(made)) if (place := made.sample(row).pictures["rejected"]).shard == shard.stem
    )
    content[place.offset] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)
    assert [finding for finding in audit.verify(Cache(config.cache)) if "rejected" in str(finding)]
    sana_pipe.stages.verify.run(config, repair=True)
    assert not list(audit.verify(Cache(config.cache)))


@pytest.mark.parametrize("kind", ["bytes", "names", "csv"])
def test_a_label_says_which_picture_of_a_row_is_better(kind: str, make_config: MakeConfig, tmp_path: Path) -> None:
    """The form of Pick-a-Pic v2: `jpg_0`, `jpg_1`, `label_0`, `caption`."""
    data = new(tmp_path)
    sides = [(one, other, 1.0) for one, other in zip(CHOSEN_FILES, REJECTED_FILES, strict=True)]
    sides[1] = REJECTED_FILES[1], CHOSEN_FILES[1], 0.0
    rows = [{"jpg_0": one, "jpg_1": other, "label_0": label} for one, other, label in sides]
    rows += [{"jpg_0": CHOSEN_FILES[0], "jpg_1": REJECTED_FILES[1], "label_0": label} for label in (0.5, None)]
    for number, row in enumerate(rows):
        row["caption"] = f"picture {number % len(CHOSEN)}"
        for column in ("jpg_0", "jpg_1") if kind != "bytes" else ():
            (data / f"{number}{column}.png").write_bytes(row[column])
            row[column] = f"{number}{column}.png"
    if kind == "csv":
        with (data / "pairs.csv").open("w") as sheet:
            writer = csv.DictWriter(sheet, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), data / "pairs.parquet")
    options = ["data.image_field=jpg_0", "data.caption_field=caption", "data.pictures.rejected.label=label_0"]
    where = str(data / "pairs.csv") if kind == "csv" else str(data)
    config, _ = configured(make_config, tmp_path, "column=jpg_1", *options)
    done = sana_pipe.stages.encode.run(config, where)
    assert done["images"] == done["rejected pictures"] == len(CHOSEN)
    [report] = Path(config.cache, "reports").glob("rejects-*.csv")
    with report.open() as sheet:
        reasons = sorted(row["reason"] for row in csv.DictReader(sheet))
    assert len(reasons) == 2 and "'label_0' is None" in reasons[0] and "is a tie" in reasons[1]
    plain, folder = configured(make_config, tmp_path / "plain", by_suffix(new(tmp_path / "plain")))
    sana_pipe.stages.encode.run(plain, folder)
    assert keys(config) == keys(plain)
    again = sana_pipe.stages.encode.run(config, where)
    assert again["images"] == again["rejected pictures"] == 0


def left_out(config: Config) -> dict[str, int]:
    return dict(snapshot(config).head.left_out)


def test_ties_equal_pictures_and_contradictions_are_left_out_and_counted(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    a, b, c, d, e, f = (picture(64, 64, 200 + number) for number in range(6))
    rows = [
        (a, b, "stays", 1.0),
        (a, b, "tie", 0.0),
        (a, a, "equal", 1.0),
        (a, b, "no number", None),
        (c, d, "votes", 2.0),
        (d, c, "votes", 1.0),
        (d, c, "other words", 1.0),
        (e, f, "even", 1.5),
        (f, e, "even", 1.5),
    ]
    columns = dict(zip(("image", "worse", "text", "votes"), map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), new(tmp_path) / "pairs.parquet")
    config, data = configured(make_config, tmp_path, "column=worse", "data.pictures.rejected.weight=votes")
    sana_pipe.stages.encode.run(config, data)
    sana_pipe.stages.bucket.run(config)
    made = snapshot(config)
    stay = {row_name(a), row_name(c), f"{row_name(d)}-2"}
    assert {made.source_item(row)[1] for row in range(len(made))} == stay
    reasons = left_out(config)
    assert sum(reasons.values()) == 6
    assert [count for reason, count in reasons.items() if "both orders" in reason] == [2]
    assert [count for reason, count in reasons.items() if "in the other order" in reason] == [1]
    assert [count for reason, count in reasons.items() if "equal pictures" in reason] == [1]
    assert [count for reason, count in reasons.items() if "its weight is 0" in reason] == [1]
    assert [count for reason, count in reasons.items() if "no number" in reason] == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["suffix=_w/_l", "label=better"], "label goes with column"),
        (["suffix=_w/_l", "folder=bad"], "give one of suffix, folder, column"),
    ],
)
def test_a_place_that_is_none_is_refused(options: list[str], message: str, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(Path("unused"), *(f"data.pictures.rejected.{option}" for option in options))


def test_a_training_on_a_snapshot_without_pairs_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    by_suffix(new(tmp_path))
    for file in (tmp_path / "data").glob("*_l.png"):
        file.unlink()
    config = make_config(tmp_path)
    sana_pipe.stages.encode.run(config, str(tmp_path / "data"))
    sana_pipe.stages.bucket.run(config)
    check_pictures([snapshot(config)], [])
    with pytest.raises(ConfigError, match="has no rejected records"):
        check_pictures([snapshot(config)], ["rejected"])


def digests(*names: str) -> np.ndarray:
    return np.array([name.encode() for name in names], "S16")


def test_pairs_are_linked_through_shared_pictures() -> None:
    assert linked(digests(*"ACDE"), digests(*"BBEF")).tolist() == [b"A", b"A", b"D", b"D"]
    chain = [f"{number:02d}" for number in range(50)]
    assert set(linked(digests(*chain[1:]), digests(*chain[:-1])).tolist()) == {b"00"}


@pytest.mark.parametrize("row", [(0, 5), (5, 0), (1, 5), (5, 1), (4, 5)])
def test_a_validation_with_a_picture_of_a_trained_pair_is_refused(
    row: tuple[int, int], make_config: MakeConfig, tmp_path: Path
) -> None:
    """Trained are the pairs (0, 1) and (2, 3)."""
    files = [picture(64, 64, 300 + number) for number in range(6)]
    for name, pairs in ("trained", [(0, 1), (2, 3)]), ("others", [row]):
        image, worse = ([files[pair[side]] for pair in pairs] for side in (0, 1))
        table = pa.table({"image": image, "worse": worse, "text": ["words"] * len(pairs)})
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "pairs.parquet")
        sana_pipe.stages.encode.run(make_config(tmp_path, "data.pictures.rejected.column=worse"), str(tmp_path / name))
    opened = {}
    for name, other in ("trained", "others"), ("others", "trained"):
        config = make_config(tmp_path, f"bucket.sources.{other}.weight=0")
        sana_pipe.stages.bucket.run(config, name=name)
        opened[name] = Cache(config.cache).open_snapshot(name)
    if {0, 1} & set(row):
        with pytest.raises(ConfigError, match="1 of the 1 samples"):
            check_disjoint(opened["trained"], opened["others"])
    else:
        check_disjoint(opened["trained"], opened["others"])


def test_no_picture_of_a_held_out_pair_is_trained_on(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups of pictures, each of four pairs that share pictures in a chain: chosen twice, rejected twice, and both."""
    rows = []
    for group in range(8):
        a, b, c, d, e = (picture(64, 64, 1000 + 10 * group + number) for number in range(5))
        rows += [(a, b, group), (a, c, group), (d, c, group), (b, e, group)]
    image, worse, groups = (list(column) for column in zip(*rows, strict=True))
    group_of = {row_name(one): group for one, other, group in rows}
    table = pa.table({"image": image, "worse": worse, "group": groups, "text": ["words"] * len(rows)})
    pq.write_table(table, new(tmp_path) / "pairs.parquet")
    config, data = configured(make_config, tmp_path, "column=worse", "bucket.heldout=0.4", "bucket.dedup=image")
    sana_pipe.stages.encode.run(config, data)
    capsys.readouterr()
    sana_pipe.stages.bucket.run(config)
    assert "repeat a picture" not in "".join(capsys.readouterr())
    cache = Cache(config.cache)
    sides = []
    for name in ("latest", "latest.heldout"):
        made = cache.open_snapshot(name)
        sides.append({group_of[made.source_item(row)[1].removesuffix("-2")] for row in range(len(made))})
        assert len(made) == 4 * len(sides[-1])  # pairs of one chosen picture are no copies of each other
    check_disjoint(cache.open_snapshot("latest"), cache.open_snapshot("latest.heldout"))
    assert sides[0] and sides[1] and not sides[0] & sides[1]
