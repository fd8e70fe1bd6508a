"""Storage choices: exact where they say so, close where they do not, checked everywhere, read by everything."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.gc
import sana_pipe.stages.verify
from sana_pipe.base.errors import CacheError, ConfigError, IntegrityError
from sana_pipe.config import Config, load
from sana_pipe.data.cache import audit, codec, index, layout, shard
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.encodings import Encoding, encoding_class
from sana_pipe.data.cache.snapshot_samples import samples_schema
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.loader.loader import Loader
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.tools.reporting import draw_latents
from tests.support.constants import set_constants, unit_sizes
from tests.support.loading import loader_settings
from tests.support.messages import naming

MakeConfig = Callable[..., Config]
STORED = [codec.LOSSLESS, codec.INT8]
SHAPES = {"latent": (4, 2, 3), "text": (3, 6)}


def bits(shape: tuple[int, ...], seed: int = 0, gain: object = 1.0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.asarray(gain, np.float32)
    return codec.from_float(values)


def finite_bits(shape: tuple[int, ...] | st.SearchStrategy) -> st.SearchStrategy:
    """bf16 bits with every sign, mantissa and exponent but that of infinities: subnormals, zeros, the largest."""
    return hnp.arrays(np.uint16, shape, elements=st.integers(0, 0xFFFF).filter(lambda b: b & 0x7F80 != 0x7F80))


# ---------------------------------------------------------------- numbers


@given(finite_bits(hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=7)))
@settings(max_examples=150, deadline=None)
def test_lossless_is_bit_exact(array: np.ndarray) -> None:
    coder = codec.Codec(True, codec.LOSSLESS)
    back = np.empty_like(array)
    coder.decode(coder.encode(array), back, "record")
    assert np.array_equal(back, array)


def test_lossless_is_bit_exact_for_every_value() -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    every = every[(every & 0x7F80) != 0x7F80]
    coder = codec.Codec(True, codec.LOSSLESS)
    back = np.empty_like(every)
    coder.decode(coder.encode(every), back, "record")
    assert np.array_equal(back, every)


@given(finite_bits((5, 6)), st.sampled_from(["text", "latent"]))
@settings(max_examples=150, deadline=None)
def test_int8_keeps_its_bound(array: np.ndarray, kind: str) -> None:
    """|error| <= half a step of the token, in the channel's scale, and bf16's own rounding."""
    array = array if kind == "text" else np.ascontiguousarray(array.T).reshape(6, 5, 1)
    coder = codec.Codec(kind == "text", codec.INT8)
    back = np.empty_like(array)
    coder.decode(coder.encode(array), back, "record")
    true = codec.tokens_of(codec.to_float(array), kind == "text").astype(np.float64)
    result = codec.tokens_of(codec.to_float(back), kind == "text").astype(np.float64)
    scale = codec.to_float(codec.channel_scales(codec.tokens_of(codec.to_float(array), kind == "text"))).astype(
        np.float64
    )
    largest = np.abs(true / scale).max(axis=1, keepdims=True)
    step = largest / 127 * (1 + 2**-7) + 2.0**-133
    bound = scale * step / 2 + np.abs(result) * 2**-8 + np.abs(true) * 2**-22 + 2.0**-133
    assert (np.abs(result - true) <= bound * (1 + 1e-6)).all()
    assert not np.any((back & 0x7F80) == 0x7F80)


@pytest.mark.parametrize(("kind", "shape"), [("text", (0, 6)), ("latent", (6, 0, 3)), ("text", (1, 6))])
def test_int8_of_no_token_or_one(kind: str, shape: tuple[int, ...]) -> None:
    array, coder = bits(shape), codec.Codec(kind == "text", codec.INT8)
    back = np.empty_like(array)
    coder.decode(payload := coder.encode(array), back, "record")
    assert len(payload) == codec.payload_bytes(encoding_class(kind)(storage=codec.INT8), shape)
    assert np.array_equal(back, array), "one token: each channel's scale is its value"


def test_the_worst_token_is_that_of_all_records_and_zeros_have_no_error() -> None:
    coder, measured = codec.Codec(True, codec.INT8), codec.Measured()
    worst = []
    for record in (
        np.zeros((2, 64), np.uint16),
        bits((3, 64), 1),
        bits((3, 64), 2, np.eye(1, 64) * 50 + 1),
        bits((1, 64)),
    ):
        measured.add(coder, record, coder.encode(record))
        worst.append(measured.worst)
    assert 0 == worst[0] < worst[1] < worst[2] == worst[3]
    assert measured.records == 4


def test_channel_scales_are_what_keeps_int8_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """With six channels 40 times the others: about one per cent with scales per channel; without them each channel but
    those six loses far more (the sabotage of this test)."""
    gain = np.ones(256)
    gain[:6] = 40
    array = bits((64, 256), 1, gain)
    true = codec.to_float(array)

    def channel_error() -> float:
        coder, back = codec.Codec(True, codec.INT8), np.empty_like(array)
        coder.decode(coder.encode(array), back, "record")
        noise = np.sqrt(((codec.to_float(back) - true) ** 2).mean(axis=0))
        return float((noise / np.sqrt((true**2).mean(axis=0))).max())

    assert np.allclose(codec.to_float(codec.channel_scales(true)), gain, rtol=0.4)
    assert channel_error() < 0.02
    monkeypatch.setattr(codec, "channel_scales", lambda tokens: np.full(256, 0x3F80, np.uint16))
    assert channel_error() > 0.15


def test_a_silent_channel_does_not_take_the_precision_of_the_others() -> None:
    array = codec.to_float(bits((64, 8), 1))
    array[:, 3] = 0
    scale = codec.to_float(codec.channel_scales(array))
    assert scale[3] == pytest.approx(float(scale.mean()) / 1024, rel=0.6)


def test_rounding_is_to_nearest_even_and_never_to_infinity() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e3
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(codec.from_float(values.numpy()), expected)
    assert codec.from_float(np.array([3.4e38, -3.4e38], np.float32)).tolist() == [0x7F7F, 0xFF7F]


# ---------------------------------------------------------------- shards


def written(root: Path, storage: str, kind: str = "latent", count: int = 1) -> tuple[Cache, Encoding, str, pa.Table]:
    encoding: Encoding
    if kind == "latent":
        encoding = LatentEncoding(weights="w", channels=4, storage=storage)
    else:
        encoding = TextEncoding(weights="w", width=6, storage=storage)
    cache = Cache(root, create=True)
    cache.add_encoding(encoding)
    with shard.ShardWriter(cache.files, encoding, "unit") as writer:
        for i in range(count):
            array = bits((4, 2, 3), i) if kind == "latent" else bits((3 + i, 6), i)
            writer.add(bytes([i + 1] * 16), array, caption=f"Caption {i}" if kind == "text" else None)
        name, _, table = writer.finish()
    return cache, encoding, name, table


@pytest.mark.parametrize("storage", STORED)
def test_every_flipped_bit_of_a_payload_is_noticed(storage: str, tmp_path: Path) -> None:
    cache, encoding, name, table = written(tmp_path / "c", storage)
    path = cache.files.path(layout.Paths.shard(encoding.name, name))
    row, good = table.to_pylist()[0], path.read_bytes()
    reader, into = shard.ShardReader(cache.files, encoding.name), np.empty((4, 2, 3), np.uint16)

    def read() -> None:
        reader.read(name, row["offset"], row["key"], row["checksum"], into, row["length"])

    read()
    with open(path, "r+b", buffering=0) as file:
        for position in range(row["offset"] * 8, (row["offset"] + row["length"]) * 8):
            file.seek(position // 8)
            file.write(bytes([good[position // 8] ^ 1 << position % 8]))
            with pytest.raises(IntegrityError, match="wrong checksum"):
                read()
            file.seek(position // 8)
            file.write(good[position // 8 : position // 8 + 1])
    read()
    path.write_bytes(good[: row["offset"] + row["length"] - 1])
    with pytest.raises(IntegrityError, match="cut short"):
        shard.ShardReader(cache.files, encoding.name).read(
            name, row["offset"], row["key"], row["checksum"], into, row["length"]
        )


@pytest.mark.parametrize("storage", STORED)
def test_the_checksum_is_what_notices(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: with the checksum switched off a flipped mantissa bit gives other values without a word."""
    cache, encoding, name, table = written(tmp_path / "c", storage)
    row = table.to_pylist()[0]
    reader, good = shard.ShardReader(cache.files, encoding.name), np.empty((4, 2, 3), np.uint16)
    where = (name, row["offset"], row["key"], row["checksum"])
    reader.read(*where, good, row["length"])
    path = cache.files.path(layout.Paths.shard(encoding.name, name))
    data = bytearray(path.read_bytes())
    data[row["offset"] + (22 if storage == codec.LOSSLESS else row["length"] - 1)] ^= 0x10
    path.write_bytes(data)
    into = np.empty_like(good)
    with pytest.raises(IntegrityError):
        reader.read(*where, into, row["length"])
    monkeypatch.setattr(layout, "checksum", lambda *a: row["checksum"])
    reader.read(*where, into, row["length"])
    assert not np.array_equal(into, good)


@pytest.mark.parametrize("storage", STORED)
def test_a_payload_is_not_decoded_as_something_else(storage: str, tmp_path: Path) -> None:
    cache, encoding, name, table = written(tmp_path / "c", storage, "text")
    row = table.to_pylist()[0]
    where = (name, row["offset"], row["key"], row["checksum"])
    reader = shard.ShardReader(cache.files, encoding.name)
    with pytest.raises(IntegrityError, match="shape"):
        reader.read(*where, np.empty((6, 3), np.uint16), row["length"])
    with pytest.raises(IntegrityError, match="not recorded"):
        reader.read(*where, np.empty((3, 6), np.uint16))
    payload = reader.stored(*where, row["length"])
    other = codec.Codec(True, STORED[STORED.index(storage) - 1])
    with pytest.raises(IntegrityError, match=naming("record", STORED[STORED.index(storage) - 1], (3, 6))):
        other.decode(payload, np.empty((3, 6), np.uint16), "record")
    coder = codec.Codec(True, storage)
    for wrong in (payload[:-1], payload[:40], payload + b"\0" if storage == codec.INT8 else payload[:38]):
        with pytest.raises(IntegrityError):
            coder.decode(wrong, np.empty((3, 6), np.uint16), "record")
    # without the encoding's document nothing is guessed
    cache.files.remove(layout.Paths.encoding(encoding.name))
    with pytest.raises(IntegrityError, match=naming(name, "bf16", (3, 6))):
        shard.ShardReader(cache.files, encoding.name).read(*where, np.empty((3, 6), np.uint16), row["length"])


@pytest.mark.parametrize("storage", STORED)
def test_webdataset_and_numpy_read_the_members(storage: str, tmp_path: Path) -> None:
    import webdataset

    cache, encoding, name, table = written(tmp_path / "c", storage, "text", count=3)
    path = cache.files.path(layout.Paths.shard(encoding.name, name))
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
    assert [s["__key__"] for s in samples] == [k.hex() for k in table.column("key").to_pylist()]
    for i, sample in enumerate(samples):
        member = np.load(io.BytesIO(sample["npy"]))
        assert member.dtype == np.uint8 and member.ndim == 1
        into = np.empty((3 + i, 6), np.uint16)
        codec.Codec(True, storage).decode(member.tobytes(), into, "member")
        if storage == codec.LOSSLESS:
            assert np.array_equal(into, bits((3 + i, 6), i))
        assert sample["txt"].decode() == f"Caption {i}"


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("kind", ["latent", "text"])
def test_the_example_of_the_page_decodes_the_same(storage: str, kind: str, tmp_path: Path) -> None:
    from tests.support.layout_page import examples

    (example,) = [text for text in examples() if "SPZ1" in text]
    page: dict = {}
    exec(compile(example, "cache_layout.md", "exec"), page)
    cache, encoding, name, table = written(tmp_path / "c", storage, kind)
    row, reader = table.to_pylist()[0], shard.ShardReader(cache.files, encoding.name)
    where, into = (name, row["offset"], row["key"], row["checksum"]), np.empty(SHAPES[kind], np.uint16)
    reader.read(*where, into, row["length"])
    values = page["decode"](bytes(reader.stored(*where, row["length"])), kind)
    assert np.array_equal(codec.from_float(values), into)


# ---------------------------------------------------------------- identity


def test_plain_storage_changes_no_id_and_no_schema() -> None:
    assert TextEncoding(weights="w", storage="bf16").id == TextEncoding(weights="w").id
    schema = samples_schema([LatentEncoding(), TextEncoding()])
    assert [field.name for field in schema.field("latent").type] == ["shard", "offset", "key", "checksum"]
    lossless = samples_schema([LatentEncoding(storage="bf16-zstd"), TextEncoding()])
    assert lossless.field("latent").type.get_field_index("length") == 4
    assert lossless.field("captions") == schema.field("captions")
    ids = {TextEncoding(weights="w", storage=storage).id for storage in codec.STORAGES}
    assert len(ids) == 3


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(CacheError, match=naming("'fp4'")):
        codec.codec_of(TextEncoding(storage="fp4"))
    with pytest.raises(ConfigError, match=r"encode\.storage"):
        load("tiny", ["encode.storage=zstd"])


def test_storage_is_one_word_or_one_per_kind() -> None:
    one, two = load("tiny", ["encode.storage=int8"]), load("tiny", ["encode.storage.text=int8"])
    assert (one.encode.storage.latent, one.encode.storage.text) == ("int8", "int8")
    assert (two.encode.storage.latent, two.encode.storage.text) == ("bf16", "int8")


# ---------------------------------------------------------------- from pictures to batches


def batches(cache: Path) -> list:
    loader = Loader(
        Cache(cache).open_snapshot(),
        loader_settings(caption_drop=0.2, prefetch=2, threads=2, stop_step=4),
    )
    return [batch for step, _ in loader for batch in step]


@pytest.fixture(scope="module")
def plain(small_cache: Path) -> list:
    return batches(small_cache)


@pytest.fixture(scope="module", params=[*STORED, "mixed"])
def stored(
    request: pytest.FixtureRequest, photos: Path, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("stored")
    config = make_config(folder, *_storage(request.param))
    sana_pipe.stages.encode.run(config, data=str(photos))
    sana_pipe.stages.bucket.run(config)
    return request.param, folder / "cache"


def _storage(name: str) -> list[str]:
    if name == "mixed":
        return ["encode.storage.latent=bf16-zstd", "encode.storage.text=int8"]
    return [f"encode.storage={name}"]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_the_loader_reads_every_storage(stored: tuple[str, Path], plain: list) -> None:
    name, cache = stored
    result = batches(cache)
    assert len(result) == len(plain) > 0
    for ours, theirs in zip(result, plain, strict=True):
        assert ours.sample_ids == theirs.sample_ids
        for field in dataclasses.fields(ours):
            mine, other = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(mine, torch.Tensor) and mine.dtype == torch.bfloat16:
                lossless = name == codec.LOSSLESS or (name == "mixed" and mine.ndim == 4)
                assert torch.equal(mine, other) if lossless else 0 < relative(mine, other) < 0.02
            elif isinstance(mine, torch.Tensor):
                assert torch.equal(mine, other)


def test_drawing_reads_every_storage(stored: tuple[str, Path], small_cache: Path) -> None:
    name, cache = stored
    ours, theirs = (draw_latents.SnapshotTensors(Cache(root).open_snapshot()) for root in (cache, small_cache))
    assert ours.null().shape == theirs.null().shape
    for row in range(len(ours.snapshot)):
        one, other = ours.snapshot.sample(row), theirs.snapshot.sample(row)
        assert one.sample_id == other.sample_id
        assert relative(ours.latent(one), theirs.latent(other)) < (0.02 if name == codec.INT8 else 1e-9)
        assert relative(ours.text(one, 0), theirs.text(other, 0)) < (1e-9 if name == codec.LOSSLESS else 0.02)


@pytest.fixture
def copy(stored: tuple[str, Path], make_config: MakeConfig, tmp_path: Path) -> tuple[str, Config]:
    shutil.copytree(stored[1], tmp_path / "cache")
    return stored[0], make_config(tmp_path, *_storage(stored[0]))


@pytest.mark.parametrize("kind", ["latent", "text"])
def test_one_flipped_byte_is_repaired_to_the_byte(
    kind: str, copy: tuple[str, Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config = copy[1]
    cache = Cache(config.cache)
    assert sana_pipe.stages.verify.run(config, as_json=True) == 0
    encoding = cache.encodings(kind)[0].name
    commit = max(index.commits(cache.files, encoding, 0), key=lambda c: c.records)
    row = audit.record_rows(cache, commit)[-1]
    path = cache.files.path(layout.Paths.shard(encoding, commit.shard or ""))
    good = path.read_bytes()
    bad = bytearray(good)
    bad[row["offset"] + 30] ^= 4
    path.write_bytes(bad)
    capsys.readouterr()
    assert sana_pipe.stages.verify.run(config, as_json=True) != 0
    (finding,) = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["findings"]
    assert finding["records"] == [row["key"].hex()]
    assert sana_pipe.stages.verify.run(config, repair=True, as_json=True) == 0
    (finding,) = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["findings"]
    assert finding["outcome"] == "restored"
    assert path.read_bytes() == good


def test_a_repair_copies_lossy_records_as_they_stand(
    copy: tuple[str, Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sabotage of the repair: intact records that are encoded anew from decoded values are not restored byte for byte
    where the storage is lossy."""
    if copy[0] != codec.INT8:
        pytest.skip("lossless records may be encoded anew")
    real = shard.ShardWriter.add
    monkeypatch.setattr(
        shard.ShardWriter, "add", lambda self, *a, stored=None, **k: real(self, *a, **k)
    )  # the stored payload is ignored
    config = copy[1]
    cache = Cache(config.cache)
    encoding = cache.encodings("text")[0].name
    commit = max(index.commits(cache.files, encoding, 0), key=lambda c: c.records)
    path = cache.files.path(layout.Paths.shard(encoding, commit.shard or ""))
    bad = bytearray(path.read_bytes())
    bad[audit.record_rows(cache, commit)[0]["offset"] + 30] ^= 4
    path.write_bytes(bad)
    sana_pipe.stages.verify.run(config, repair=True, as_json=True)
    summary = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert summary["findings"][0]["outcome"] == "replaced"


def test_a_second_run_loads_nothing(copy: tuple[str, Config], photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sana_pipe.data.encoders import vae as encoders

    def refuse(*args: object) -> None:
        raise AssertionError("a model was loaded although there is nothing to encode")

    monkeypatch.setattr(encoders.LatentEncoder, "load", refuse)
    monkeypatch.setattr(TextEncoder, "load", refuse)
    assert sana_pipe.stages.encode.run(copy[1], data=str(photos))["images"] == 0


def test_two_tasks_make_the_same_bytes(
    stored: tuple[str, Path], photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, unit_sizes(2, 3, CPU_TEXT_BATCH=2))
    small = ["encode.image_batch=2"]
    shards = []
    for order in ((0, 1, 2), (2, 1, 0)):
        config = make_config(tmp_path / str(order[0]), *_storage(stored[0]), *small)
        for task in order:
            sana_pipe.stages.encode.run(config, data=str(photos), task_index=task, task_count=3)
        root = Path(config.cache)
        shards.append({path.name for path in (root / "shards").rglob("*.*")})
    assert shards[0] == shards[1] and len(shards[0]) > 8


def test_ratio_and_error_are_printed(
    photos: Path, make_config: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sana_pipe.stages.encode.run(make_config(tmp_path, *_storage("mixed")), data=str(photos))
    out = capfd.readouterr().out
    assert "latent storage bf16-zstd: 0." in out and "no error" in out
    assert "text storage int8: 0.5" in out and "relative error 0.0" in out
    assert out.count(" storage int8") == out.count(" storage bf16-zstd") == 1


def test_bucket_refuses_a_cache_of_another_storage(stored: tuple[str, Path], make_config: MakeConfig) -> None:
    with pytest.raises(CacheError, match=r"encode\.storage\.text"):
        sana_pipe.stages.bucket.run(make_config(stored[1].parent))


@pytest.mark.parametrize("kind", ["latent", "text"])
def test_int8_records_of_two_caches_that_were_encoded_apart_are_joined(
    kind: str, photos: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    setting, stems = f"encode.storage.{kind}=int8", sorted({path.stem for path in photos.iterdir()})
    for name, chosen in (("one", stems[::2]), ("two", stems[1::2])):
        half = tmp_path / f"{name}-photos"
        half.mkdir()
        for path in photos.iterdir():
            if path.stem in chosen:
                shutil.copy(path, half)
        sana_pipe.stages.encode.run(make_config(tmp_path / name, setting), data=str(half))
    both = make_config(tmp_path / "one", setting, f"bucket.caches=['{tmp_path / 'two' / 'cache'}']")
    sana_pipe.stages.bucket.run(both)
    opened = Cache(both.cache).open_snapshot()
    assert len(opened) == 12
    tensors = draw_latents.SnapshotTensors(opened)
    for row in range(len(opened)):
        sample = opened.sample(row)
        assert tensors.latent(sample).isfinite().all() and tensors.text(sample, 0).isfinite().all()
