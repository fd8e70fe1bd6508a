"""`sana-pipe encode` on real files with small real models: what is encoded, once, and what is not."""

from __future__ import annotations

import csv
import errno
import gc
import io
import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.verify
from sana_pipe.base import processes
from sana_pipe.base.errors import CacheError, RejectRateError, UserError
from sana_pipe.config import Config, dump
from sana_pipe.data.cache import audit, index, layout, shard
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.keys import key_bytes
from sana_pipe.data.cache.status import status
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.frozen import NonFiniteOutputError
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.images import vips_decoder
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.sources.folder import FolderSource
from sana_pipe.data.work import disk_space
from tests.support import tiny_models
from tests.support.constants import set_constants, unit_sizes
from tests.support.loading import loader_settings
from tests.support.lowered import lower_limits
from tests.support.messages import naming
from tests.support.source_files import Rows, make_tar
from tests.support.trees import files

MakeConfig = Callable[..., Config]


@pytest.fixture
def source(photos: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(photos, tmp_path / "photos"))


@pytest.fixture
def start(small_cache_copy: Path, make_config: MakeConfig, source: Path, tmp_path: Path) -> Config:
    """A configuration whose cache already holds `source`."""
    return make_config(tmp_path)


def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a model was loaded although there is nothing to encode")

    monkeypatch.setattr(encoders.LatentEncoder, "load", refuse)
    monkeypatch.setattr(TextEncoder, "load", refuse)


def picture(path: Path, seed: int, size: tuple[int, int] = (90, 70)) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path)
    path.with_suffix(".txt").write_text(f"random picture number {seed}")


# ---------------------------------------------------------------- nothing twice


def test_a_second_run_encodes_nothing(start: Config, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(Path(start.cache))
    no_models(monkeypatch)
    # copied pictures have their old times; the bytes are the same, so a rehash finds nothing new either
    assert sana_pipe.stages.encode.run(start, data=str(source), rehash=True)["images"] == 0
    after = files(Path(start.cache))
    new = set(after) - set(before)
    assert {p.split("/")[0] for p in new} <= {"copies", "sources", "tables"}
    assert all(after[name] == data for name, data in before.items())


def test_status_reads_no_table_of_a_scan(
    start: Config, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its counts stand in the document: a table has hundreds of bytes an item."""
    (source / "broken.png").write_bytes(b"no picture")
    (source / "broken.txt").write_text("a broken one")
    sana_pipe.stages.encode.run(start, data=str(source))
    cache = Cache(start.cache)
    table = (cache.last_scan("photos") or {})["table"]
    items, usable = cache.nulls(table, "reject")
    assert items - usable == 1
    monkeypatch.setattr(Cache, "nulls", lambda *read: pytest.fail(f"reads {read}"))
    [counted] = status(cache)["sources"].values()
    assert (counted["items"], counted["rejected"]) == (items, 1)


def test_a_cache_that_cannot_be_written_is_refused_before_the_scan(
    start: Config, source: Path, bound_by_permissions: Callable[[], None]
) -> None:
    root, config = Path(start.cache), Path(start.cache).parent / "config.yaml"
    config.write_text(dump(start))
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    command = processes.command("encode", "--config", str(config), "--data", str(source), "--source-name", "again")
    done = subprocess.run(command, preexec_fn=bound_by_permissions, capture_output=True, text=True)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert done.returncode == CacheError.exit_code and "cannot be written" in done.stderr, done.stderr
    assert "scan" not in done.stdout + done.stderr


@pytest.mark.parametrize("operation", ["link", "replace"])
def test_a_disk_that_cannot_publish_is_refused_before_the_scan(
    start: Config, source: Path, operation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache was copied there, so its files need no publication any more."""
    before = files(Path(start.cache))

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, operation, refused)
    picture(source / "more.png", 1)
    with pytest.raises(CacheError, match=naming(start.cache)):
        sana_pipe.stages.encode.run(start, data=str(source))
    assert "scan" not in capsys.readouterr().err and files(Path(start.cache)) == before


def test_too_little_space_is_said_before_the_scan(
    start: Config, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture(source / "more.png", 1)
    for free, said in ((disk_space.RESERVE - 1, True), (disk_space.RESERVE, False)):
        capsys.readouterr()
        monkeypatch.setattr(Files, "free_bytes", lambda self, free=free: free)
        sana_pipe.stages.encode.run(start, data=str(source))
        printed = capsys.readouterr().err
        assert ("are free" in printed.partition("scan:")[0]) == said and "scan:" in printed
        (source / "more.png").touch()


def test_ten_more_pictures_encode_ten(start: Config, source: Path) -> None:
    for seed in range(10):
        picture(source / f"more-{seed}.png", seed)
    done = sana_pipe.stages.encode.run(start, data=str(source))
    assert (done["images"], done["captions"], done["rejects"]) == (10, 10, 0)
    again = sana_pipe.stages.encode.run(start, data=str(source))
    assert (again["images"], again["captions"]) == (0, 0)


def test_a_changed_caption_encodes_that_caption(start: Config, source: Path) -> None:
    (source / "coffee.txt").write_text("an empty cup")
    done = sana_pipe.stages.encode.run(start, data=str(source))
    assert (done["images"], done["captions"]) == (0, 1)


def test_a_later_run_reads_a_source_as_it_was_read(
    start: Config, source: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = sana_pipe.stages.encode.run(make_config(tmp_path, "data.caption_prefix='sks, '"), data=str(source))
    assert done["new"] == {"images": 0, "captions": 12} and done["captions"] == 12 + 4, "the trigger word in contexts"
    no_models(monkeypatch)
    again = sana_pipe.stages.encode.run(start, data=str(source))
    assert again["new"] == {"images": 0, "captions": 0}
    cache = Cache(start.cache)
    table = cache.table((cache.last_scan("photos") or {})["table"])
    texts = [caption["text"] for captions in table.column("captions").to_pylist() for caption in captions]
    assert texts and all(text.startswith("sks, ") for text in texts)
    assert (
        sana_pipe.stages.encode.run(make_config(tmp_path, "data.caption_prefix=''"), data=str(source))["new"][
            "captions"
        ]
        == 0
    )
    table = cache.table((cache.last_scan("photos") or {})["table"])
    assert "sks" not in str(table.column("captions").to_pylist())


def test_another_mixture_of_captions_encodes_the_new_ones_alone(tmp_path: Path, make_config: MakeConfig) -> None:
    """Long captions first, short ones next to them in a later round: two snapshots of one source."""
    (tmp_path / "pictures").mkdir()
    for seed in range(2):
        picture(tmp_path / "pictures" / f"{seed}.png", seed)
    for path in sorted((tmp_path / "pictures").glob("*.txt")):
        path.with_suffix(".json").write_text(json.dumps({"long": path.read_text() + ", at length", "short": path.stem}))
    found = []
    for name, weights, encoded in (("long", "{long: 1}", (2, 3)), ("mixed", "{long: 3, short: 1}", (0, 2))):
        config = make_config(tmp_path, "bucket.batch=2", f"data.caption_weights={weights}")
        done = sana_pipe.stages.encode.run(config, data=str(tmp_path / "pictures"))
        assert (done["images"], done["captions"]) == encoded, "with the null record"
        sana_pipe.stages.bucket.run(config, name=name)
        found.append(Cache(config.cache).open_snapshot(name))
    assert [sorted(caption.weight for caption in snapshot.sample(0).captions) for snapshot in found] == [
        [1.0],
        [1.0, 3.0],
    ]


def test_a_changed_picture_encodes_that_picture(start: Config, source: Path) -> None:
    path = next(p for p in source.iterdir() if p.stem == "coffee" and p.suffix != ".txt")
    with Image.open(path) as image:
        image.convert("RGB").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)
    done = sana_pipe.stages.encode.run(start, data=str(source))
    assert (done["images"], done["captions"]) == (1, 0)


def test_an_equal_picture_and_caption_is_encoded_once(start: Config, source: Path) -> None:
    path = next(p for p in source.iterdir() if p.stem == "coffee" and p.suffix != ".txt")
    shutil.copy(path, source / f"twin{path.suffix}")
    (source / "twin.txt").write_text((source / "coffee.txt").read_text().upper() + "\n")  # the same once normalised
    done = sana_pipe.stages.encode.run(start, data=str(source))
    assert (done["images"], done["captions"]) == (0, 0)
    sana_pipe.stages.bucket.run(start)
    assert len(Cache(start.cache).open_snapshot()) == 13


def test_a_scan_without_items_says_nothing_about_the_data_set(start: Config, source: Path) -> None:
    cache = Cache(start.cache)
    last = cache.last_scan("photos")
    assert last is not None
    empty = cache.table(last["table"]).slice(0, 0)
    cache.add_scan("photos", {**last, "root": "/elsewhere", "table": cache.put_table(empty)})
    assert sana_pipe.stages.encode.run(start, data=str(source))["images"] == 0
    assert len(cache.table(cache.last_scan("photos")["table"])) == len(cache.table(last["table"]))  # type: ignore[index]


def test_other_weights_are_another_encoding_and_delete_nothing(
    start: Config, source: Path, tiny_repo: Path, tmp_path: Path, make_config: MakeConfig
) -> None:
    from safetensors.torch import load_file, save_file

    before = files(Path(start.cache))
    other = Path(shutil.copytree(tiny_repo, tmp_path / "other"))
    weights = other / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    name = next(n for n in tensors if n.startswith("encoder."))
    tensors[name] = tensors[name] + 0.01
    save_file(tensors, weights)
    config = make_config(tmp_path, f"vae.id={other}")
    done = sana_pipe.stages.encode.run(config, data=str(source))
    assert (done["images"], done["captions"]) == (12, 0)
    assert all(files(Path(start.cache))[name] == data for name, data in before.items())
    moved = Path(shutil.move(other, tmp_path / "moved"))  # a moved model folder is the same encoding
    done = sana_pipe.stages.encode.run(make_config(tmp_path, f"vae.id={moved}"), data=str(source))
    assert done["images"] == 0


def test_another_instruction_encodes_the_captions_only(
    start: Config, source: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path, "text.instruction='Describe: '")
    done = sana_pipe.stages.encode.run(config, data=str(source))
    assert (done["images"], done["captions"]) == (0, 13)  # twelve and the null record
    with pytest.raises(CacheError, match=r"text\.instruction"):
        sana_pipe.stages.bucket.run(start)
    sana_pipe.stages.bucket.run(config)


def test_one_edit_after_another_encodes_exactly_what_it_concerns_and_deletes_nothing(
    source: Path, make_config: MakeConfig, tmp_path: Path, tiny_repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One picture, one caption, the instruction, the VAE's weights, each on top of the ones before."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tiny_repo))
    hub = {"vae.id": "owner/sana", "vae.revision": "first"}

    def run(**changes: str) -> tuple[set[bytes], set[bytes], set[str]]:
        """Keys of the latents and of the captions that this run adds, and their items. Old files stay as they are."""
        hub.update(changes)
        config = make_config(tmp_path, *(f"{key}={value}" for key, value in hub.items()))
        root = Path(config.cache)
        before, known = files(root) if root.exists() else {}, records(root)
        shards = list(root.rglob("*.tar"))
        times = {path: path.stat().st_mtime_ns for path in shards}
        done = sana_pipe.stages.encode.run(config, data=str(source))
        after = files(root)
        assert all(after[name] == data for name, data in before.items()), "an old file was changed or removed"
        assert all(path.stat().st_mtime_ns == moment for path, moment in times.items()), "a shard was written again"
        added = records(root) - known
        latents, texts = ({key for kind, key in added if kind == one} for one in ("latent", "text"))
        assert (done["images"], done["captions"]) == (len(latents), len(texts))
        return latents, texts, planned(root, latents | texts)

    def records(root: Path) -> set[tuple[str, bytes]]:
        if not root.exists():
            return set()
        cache = Cache(root)
        return {
            (kind, key_bytes(key))
            for kind in ("latent", "text")
            for encoding in cache.encodings(kind)
            for key in cache.index(encoding.name).keys
        }

    def planned(root: Path, keys: set[bytes]) -> set[str]:
        """What the plans call these records."""
        cache = Cache(root)
        result = set()
        for kind, column in (("latent", "item"), ("text", "caption")):
            for encoding in cache.encodings(kind):
                for plan in cache.plans(encoding.name):
                    table = cache.table(plan.table)
                    pairs = zip(table.column("key").to_pylist(), table.column(column).to_pylist(), strict=True)
                    result |= {str(name) for key, name in pairs if key in keys}
        return result

    latents, texts, _ = run()
    assert (len(latents), len(texts)) == (12, 13)
    assert run() == (set(), set(), set())

    path = next(p for p in source.iterdir() if p.stem == "coffee" and p.suffix != ".txt")
    with Image.open(path) as image:
        image.convert("RGB").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)
    latents, texts, names = run()
    assert (len(latents), texts, names) == (1, set(), {path.name})

    (source / "coffee.txt").write_text("an empty cup")
    latents, texts, names = run()
    assert (latents, len(texts), names) == (set(), 1, {"an empty cup"})

    latents, texts, _ = run(**{"text.instruction": "'Describe: '"})
    assert (latents, len(texts)) == (set(), 13)

    assert run(**{"vae.revision": "second"}) == (set(), set(), set()), "equal weights are the same encoding"
    latents, texts, names = run(**{"vae.id": str(tiny_models.build(tmp_path / "other", seed=1))})
    assert (len(latents), texts) == (12, set())
    assert path.name in names
    assert run() == (set(), set(), set())
    assert run(**{"vae.id": str(tiny_repo)}) == (set(), set(), set()), "what was there before is still there"


def test_equal_weights_under_another_name_use_the_records_that_are_there(
    source: Path, make_config: MakeConfig, tmp_path: Path, tiny_repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of one hub id serve a folder, another id and another revision."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tiny_repo))

    def config(identity: str, revision: str = "null") -> Config:
        both = (
            f"{part}.{key}={value}"
            for part in ("vae", "text")
            for key, value in (("id", identity), ("revision", revision))
        )
        return make_config(tmp_path, *both)

    done = sana_pipe.stages.encode.run(config("owner/sana", "first"), data=str(source))
    assert (done["images"], done["captions"]) == (12, 13)
    cache = Cache(tmp_path / "cache")
    [old] = cache.encodings("latent")
    for again in (config(str(tiny_repo)), config("owner/sana", "second"), config("mirror/sana-1.1", "first")):
        done = sana_pipe.stages.encode.run(again, data=str(source))
        assert (done["images"], done["captions"]) == (0, 0)
        sana_pipe.stages.bucket.run(again)
    assert [encoding.name for encoding in cache.encodings("latent")] == [old.name]
    assert cache.open_snapshot().encoding(LatentEncoding) == old
    damaged = next(path for path in (tmp_path / "cache").glob("shards/latent-*/*/*.tar"))
    whole = damaged.read_bytes()
    damaged.chmod(0o644)
    damaged.write_bytes(whole[:1600] + bytes([whole[1600] ^ 1]) + whole[1601:])
    assert sana_pipe.stages.verify.run(config(str(tiny_repo)), repair=True, data=(f"{source.name}={source}",)) == 0
    assert damaged.read_bytes() == whole
    other = config(str(tiny_models.build(tmp_path / "other", seed=1)))
    assert sana_pipe.stages.encode.run(other, data=str(source))["images"] == 12


# ---------------------------------------------------------------- bad files


def test_bad_files_are_rejected_with_a_reason_and_the_run_goes_on(start: Config, source: Path) -> None:
    (source / "noise.jpg").write_bytes(b"this is no picture")
    (source / "noise.txt").write_text("noise")
    whole = (source / "retina.jpg").read_bytes()
    (source / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (source / "cut.txt").write_text("half a retina")
    picture(source / "mute.png", 3)
    (source / "mute.txt").unlink()
    picture(source / "good.png", 4)
    done = sana_pipe.stages.encode.run(start, data=str(source))
    assert (done["images"], done["rejects"]) == (1, 3)
    with open(Path(start.cache) / "reports" / "rejects-photos.csv", newline="") as sheet:
        reasons = {row["item"]: row["reason"] for row in csv.DictReader(sheet)}
    assert set(reasons) == {"noise.jpg", "cut.jpg", "mute.png"}
    assert all(reasons.values())
    sana_pipe.stages.bucket.run(start)
    head = Cache(start.cache).open_snapshot().head
    assert head.samples == 13
    assert sum(head.left_out.values()) == 3
    # mended, it is encoded
    (source / "cut.jpg").write_bytes(whole)
    assert sana_pipe.stages.encode.run(start, data=str(source))["rejects"] == 2
    sana_pipe.stages.bucket.run(start)
    assert len(Cache(start.cache).open_snapshot()) == 14


def reasons(config: Config, source: Path) -> dict[str, str]:
    with open(Path(config.cache) / "reports" / f"rejects-{source.name}.csv", newline="") as sheet:
        return {row["item"]: row["reason"] for row in csv.DictReader(sheet)}


def test_policies_reject_by_name_and_can_be_lifted(source: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    picture(source / "small.png", 1, (40, 40))
    picture(source / "narrow.png", 2, (400, 60))
    strict = ("data.min_side=41", "data.max_upscale=1.2", "data.max_crop_loss=0.5")
    done = sana_pipe.stages.encode.run(make_config(tmp_path, *strict), data=str(source))
    assert (done["images"], done["rejects"]) == (12, 2)
    result = reasons(make_config(tmp_path), source)
    assert "data.min_side = 41" in result["small.png"]
    assert "data.max_crop_loss = 0.5" in result["narrow.png"]
    sana_pipe.stages.bucket.run(make_config(tmp_path))
    left_out = Cache(tmp_path / "cache").open_snapshot().head.left_out
    assert sorted(left_out.values()) == [1, 1]

    eased = make_config(tmp_path, "data.max_upscale=1.2")  # neither file changed since
    done = sana_pipe.stages.encode.run(eased, data=str(source))
    assert (done["images"], done["rejects"]) == (1, 1)
    assert "data.max_upscale = 1.2" in reasons(eased, source)["small.png"]
    done = sana_pipe.stages.encode.run(make_config(tmp_path), data=str(source))
    assert (done["images"], done["rejects"]) == (1, 0)
    done = sana_pipe.stages.encode.run(
        make_config(tmp_path, *strict), data=str(source)
    )  # what is there is not taken away
    assert (done["images"], done["rejects"]) == (0, 2)
    assert len(Cache(tmp_path / "cache").index(Cache(tmp_path / "cache").encodings("latent")[0].name)) == 14


def test_a_raised_pixel_limit_is_noticed(source: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    picture(source / "large.png", 1, (2000, 1500))
    assert (
        sana_pipe.stages.encode.run(make_config(tmp_path, "data.max_pixels=2000000"), data=str(source))["rejects"] == 1
    )
    done = sana_pipe.stages.encode.run(make_config(tmp_path), data=str(source))
    assert (done["images"], done["rejects"]) == (1, 0)


def test_the_decoder_is_part_of_the_encoding(
    source: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vips_decoder.why_not() is not None:
        pytest.skip(f"vips: {vips_decoder.why_not()}")

    def run(*overrides: str) -> int:
        return sana_pipe.stages.encode.run(make_config(tmp_path, *overrides), data=str(source))["images"]

    def known() -> set[str]:
        return {encoding.values()["decoder"] for encoding in Cache(tmp_path / "cache").encodings("latent")}

    assert run("data.decoder=pillow") == 12
    assert run() == 0  # auto stays with what there is
    assert known() == {"pillow-srgb-1"}
    assert run("data.decoder=vips") == 12
    assert known() == {"pillow-srgb-1", "vips-srgb-1"}
    assert run() == run("data.decoder=pillow") == 0


def test_a_cache_made_with_vips_is_not_silently_made_again_without_it(
    start: Config, source: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vips_decoder.why_not() is not None:
        pytest.skip(f"vips: {vips_decoder.why_not()}")
    monkeypatch.setattr(vips_decoder, "why_not", lambda: "ModuleNotFoundError: No module named 'pyvips'")
    with pytest.raises(UserError, match=naming("vips", "pyvips")) as caught:
        sana_pipe.stages.encode.run(start, data=str(source))
    assert "data.decoder=pillow" in str(caught.value.fix)
    assert sana_pipe.stages.encode.run(make_config(tmp_path, "data.decoder=pillow"), data=str(source))["images"] == 12


def test_too_many_rejects_stop_the_run(source: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    for n in range(5):
        (source / f"bad-{n}.png").write_bytes(b"x")
        (source / f"bad-{n}.txt").write_text("bad")
    config = make_config(tmp_path, "encode.max_reject_rate=0.2")
    for stage in (sana_pipe.stages.encode.dry_run, sana_pipe.stages.encode.run):
        with pytest.raises(RejectRateError, match="5 of 17"):
            stage(config, data=str(source))
    assert sana_pipe.stages.encode.dry_run(make_config(tmp_path), data=str(source), probe=False) == 0
    for n in range(5, 20):
        (source / f"bad-{n}.png").write_bytes(b"x")
        (source / f"bad-{n}.txt").write_text("bad")
    with pytest.raises(RejectRateError, match="20 of 32"):  # the default
        sana_pipe.stages.encode.run(make_config(tmp_path), data=str(source))


def test_files_that_this_user_may_not_read_have_the_fix_of_rights(
    source: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def denied(path: Any, *options: Any, **more: Any) -> int:
        if str(path).endswith(".txt") and str(source) in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *options, **more)

    monkeypatch.setattr(os, "open", denied)
    for stage in (sana_pipe.stages.encode.dry_run, sana_pipe.stages.encode.run):
        with pytest.raises(RejectRateError, match=re.escape(f"chmod -R u+rX {source}")):
            stage(make_config(tmp_path), data=str(source))


def test_a_source_of_which_much_is_missing_is_left_as_it_was(
    start: Config, source: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    before = Cache(start.cache).last_scan("photos")
    away = [path for path in sorted(source.iterdir()) if path.suffix != ".txt"][:3]
    for path in away:
        path.rename(path.with_suffix(".gone"))
    with pytest.raises(UserError, match="3 of the 12") as refused:
        sana_pipe.stages.encode.run(start, data=str(source))
    assert away[0].name in str(refused.value) and "encode.max_shrink=1" in str(refused.value.fix)
    assert Cache(start.cache).last_scan("photos") == before
    done = sana_pipe.stages.encode.run(make_config(tmp_path, "encode.max_shrink=0.25"), data=str(source))
    assert (done["items"], done["missing"]) == (9, 3)
    for path in away:
        path.with_suffix(".gone").rename(path)
    done = sana_pipe.stages.encode.run(start, data=str(source))
    assert (done["missing"], done["new"]["images"], done["reused"]["images"]) == (0, 0, 12)
    for path in list(source.iterdir()):  # other names are no loss
        path.rename(path.with_name("new-" + path.name))
    assert sana_pipe.stages.encode.run(start, data=str(source))["missing"] == 0
    # nor is what a setting leaves out
    strict = make_config(tmp_path, "data.min_side=500", "encode.max_reject_rate=0.1")
    done = sana_pipe.stages.encode.run(strict, data=str(source))
    assert done["missing"] == 0 and 2 < done["rejects"] < 12
    with pytest.raises(RejectRateError, match="12 of 12"):
        sana_pipe.stages.encode.run(make_config(tmp_path, "data.min_side=50000"), data=str(source))


def test_what_may_be_missing_is_a_share_of_the_pictures_that_were_usable(
    start: Config, source: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_models(monkeypatch)
    strict = make_config(tmp_path, "encode.max_reject_rate=0.4")  # the limit itself is allowed
    for n in range(8):
        (source / f"bad-{n}.png").write_bytes(b"x")
        (source / f"bad-{n}.txt").write_text("bad")
    assert sana_pipe.stages.encode.run(strict, data=str(source))["rejects"] == 8
    for path in [path for path in sorted(source.iterdir()) if path.suffix != ".txt" and "bad" not in path.name][:3]:
        path.unlink()
    with pytest.raises(UserError, match="3 of the 12"):
        sana_pipe.stages.encode.run(start, data=str(source))


def test_a_source_of_which_nothing_is_usable_is_an_error_before_any_model(
    source: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in source.glob("*.txt"):
        path.rename(path.with_suffix(".tags"))
    no_models(monkeypatch)
    config = make_config(tmp_path, "encode.max_reject_rate=1.0")
    with pytest.raises(RejectRateError, match="12 of 12") as foreseen:
        sana_pipe.stages.encode.dry_run(config, data=str(source))
    assert "no caption" in capsys.readouterr().out and foreseen.value.found is None
    with pytest.raises(RejectRateError, match="12 of 12") as refused:
        sana_pipe.stages.encode.run(config, data=str(source))
    assert str(refused.value.found).count("no caption") == 1
    assert re.search(r"12 +\.tags file", str(refused.value.found)), "what is beside the pictures is named"
    assert capsys.readouterr().out == "", "the reasons are said once"
    assert "--set data.caption" in str(refused.value.fix) and "--set data.caption" in str(foreseen.value.fix)
    assert Cache(config.cache).sources() == []
    assert len(reasons(config, source)) == 12


def test_a_run_says_what_is_new_and_one_with_nothing_to_do_is_a_line(
    start: Config, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture(source / "more.png", 1)
    done = sana_pipe.stages.encode.run(start, data=str(source))
    said = capsys.readouterr().out
    assert "pictures: 1 new, 12 reused, 0 missing" in said and "captions: 1 new, 13 reused" in said
    assert (done["new"], done["reused"]) == ({"images": 1, "captions": 1}, {"images": 12, "captions": 13})
    no_models(monkeypatch)
    planned: list[object] = []
    real = sana_pipe.stages.encode.planning.plan_images
    monkeypatch.setattr(
        sana_pipe.stages.encode.planning, "plan_images", lambda *args: planned.append(args) or real(*args)
    )
    done = sana_pipe.stages.encode.run(start, data=str(source))
    [line] = capsys.readouterr().out.splitlines()
    assert "0 new, 13 reused" in line and "nothing to do" in line
    assert len(planned) == 1
    assert (done["images"], done["captions"]) == (0, 0)
    (source / "more.png").unlink()
    assert sana_pipe.stages.encode.run(start, data=str(source))["missing"] == 1
    assert "1 missing" in capsys.readouterr().out


def test_records_of_a_lost_shard_are_new_to_a_run(start: Config, source: Path) -> None:
    cache = Cache(start.cache)
    shard = next(cache.files.path("shards").glob("latent-*/*/*.tar"))
    result = index.commits(cache.files, shard.parts[-3], 0)
    [records] = [commit.records for commit in result if commit.shard == shard.stem]
    shard.unlink()
    done = sana_pipe.stages.encode.run(start, data=str(source))
    assert (done["images"], done["new"]["images"], done["reused"]["images"]) == (records, records, 12 - records)


def test_no_limit_of_memory_changes_a_list_of_rejects(
    start: Config, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.png", "a/b.png", "a.png", "a-b.png", "z.png", "c.jpg", "d.jpg"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"no picture")
    before = sana_pipe.stages.encode.run(start, data=str(source))["rejects"]
    report = Path(start.cache) / "reports" / f"rejects-{source.name}.csv"
    whole, snapshot = report.read_bytes(), sana_pipe.stages.bucket.run(start)
    rows = list(csv.reader(io.StringIO(whole.decode())))[1:]
    assert len(rows) == before == 7 and rows == sorted(rows)
    lower_limits(monkeypatch)
    report.unlink()
    assert sana_pipe.stages.encode.run(start, data=str(source))["rejects"] == before
    assert report.read_bytes() == whole and sana_pipe.stages.bucket.run(start) == snapshot
    strict = start.model_copy(update={"encode": start.encode.model_copy(update={"max_reject_rate": 0.1})})
    report.unlink()
    with pytest.raises(RejectRateError, match="7 of 19"):
        sana_pipe.stages.encode.run(strict, data=str(source))
    assert report.read_bytes() == whole


def test_a_list_of_rejects_holds_no_formula(start: Config, source: Path) -> None:
    (source / "=cmd|calc.png").write_bytes(b"no picture")
    sana_pipe.stages.encode.run(start, data=str(source))
    assert set(reasons(start, source)) == {"'=cmd|calc.png"}


def test_a_picture_that_vanishes_is_planned_again(start: Config, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(source / "late.png", 9)
    data = (source / "late.png").read_bytes()
    real = sana_pipe.stages.encode.planning.plan_images

    def vanish(*args: object) -> object:
        plans = real(*args)  # type: ignore[arg-type]
        (source / "late.png").unlink()
        return plans

    monkeypatch.setattr(sana_pipe.stages.encode.planning, "plan_images", vanish)
    assert sana_pipe.stages.encode.run(start, data=str(source))["images"] == 0
    monkeypatch.undo()
    (source / "late.png").write_bytes(data)
    assert sana_pipe.stages.encode.run(start, data=str(source))["images"] == 1


def test_pictures_renamed_after_a_killed_run_are_encoded_by_the_next(
    start: Config, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed run's plan names the old paths; its units look there first."""
    for seed in (1, 2):
        picture(source / f"before-{seed}.png", seed)
    shutil.copy(source / "before-1.png", source / "twin.png")
    (source / "twin.txt").write_text("a twin")

    class Killed(BaseException):
        pass

    def die(*args: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(encoders.LatentEncoder, "load", die)
        with pytest.raises(Killed):
            sana_pipe.stages.encode.run(start, data=str(source))
    picture(source / "before-1.png", 3)  # another picture under the planned name of the twins
    for suffix in ("png", "txt"):
        (source / f"before-2.{suffix}").rename(source / f"after-2.{suffix}")
    done = sana_pipe.stages.encode.run(start, data=str(source))
    assert (done["images"], done["rejects"], done["left"]) == (3, 0, 0)
    sana_pipe.stages.bucket.run(start)
    assert len(Cache(start.cache).open_snapshot()) == 15
    assert sana_pipe.stages.encode.run(start, data=str(source))["images"] == 0


def test_pictures_that_moved_inside_a_tar_after_a_killed_run_are_encoded_by_the_next(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed run's plan names places of which others have the pictures now."""
    for seed in range(3):
        picture(tmp_path / f"{seed}.png", seed)
    members: Rows = [
        (f"{n}.{kind}", b"said" if kind == "txt" else (tmp_path / f"{n}.png").read_bytes())
        for n in range(3)
        for kind in ("png", "txt")
    ]
    config, tar = make_config(tmp_path), make_tar(tmp_path / "x.tar", members[2:])
    with monkeypatch.context() as patch:
        patch.setattr(encoders.LatentEncoder, "load", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sana_pipe.stages.encode.run(config, data=str(tar))
    make_tar(tar, members)
    done = sana_pipe.stages.encode.run(config, data=str(tar))
    assert (done["images"], done["rejects"], done["left"]) == (3, 0, 0)


def test_claims_of_finished_units_are_swept(start: Config, source: Path) -> None:
    cache = Cache(start.cache)
    for encoding in (encoding.name for kind in ("latent", "text") for encoding in cache.encodings(kind)):
        cache.files.put(layout.Paths.claim(encoding, 0, cache.plan(encoding, 0).units[0].unit), b"{}\n")
    sana_pipe.stages.encode.run(start, data=str(source))
    assert not list(cache.files.walk("claims"))


def test_units_left_of_the_plan_for_renamed_pictures_are_counted(
    start: Config, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker may have the units of both plans."""

    @contextmanager
    def engine(run: object) -> Iterator[sana_pipe.stages.encode.Make]:
        yield lambda todo, noun: sana_pipe.stages.encode.Made(2, 3, {})

    picture(source / "new.png", 1)
    monkeypatch.setitem(sana_pipe.stages.encode.ENGINES, "local", engine)
    monkeypatch.setattr(
        sana_pipe.stages.encode.planning, "retryable_at_another_place", lambda cache, encoding, work_of: work_of([])
    )
    done = sana_pipe.stages.encode.run(start, data=str(source))
    assert (done["captions"], done["images"], done["left"]) == (2, 4, 9)


def test_non_finite_output_is_rejected_never_stored(
    start: Config, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        picture(source / f"more-{seed}.png", seed)
    poisoned = np.array(Image.open(source / "more-1.png"))
    real = encoders.LatentEncoder.encode

    def encode(self: encoders.LatentEncoder, images: np.ndarray) -> np.ndarray:
        bad = [i for i, image in enumerate(images) if abs(image.mean() - poisoned.mean()) < 1.0]
        if bad:
            raise NonFiniteOutputError("image encoder", bad, "fp32")
        return real(self, images)

    monkeypatch.setattr(encoders.LatentEncoder, "encode", encode)
    done = sana_pipe.stages.encode.run(start, data=str(source))
    assert (done["images"], done["rejects"]) == (2, 1)


def test_another_data_set_under_a_known_name_is_refused(start: Config, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "photos"
    other.mkdir(parents=True)
    picture(other / "x.png", 1)
    with pytest.raises(UserError, match="--source-name"):
        sana_pipe.stages.encode.run(start, data=str(other))
    assert sana_pipe.stages.encode.run(start, data=str(other), source_name="others")["images"] == 1
    sana_pipe.stages.bucket.run(start)
    assert len(Cache(start.cache).open_snapshot()) == 13


# ---------------------------------------------------------------- sharing and publication


def test_two_tasks_make_the_same_cache_as_one(
    source: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, unit_sizes(2, 3))
    one = make_config(tmp_path / "one")
    sana_pipe.stages.encode.run(one, data=str(source))
    two = make_config(tmp_path / "two")
    first, second = (sana_pipe.stages.encode.run(two, data=str(source), task_index=i, task_count=2) for i in (1, 0))
    assert (first["images"], first["left"]) == (12, 0), "what nobody is at belongs to whoever is there"
    assert (second["images"], second["left"]) == (0, 0)
    assert files(Path(one.cache)) == files(Path(two.cache))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "step", [pytest.param(7, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "every"]
)
def test_killed_at_any_write_the_next_run_finishes_the_same_cache(
    step: int, source: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every publication of a run in turn is the one at which the process dies; or every seventh, from a random one.
    The run that is killed and the next one have every limit lowered, the run that they are compared with has none."""
    set_constants(monkeypatch, unit_sizes(3, 6))
    from sana_pipe.data.cache.folder_store import FolderStore

    whole = make_config(tmp_path / "whole")
    sana_pipe.stages.encode.run(whole, data=str(source))
    truth = files(Path(whole.cache))
    lower_limits(monkeypatch)

    class Killed(BaseException):
        pass

    real, count = FolderStore.create, 0

    def publish(self: FolderStore, name: str, data: bytes | Path) -> bool:
        nonlocal count
        count -= 1
        if count == 0:
            raise Killed
        return real(self, name, data)

    monkeypatch.setattr(FolderStore, "create", publish)
    originals = encoders.LatentEncoder.load, TextEncoder.load
    loaded = {
        kind: load(section, "cpu")
        for kind, load, section in (("latent", originals[0], whole.vae), ("text", originals[1], whole.text))
    }
    monkeypatch.setattr(encoders.LatentEncoder, "load", lambda *a: loaded["latent"])
    monkeypatch.setattr(TextEncoder, "load", lambda *a: loaded["text"])
    kills = 0
    first = random.randint(1, step)
    for instant in range(first, 200, step):
        folder = tmp_path / f"killed-{instant}"
        config = make_config(folder)
        count = instant
        try:
            sana_pipe.stages.encode.run(config, data=str(source))
        except Killed:
            kills += 1
        else:
            break
        count = 0
        sana_pipe.stages.encode.run(config, data=str(source))
        assert files(Path(config.cache)) == truth, f"killed at publication {instant}"
        shutil.rmtree(folder)
    assert kills > 15 / step


def test_a_cache_moves_and_its_sources_may_be_away(
    start: Config, source: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    from sana_pipe.data.loader.loader import Loader

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(start.cache, elsewhere / "cache")
    away = tmp_path / "away"
    shutil.move(source, away)
    config = make_config(elsewhere)
    sana_pipe.stages.bucket.run(config)
    loader = Loader(
        Cache(config.cache).open_snapshot(),
        loader_settings(caption_drop=0.1, stop_step=4),
    )
    assert sum(len(batch.sample_ids) for batches, _ in loader for batch in batches) == 48
    shutil.move(away, source)
    picture(source / "new.png", 77)
    assert sana_pipe.stages.encode.run(config, data=str(source))["images"] == 1


def test_a_later_scan_without_new_bytes_is_quick(start: Config, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sana_pipe.stages.encode.run(start, data=str(source))
    reads = []
    real = FolderSource.read
    monkeypatch.setattr(FolderSource, "read", lambda self, key: reads.append(key) or real(self, key))
    began = time.monotonic()
    sana_pipe.stages.encode.run(start, data=str(source))
    assert not reads, "unchanged files were read again"
    assert time.monotonic() - began < 60


def test_bucketing_again_makes_no_new_snapshot(start: Config, source: Path) -> None:
    first = sana_pipe.stages.bucket.run(start)
    before = files(Path(start.cache))
    assert sana_pipe.stages.bucket.run(start) == first
    assert files(Path(start.cache)) == before
    picture(source / "new.png", 5)
    sana_pipe.stages.encode.run(start, data=str(source))
    second = sana_pipe.stages.bucket.run(start, name="more")
    assert second != first
    assert Cache(start.cache).open_snapshot("more").head.parent is None
    assert Cache(start.cache).open_snapshot(first[:10]).id == first
    assert sana_pipe.stages.bucket.run(start) == second


def test_only_the_commit_makes_a_shard_visible(start: Config) -> None:
    cache = Cache(start.cache)
    encoding = cache.encodings("latent")[0].name
    units = cache.files.path(f"units/{encoding}/00000000")
    cache.files.remove(layout.Paths.segment(encoding, 0))
    assert len(cache.index(encoding)) == 12
    victim = next(units.glob("*/*.json"))
    lost = index.Commit.from_body(layout.unseal(victim.read_bytes(), "x")).records
    cache.files.remove(victim.relative_to(cache.files.root).as_posix())
    assert len(cache.index(encoding)) == 12 - lost


@pytest.mark.parametrize("setting", [pytest.param("vae.dtype=bf16", marks=pytest.mark.slow), "vae.dtype=tf32"])
def test_another_arithmetic_of_the_vae_prints_its_error_and_is_another_encoding(
    start: Config,
    source: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
) -> None:
    plain, other = make_config(tmp_path / "plain"), make_config(tmp_path / "other", setting)
    sana_pipe.stages.encode.run(plain, data=str(source))
    assert "relative L2" not in capsys.readouterr().out
    loads, load = [], encoders.LatentEncoder.load

    def counted(config: Any, device: Any) -> encoders.LatentEncoder:
        alive = [one for one in gc.get_objects() if type(one) is encoders.LatentEncoder]
        assert not alive, "one encoder at a time"
        loads.append(config.dtype == "fp32")
        return load(config, device)

    monkeypatch.setattr(encoders.LatentEncoder, "load", counted)
    sana_pipe.stages.encode.run(other, data=str(source))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "relative L2" in line)
    percent = float(line.partition("fp32 by ")[2].partition(" %")[0])
    assert (0.01 < percent < 5) if setting == "vae.dtype=bf16" else percent < 0.2
    assert loads[:2] == [False, True] and not any(loads[2:])
    names = [Cache(config.cache).encodings("latent")[0].name for config in (plain, other)]
    assert names[0] != names[1]
    sana_pipe.stages.encode.run(other, data=str(source))
    assert "relative L2" not in capsys.readouterr().out, "nothing new to encode"


def test_a_gpu_without_memory_for_fp32_encodes_in_bf16_all_the_same(
    source: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = encoders.LatentEncoder.load

    def cramped(config: Any, device: Any) -> encoders.LatentEncoder:
        if config.dtype == "fp32":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load(config, device)

    monkeypatch.setattr(encoders.LatentEncoder, "load", cramped)
    done = sana_pipe.stages.encode.run(make_config(tmp_path, "vae.dtype=bf16"), data=str(source))
    assert done["images"] == 12 and done["left"] == 0
    assert "not compared with fp32" in capsys.readouterr().out


def test_out_of_memory_halves_the_batch_and_says_so(
    start: Config, source: Path, monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig, tmp_path: Path
) -> None:
    from sana_pipe.data.loader.loader import bf16

    for seed in range(4):
        picture(source / f"more-{seed}.png", seed)
    whole = make_config(tmp_path / "whole")
    sana_pipe.stages.encode.run(whole, data=str(source))
    real, sizes = encoders.LatentEncoder.encode, []

    def encode(self: encoders.LatentEncoder, images: np.ndarray) -> np.ndarray:
        sizes.append(len(images))
        if len(images) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, images)

    monkeypatch.setattr(encoders.LatentEncoder, "encode", encode)
    small = make_config(tmp_path / "small")
    assert sana_pipe.stages.encode.run(small, data=str(source))["images"] == 16
    assert max(sizes) == 4
    cache, truth = Cache(small.cache), Cache(whole.cache)
    encoding = cache.encodings("latent")[0].name
    result = index.commits(cache.files, encoding, 0)
    assert all(commit.provenance["halved_batches"] > 0 for commit in result if commit.records > 1)
    for ours, theirs in zip(result, index.commits(truth.files, encoding, 0), strict=True):
        one, two = (
            [
                bf16(audit.payload(shard.ShardReader(c.files, encoding), encoding, commit.shard or "", row)).float()
                for row in audit.record_rows(c, commit)
            ]
            for c, commit in ((cache, ours), (truth, theirs))
        )
        assert all(float((a - b).norm() / b.norm()) < 1e-2 for a, b in zip(one, two, strict=True))
    assert not any("halved_batches" in c.provenance for c in index.commits(truth.files, encoding, 0))

    monkeypatch.setattr(
        encoders.LatentEncoder, "encode", lambda self, images: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA"))
    )
    with pytest.raises(UserError, match=naming("data.resolution")):
        sana_pipe.stages.encode.run(make_config(tmp_path / "none"), data=str(source))
    monkeypatch.setattr(encoders.LatentEncoder, "encode", real)
    after = make_config(tmp_path / "after")
    sana_pipe.stages.encode.run(after, data=str(source))
    commits = index.commits(Cache(after.cache).files, encoding, 0)
    assert commits and not any("halved_batches" in commit.provenance for commit in commits), "those of another run"


def test_a_unit_that_fits_after_a_halved_one_counts_no_halving(
    source: Path, monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig, tmp_path: Path
) -> None:
    real, shapes = encoders.LatentEncoder.encode, []

    def encode(self: encoders.LatentEncoder, images: np.ndarray) -> np.ndarray:
        shapes.append(np.shape(images)[1:])
        if len(images) > 1 and shapes[-1] == shapes[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, images)

    monkeypatch.setattr(encoders.LatentEncoder, "encode", encode)
    config = make_config(tmp_path)
    sana_pipe.stages.encode.run(config, data=str(source))
    cache = Cache(config.cache)
    result = index.commits(cache.files, cache.encodings("latent")[0].name, 0)
    halved = [commit.provenance["halved_batches"] for commit in result if "halved_batches" in commit.provenance]
    assert len(set(shapes)) > 1 and halved, "other shapes fit"
    assert len(result) - len(halved) == len(set(shapes)) - 1


def test_a_name_that_no_source_can_have_is_refused_before_anything_is_read(
    make_config: MakeConfig, photos: Path, tmp_path: Path
) -> None:
    for name in ("my pictures", "..", "a/b"):
        with pytest.raises(UserError, match=naming(repr(name))):
            sana_pipe.stages.encode.run(make_config(tmp_path), data=str(photos), source_name=name)
        with pytest.raises(UserError, match=naming(repr(name))):
            sana_pipe.stages.encode.dry_run(make_config(tmp_path), data=str(photos), source_name=name, probe=False)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_is_a_file_is_reported(make_config: MakeConfig, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError):
        sana_pipe.stages.encode.run(make_config(tmp_path, f"cache={tmp_path / 'file'}"), data=str(photos))
