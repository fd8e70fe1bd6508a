"""Prompt sets: encoded like captions and never twice, opened by name, encoding or id, whole after gc and repair."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sana_pipe.stages.encode
import sana_pipe.stages.forget
import sana_pipe.stages.gc
import sana_pipe.stages.status
import sana_pipe.stages.verify
from sana_pipe.base import hub
from sana_pipe.base.config import Weights
from sana_pipe.base.errors import CacheError, IntegrityError, UserError
from sana_pipe.config import Config, load
from sana_pipe.data.cache import audit, layout, prompts
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.contradictions import contradictions
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.status import status
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.encoding import prompts as prompt_lists
from sana_pipe.data.encoding import unit_encoder, unit_records
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.sources import caption_rules
from tests.support import tiny_cache
from tests.support.messages import naming
from tests.support.packed import pack

MakeConfig = Callable[..., Config]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeff# for pictures\n\n  A red cube \r\na lighthouse\u2028at sea\n", encoding="utf-8")
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Cache, TextEncoding, list[bytes]]:
    """A cache without models, its text encoding and the keys of its captions."""
    cache = tiny_cache.build(tmp_path / "tiny", {(16, 16): 6})
    encoding = tiny_cache.encodings()[1]
    keys = [key.tobytes() for key in cache.index(encoding.name).keys]
    return cache, encoding, [key for key in keys if key != encoding.null_key]


def encoding_of(cache: Cache) -> TextEncoding:
    (encoding,) = cache.encodings("text")
    assert isinstance(encoding, TextEncoding)
    return encoding


def refuse(*args: object) -> None:
    raise AssertionError("a model was loaded that this needs not")


# ---------------------------------------------------------------- encode


def test_a_home_folder_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "~nosuchuser/x"
    calls: list[Callable[[], object]] = [
        lambda: prompt_lists.read(f"{place}.txt", 60.0),
        lambda: Files("memory://home", MirrorConfig(path=place)),
        lambda: hub.resolve(Weights(id=place)),
        lambda: hub.is_file(Weights(id=place)),
        lambda: hub.is_local(Weights(id=place)),
        lambda: load("tiny", [f"model.weights={place}"]),
    ]
    for call in calls:
        with pytest.raises(UserError, match=naming(place)):
            call()
    monkeypatch.setattr(os.path, "expanduser", str)
    with pytest.raises(UserError, match=naming("HOME")):
        Files("memory://home", MirrorConfig())


def test_prompts_alone_are_encoded_once_and_without_the_vae(
    make_config: MakeConfig, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    monkeypatch.setattr(encoders.LatentEncoder, "load", refuse)
    monkeypatch.setattr(encoders, "describe_vae", refuse)
    done = sana_pipe.stages.encode.run(config, None, prompts=str(file))
    assert (done["captions"], done["left"], done["prompts"]["new"]) == (3, 0, 3), "two prompts and the null record"
    cache = Cache(config.cache)
    assert cache.encodings("latent") == []
    encoding = encoding_of(cache)
    opened = prompts.open_prompts(cache, None, encoding)
    assert opened.texts == ("A red cube", "a lighthouse\u2028at sea") and opened.id == done["prompts"]["id"]

    encoder = TextEncoder.load(config.text, unit_encoder.device(config.encode.device))
    direct = encoder.encode([caption_rules.normalise(text, encoding.normalisation) for text in opened.texts])
    for number, rows in enumerate(direct):
        assert opened.rows(number).tobytes() == rows.tobytes() and opened.rows(number).shape == rows.shape
    rows, mask = opened.null()
    null, valid = encoder.null()
    assert rows.tobytes() == null.tobytes() and mask.sum() == valid and mask[:valid].all()
    del encoder

    monkeypatch.setattr(TextEncoder, "load", refuse)
    before = sorted(cache.root.rglob("*"))
    cache.files.path(layout.Paths.copy(layout.Paths.encoding(encoding.name))).unlink()
    assert sana_pipe.stages.encode.run(config, None, prompts=str(file))["prompts"]["new"] == 0
    assert sorted(cache.root.rglob("*")) == before, "nothing was appended, and the lost copy is back"
    assert sana_pipe.stages.status.run(config) == 0 and sana_pipe.stages.verify.run(config) == 0


def test_with_a_source_a_prompt_that_is_a_caption_is_not_encoded_again(
    small_cache_copy: Path, make_config: MakeConfig, photos: Path, tmp_path: Path, file: Path
) -> None:
    config = make_config(tmp_path)
    caption = next(photos.glob("*.txt")).read_text()
    file.write_text(f"{caption.strip().upper()}\na red cube\n")
    done = sana_pipe.stages.encode.run(config, str(photos), prompts=str(file))
    assert (done["captions"], done["images"], done["prompts"]["new"]) == (1, 0, 1)
    cache = Cache(config.cache)
    snapshot = cache.open_snapshot()
    opened = prompts.open_prompts(cache, "prompts", snapshot.encoding(TextEncoding))
    assert opened.null()[1].sum() == snapshot.null.valid, "the same null record"
    assert opened.texts[0] == caption.strip().upper()


def test_a_caption_prefix_gives_prompts_with_the_trigger_word(
    small_cache_copy: Path, make_config: MakeConfig, photos: Path, tmp_path: Path, file: Path
) -> None:
    config = make_config(tmp_path, "data.caption_prefix=sks dog, ")
    done = sana_pipe.stages.encode.run(config, str(photos), prompts=str(file))
    assert done["prompts"]["name"] == "prompts" and prompts.names(Cache(config.cache)) == ["prompts"]
    done = sana_pipe.stages.encode.run(config, str(photos))
    made = prompts.open_prompts(Cache(config.cache), prompts.TRIGGER, encoding_of(Cache(config.cache)))
    assert done["prompts"] == {"name": "trigger", "id": made.id, "prompts": 4, "new": 0}, "were added to the others"
    assert made.texts == tuple(context.format("sks dog") for context in prompts.TRIGGER_CONTEXTS)


def test_captions_of_a_packed_snapshot_are_prompts_too(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "tiny", {(16, 16): 6})
    plain = cache.open_snapshot()
    for opened in (plain, pack(cache)):
        made = prompts.of_snapshot(opened, 3)
        assert len(made) == 3 and made.null()[1].any()
        reader = opened.reader("text")
        for number, text in enumerate(made.texts):
            row = next(row for row in range(len(opened)) if text in opened.captions(row, reader))
            place = opened.sample(row).captions[opened.captions(row, reader).index(text)]
            assert made.rows(number).shape == (place.rows, opened.encoding(TextEncoding).width)


def test_prompts_do_not_change_the_units_of_the_captions(
    small_cache: Path, make_config: MakeConfig, photos: Path, tmp_path: Path, file: Path
) -> None:
    config = make_config(tmp_path)
    sana_pipe.stages.encode.run(config, str(photos), prompts=str(file))
    ours, theirs = (Cache(root).plans(encoding_of(Cache(root)).name)[0] for root in (config.cache, small_cache))
    assert ours == theirs


def test_the_text_encoder_is_loaded_once_for_captions_and_prompts(
    make_config: MakeConfig, photos: Path, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    for of in (TextEncoder, encoders.LatentEncoder):
        real = of.load
        monkeypatch.setattr(of, "load", lambda *args, of=of, real=real: loads.append(of.__name__) or real(*args))
    sana_pipe.stages.encode.run(make_config(tmp_path), str(photos), prompts=str(file))
    assert loads == ["TextEncoder", "LatentEncoder"]


def test_a_prompt_that_cannot_be_encoded_leaves_the_set_as_it_was(
    make_config: MakeConfig, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    sana_pipe.stages.encode.run(config, None, prompts=str(file))
    file.write_text("a blue cube\n")
    monkeypatch.setattr(unit_records, "encode_finite", lambda inputs, encode, limits: [None] * len(inputs))
    with pytest.raises(UserError, match="a blue cube: "):
        sana_pipe.stages.encode.run(config, None, prompts=str(file))
    cache = Cache(config.cache)
    assert prompts.open_prompts(cache, None, encoding_of(cache)).texts[0] == "A red cube"


def test_other_workers_finish_and_publish(
    make_config: MakeConfig, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            sana_pipe.stages.encode, "make_units", lambda encoder, todo, *rest: (0, len(todo))
        )  # all are claimed
        done = sana_pipe.stages.encode.run(config, None, prompts=str(file), task_index=0, task_count=2)
    assert done["left"] and done["prompts"]["id"] is None
    with pytest.raises(CacheError, match=naming(Cache(config.cache).location, "--prompts")):
        prompts.open_prompts(Cache(config.cache), None, encoding_of(Cache(config.cache)))
    assert sana_pipe.stages.encode.run(config, None, prompts=str(file), task_index=1, task_count=2)["prompts"]["id"]


# ---------------------------------------------------------------- files of prompts


def test_repeated_prompts_are_reported_and_drawn_once() -> None:
    encoding = TextEncoding()
    made, repeated = prompt_lists.of([(1, "A cat"), (4, "a dog"), (7, "a CAT")], encoding)
    assert made.texts == ("A cat", "a dog") and len(made.work) == 3
    (line,) = repeated
    assert "7" in line and "1" in line
    assert not prompt_lists.of([(1, "A cat"), (7, "a CAT")], replace(encoding, normalisation="nvlabs"))[1]


def test_a_json_list_is_a_prompt_an_entry(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(["a cat", "two\nlines", "# no remark"]))
    assert prompt_lists.read(str(tmp_path / "p.json"), 60.0) == [(1, "a cat"), (2, "two\nlines"), (3, "# no remark")]
    for data in ("[1]", '{"a": "b"}', "[", "[]"):
        (tmp_path / "p.json").write_text(data)
        with pytest.raises(UserError, match=r"p\.json"):
            prompt_lists.read(str(tmp_path / "p.json"), 60.0)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (b"a cat\n\xff\n", "line 2"),
        (b"# none\n\n", r"no prompt(.|\n)*remove the file"),
        (b"\n<!DOCTYPE html>\n<p>a cat</p>\n", "web page"),
        (None, "read"),
    ],
)
def test_a_file_without_prompts_is_refused_before_a_model_is_read(
    data: bytes | None, names: str, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextEncoding, "wanted", refuse)
    if data is not None:
        (tmp_path / "bad.txt").write_bytes(data)
    with pytest.raises(UserError, match=r"bad\.txt.*" + names):
        sana_pipe.stages.encode.run(make_config(tmp_path), None, prompts=str(tmp_path / "bad.txt"))
    assert not (tmp_path / "cache").exists()


def test_five_prompts_are_shipped() -> None:
    made, repeated = prompt_lists.of(prompt_lists.read("default", 0), TextEncoding())
    assert len(made.texts) == 5 and not repeated


# ---------------------------------------------------------------- sets


def test_sets_are_opened_by_name_encoding_and_id(tiny: tuple[Cache, TextEncoding, list[bytes]]) -> None:
    cache, encoding, keys = tiny
    with pytest.raises(CacheError, match="--prompts FILE"):
        prompts.open_prompts(cache, None, encoding)
    first = prompts.publish(cache, "prompts", encoding, ["one"], keys[:1])
    second = prompts.publish(cache, "prompts", encoding, ["two", "three"], keys[1:3])
    other = prompts.publish(cache, "others", encoding, ["one"], keys[:1])
    assert first and second and other and first.id == other.id != second.id
    assert prompts.open_prompts(cache, None, encoding) == second
    assert prompts.open_prompts(cache, first.id, encoding).texts == ("one",)
    assert prompts.publish(cache, "prompts", encoding, ["two", "three"], keys[1:3]) == second
    assert [known.path for known in prompts.current(cache)] == [other.path, second.path]
    assert prompts.publish(cache, "prompts", encoding, ["none"], [bytes(16)]) is None, "a record is not there"
    with pytest.raises(CacheError) as refused:
        prompts.open_prompts(cache, None, replace(encoding, max_length=8))
    assert "max_length: 8 | 9" in str(refused.value.found)
    assert status(cache)["prompts"]["prompts"] == {"id": second.id, "prompts": 2, "text": encoding.name}
    with pytest.raises(UserError, match=naming("'../x'")):
        prompts.publish(cache, "../x", encoding, ["one"], keys[:1])


def test_a_forgotten_set_is_missing_and_comes_back(tiny: tuple[Cache, TextEncoding, list[bytes]]) -> None:
    cache, encoding, keys = tiny
    made = prompts.publish(cache, "prompts", encoding, ["one"], keys[:1])
    prompts.forget(cache, "prompts")
    assert prompts.names(cache) == [] and not list(prompts.current(cache)) and status(cache)["prompts"] == {}
    for wanted in (None, made and made.id):
        with pytest.raises(CacheError):
            prompts.open_prompts(cache, wanted, encoding)
    with pytest.raises(CacheError):
        prompts.forget(cache, "prompts")
    assert not list(audit.verify(cache))
    prompts.publish(cache, "prompts", encoding, ["one"], keys[:1])
    assert prompts.open_prompts(cache, None, encoding).texts == ("one",)


def test_a_set_in_the_place_of_another_is_damage(tiny: tuple[Cache, TextEncoding, list[bytes]]) -> None:
    cache, encoding, keys = tiny
    for name, key in (("a", keys[0]), ("b", keys[1])):
        prompts.publish(cache, name, encoding, [name], [key])
    data = cache.files.read("prompts/a/00000000.json")
    for place in ("prompts/b/00000000.json", "copies/prompts/b/00000000.json"):
        cache.files.replace(place, data)
    with pytest.raises(IntegrityError):
        prompts.open_prompts(cache, "b", encoding)
    assert "prompts/b/00000000.json" in {finding.path for finding in audit.verify(cache)}
    assert "prompts/b" in status(cache)["damaged"]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_wrong_byte_of_a_set_is_an_error_that_names_it_and_is_repaired(
    small_cache_copy: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    cache = Cache(config.cache)
    encoding, key = encoding_of(cache), cache.index(encoding_of(cache).name).keys[0].tobytes()
    opened = prompts.publish(cache, "prompts", encoding, ["one"], [key])
    assert opened is not None
    rows = opened.rows(0)
    table = layout.Paths.table(cache.files.document(opened.path)["rows"], "arrow")
    damage(cache.root / table)
    with pytest.raises(IntegrityError, match=naming(table)):
        prompts.open_prompts(cache, None, encoding).rows(0)
    assert table in [finding.path for finding in audit.verify(cache)]
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert np.array_equal(prompts.open_prompts(cache, None, encoding).rows(0), rows)


def test_a_set_that_is_lost_with_its_copy_is_made_again_by_encode(
    make_config: MakeConfig, tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path)
    sana_pipe.stages.encode.run(config, None, prompts=str(file))
    cache = Cache(config.cache)
    opened = prompts.open_prompts(cache, None, encoding_of(cache))
    rows, table = opened.rows(1), layout.Paths.table(cache.files.document(opened.path)["rows"], "arrow")
    for name in (table, layout.Paths.copy(table)):
        (cache.root / name).unlink()
    assert sana_pipe.stages.verify.run(config, repair=True) != 0
    assert "sana-pipe encode --prompts FILE" in capsys.readouterr().out
    assert sana_pipe.stages.encode.run(config, None, prompts=str(file))["prompts"]["new"] == 0
    assert sana_pipe.stages.verify.run(config) == 0
    assert np.array_equal(prompts.open_prompts(cache, None, opened.encoding).rows(1), rows)


def test_a_lost_number_is_a_contradiction_and_filled(
    small_cache_copy: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    cache = Cache(config.cache)
    encoding, keys = encoding_of(cache), [key.tobytes() for key in cache.index(encoding_of(cache).name).keys[:2]]
    for number in range(2):
        prompts.publish(cache, "prompts", encoding, [str(number)], [keys[number]])
    for name in ("prompts/prompts/00000000.json", "copies/prompts/prompts/00000000.json"):
        (cache.root / name).unlink()
    assert [finding.path for finding in contradictions(cache)] == ["prompts/prompts"]
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert prompts.open_prompts(cache, None, encoding).texts == ("1",)


# ---------------------------------------------------------------- gc, repair


def test_gc_leaves_the_records_of_prompts(
    make_config: MakeConfig, photos: Path, tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path)
    sana_pipe.stages.encode.run(config, str(photos), prompts=str(file))
    cache = Cache(config.cache)
    before = prompts.open_prompts(cache, None, encoding_of(cache))
    rows = [before.rows(number) for number in range(len(before))]
    sana_pipe.stages.forget.run(config, source=cache.sources()[0])
    for path in cache.root.rglob("*"):
        os.utime(path, (1, 1))
    sana_pipe.stages.gc.run(config, yes=True, older_than_hours=0)
    after = prompts.open_prompts(Cache(config.cache), None, before.encoding)
    assert all(np.array_equal(after.rows(number), rows[number]) for number in range(len(rows)))
    assert after.null()[1].any() and sana_pipe.stages.verify.run(config) == 0


@pytest.mark.parametrize("flags", ["--n blurry --w 64 --h 80 --d 42 --l 7.5 --s 28", "--ar 16:9", "--seed 3", "--w=64"])
def test_options_of_other_programs_are_no_words_of_a_prompt(flags: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    for name, text in (("prompts.txt", f"a dog\na cat {flags}\n"), ("prompts.json", json.dumps([f"a cat {flags}"]))):
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(UserError, match=naming(name, flags.split("=")[0].split()[0])):
            prompt_lists.read(str(file), 1.0)
    file.write_text(json.dumps(["a cat -- a dog", "a well--known cat", "a cat --exactly so", "cat -n"]))
    assert len(prompt_lists.read(str(file), 1.0)) == 4
