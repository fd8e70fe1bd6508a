"""Text encoders of other kinds than Sana's: their rows are those of their pipelines in diffusers."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.hub import ModelError
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoders.config import TextConfig
from sana_pipe.data.encoders.frozen import from_bits
from sana_pipe.data.encoders.text import TextEncoder, count_rows, describe_text, relative_error
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.sources import caption_rules as rules
from sana_pipe.data.sources import prx_cleaning
from tests.support import tiny_models
from tests.support.constants import set_constants, unit_sizes
from tests.support.messages import naming

CAPTIONS = [
    "a red circle",
    "",
    "A sign that says \"OPEN\" -- and it's 'new'",
    "日本の猫、桜の下で眠る",
    "  émile's café  ",
    "line one\nline two",
    "two small dogs run through green grass by the sea at night " * 60,  # cut
    "<|im_end|>",
]
Make = Callable[..., Config]


@pytest.fixture(scope="session")
def qwen3(made_once: Callable[..., Path]) -> Path:
    return made_once("qwen3", tiny_models.build_qwen3)


@pytest.fixture(scope="session")
def t5gemma(made_once: Callable[..., Path]) -> Path:
    return made_once("t5gemma", tiny_models.build_t5gemma)


def encoder(folder: Path, **options: Any) -> TextEncoder:
    return TextEncoder.load(TextConfig(id=str(folder), **{"dtype": "fp32", **options}), "cpu")


@torch.inference_mode()
def rows(one: TextEncoder, captions: list[str]) -> list[torch.Tensor]:
    """Before they are rounded."""
    normalised = [rules.normalise(caption, one.kind.normalisations["diffusers"]) for caption in captions]
    return one.run(one.token_ids(normalised)[0])


@torch.no_grad()
def of_z_image(folder: Path, captions: list[str], dtype: torch.dtype = torch.float32, length: int = 512) -> Any:
    """(rows of captions, rows of the empty caption), as ZImagePipeline computes them."""
    from diffusers import ZImagePipeline
    from transformers import AutoTokenizer, Qwen3Model

    model = Qwen3Model.from_pretrained(folder / "text_encoder", dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pipe = ZImagePipeline(None, None, model, tokenizer, None)
    rows, empty = pipe.encode_prompt(list(captions), device="cpu", max_sequence_length=length)
    return rows, empty[0]


class Ftfy:
    """In place of ftfy, which is not installed: the rules of it that are implemented here."""

    fix_text = staticmethod(prx_cleaning.repaired)


@torch.no_grad()
def of_prx(folder: Path, captions: list[str], dtype: torch.dtype = torch.float32, length: int | None = None) -> Any:
    """(rows of captions, rows of the empty caption), as PRXPipeline computes them, without padding."""
    from diffusers.pipelines.prx import pipeline_prx
    from transformers import AutoTokenizer
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    if not hasattr(pipeline_prx, "ftfy"):
        pipeline_prx.ftfy = Ftfy
    model = T5GemmaEncoder.from_pretrained(folder / "text_encoder", dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pipe = pipeline_prx.PRXPipeline(None, None, model, tokenizer)
    rows, mask, none, of_none = pipe.encode_prompt(list(captions), device="cpu", tokenizer_max_length=length)
    return [each[kept] for each, kept in zip(rows, mask, strict=True)], none[0][of_none[0]]


def steps(mine: np.ndarray, theirs: torch.Tensor) -> float:
    """The largest difference in steps of bf16 (of the larger of the value and a hundredth of the largest)."""
    ours, theirs = from_bits(mine).double(), theirs.double()
    scale = torch.maximum(theirs.abs(), theirs.abs().max() / 100)
    return float(((ours - theirs).abs() / scale).max()) / 2**-7


# ---------------------------------------------------------------- Qwen3


@pytest.mark.parametrize(("mode", "length"), [("auto", 512), ("exact", 24)])
def test_rows_of_qwen3_equal_those_of_z_image(qwen3: Path, mode: Literal["auto", "exact"], length: int) -> None:
    one = encoder(qwen3, mode=mode, max_length=None if length == 512 else length)
    theirs, empty = of_z_image(qwen3, CAPTIONS, length=length)
    mine = rows(one, CAPTIONS)
    assert [len(each) for each in mine] == [len(each) for each in theirs]
    assert max(relative_error(a, b) for a, b in zip(mine, theirs, strict=True)) < 1e-5
    assert len(mine[6]) == length and len({len(each) for each in mine}) > 3
    assert max(steps(a, b) for a, b in zip(one.encode(CAPTIONS), theirs, strict=True)) <= 0.6  # rounding alone
    bits, valid = one.null()
    assert valid == len(bits) == len(empty) and steps(bits, empty) <= 0.6
    assert torch.equal(from_bits(one.encode([""])[0]), from_bits(bits)), "the empty caption is the null record"


def test_the_comparison_notices_another_turn_and_another_layer(qwen3: Path) -> None:
    theirs = of_z_image(qwen3, ["a red circle"])[0]
    one = encoder(qwen3)
    assert relative_error(rows(one, ["a red circle"])[0], theirs[0]) < 1e-5
    one.template = tiny_models.TEMPLATE.replace("<|im_end|>", "")
    assert relative_error(rows(one, ["a red circle"])[0], theirs[0]) > 1e-2
    one = encoder(qwen3)
    one.model.layers = one.model.layers[:-1]  # type: ignore[union-attr, index]
    assert relative_error(rows(one, ["a red circle"])[0], theirs[0]) > 1e-2


def test_rows_of_qwen3_in_bf16(qwen3: Path) -> None:
    one = encoder(qwen3, dtype="bf16", mode="exact", max_length=64)
    theirs = of_z_image(qwen3, CAPTIONS, torch.bfloat16, 64)[0]
    assert max(steps(a, b.float()) for a, b in zip(one.encode(CAPTIONS), theirs, strict=True)) <= 1


# ---------------------------------------------------------------- T5Gemma


@pytest.mark.parametrize(("mode", "length"), [("auto", None), ("exact", 24)])
def test_rows_of_t5gemma_equal_those_of_prx(t5gemma: Path, mode: Literal["auto", "exact"], length: int | None) -> None:
    """The long caption is longer than the sliding window of every other layer."""
    one = encoder(t5gemma, mode=mode, max_length=length)
    theirs, empty = of_prx(t5gemma, CAPTIONS, length=length)
    mine = rows(one, CAPTIONS)
    assert [len(each) for each in mine] == [len(each) for each in theirs]
    assert max(relative_error(a, b) for a, b in zip(mine, theirs, strict=True)) < 1e-5
    assert len(mine[6]) == (length or 256) and len({len(each) for each in mine}) > 3
    bits, valid = one.null()
    assert valid == len(bits) == len(empty) == 1 and steps(bits, empty) <= 0.6


def test_rows_of_t5gemma_in_bf16(t5gemma: Path) -> None:
    one = encoder(t5gemma, dtype="bf16", mode="exact", max_length=64)
    theirs = of_prx(t5gemma, CAPTIONS, torch.bfloat16, 64)[0]
    cleaned = [rules.normalise(caption, "prx") for caption in CAPTIONS]
    assert max(steps(a, b.float()) for a, b in zip(one.encode(cleaned), theirs, strict=True)) <= 1


def test_both_directions_count(t5gemma: Path) -> None:
    one = encoder(t5gemma)
    first, other = (from_bits(bits)[0] for bits in one.encode(["a red circle", "a red house"]))
    assert not torch.equal(first, other), "the first token sees the last"


def test_the_encoder_of_a_whole_t5gemma_is_the_same(t5gemma: Path, tmp_path: Path) -> None:
    """And that in the form that diffusers' pipeline writes it."""
    from transformers import T5GemmaForConditionalGeneration
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    alone, config = encoder(t5gemma), TextConfig(id=str(t5gemma))
    whole = T5GemmaForConditionalGeneration(tiny_models.t5gemma_config(len(alone.tokenizer)))
    whole.model.encoder.load_state_dict(alone.model.state_dict())
    written = T5GemmaEncoder.from_pretrained(t5gemma / "text_encoder")
    for model in (whole, written):
        folder = tmp_path / type(model).__name__
        shutil.copytree(t5gemma / "tokenizer", folder / "tokenizer")
        model.save_pretrained(folder / "text_encoder")
        settings = json.loads((folder / "text_encoder" / "config.json").read_text())
        assert settings["model_type"] == "t5gemma"
        assert describe_text(TextConfig(id=str(folder))) == describe_text(config)
        (bits,) = encoder(folder).encode(["a red circle"])
        assert np.array_equal(bits, alone.encode(["a red circle"])[0])


def test_a_decoder_is_no_text_encoder(t5gemma: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(t5gemma, tmp_path / "copy"))
    set_settings(copy, is_decoder=True)
    with pytest.raises(ModelError, match=naming(copy / "text_encoder", "decoder", "text.id")):
        describe_text(TextConfig(id=str(copy)))
    with pytest.raises(ModelError, match=naming(copy / "text_encoder", "decoder", "text.id")):
        encoder(copy)


PIECES = [
    *("a", "Cat", " ", "  ", "\n", "\t", "http://x.com/a", "www.a.it", "@nick", "日本", "—", "«", "`", "''", '""', "'"),
    *("&quot;", "&amp;", "&amp", "&lt;", "&#39;", "&#x2019;", "192.168.1.1", "1:23 ", "\\n", "#12", "#12345"),
    *("1234567", "img.png", "..", "...", "®", "(", "]", "|", "\\", "/", "*", " . ", "-", "_", "a-b-c-d-e", "ﬁ", "ｌ"),
    *("　", "“", "’", "\u2028", "\x93", "\x1b[31m", "\x07", "e\u0301", "jc6640", "jc6640vc", "6640vc231", "İ", "Σ"),
    *("free shipping", "free download", "click on me", "png images", "page 12", "j2d1a2a", "10x20", " : ", ",x", "."),
    *("<person>", "%20"),
]
SIMPLE = [*(" ".join((word, "")) for word in ("a", "Cat,", "dog's", "Close-up", "house.", "PDFs", "shipping", "sea"))]


def test_cleaning_is_that_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ftfy replaced by its rules (compared with ftfy 6.3.1: equal but where it guesses at an encoding)."""
    import pyarrow as pa
    from diffusers.pipelines.prx import pipeline_prx

    monkeypatch.setattr(pipeline_prx, "ftfy", Ftfy, raising=False)
    theirs, draw = pipeline_prx.TextPreprocessor(), random.Random(0)
    some = ["".join(draw.choices(PIECES, k=draw.randint(0, 7))) for _ in range(1500)]
    some += ["".join(draw.choices(SIMPLE, k=draw.randint(1, 7)))[:-1] for _ in range(1000)]
    cleaned = [prx_cleaning.clean(text) for text in some]
    assert cleaned == [theirs.clean_text(text) for text in some]
    assert rules.normalise_all(pa.array(some), "prx").to_pylist() == cleaned
    plain = [text for text in some if re.search(prx_cleaning.PLAIN, text)]
    assert len(plain) > 500 and len(set(cleaned)) > 1000


def test_the_rules_of_ftfy() -> None:
    for text, wanted in {
        "ﬁsh & ﬀ": "fish & ff",
        "ＬＯＵＤ　": "LOUD ",
        "“it’s”": '"it\'s"',
        "a\r\nb\u2028c": "a\nb\nc",
        "\x93x\x85\x1b[31mred\x07": '"x…red',
        "e\u0301 &eacute; &#233; &amp &bad;": "é é é &amp &bad;",
        "<b>&eacute;": "<b>&eacute;",
        "cafÃ©": "cafÃ©",  # which ftfy guesses at
    }.items():
        assert prx_cleaning.repaired(text) == wanted


# ---------------------------------------------------------------- every kind


@pytest.fixture(params=["qwen3", "t5gemma"])
def other(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_a_batch_gives_what_single_captions_give(other: Path) -> None:
    one = encoder(other)
    together = rows(one, CAPTIONS)
    assert max(relative_error(a, rows(one, [text])[0]) for a, text in zip(together, CAPTIONS, strict=True)) < 1e-5
    one.encode(CAPTIONS)
    assert one.largest_error is not None and one.largest_error < 1e-5 and one.unshared == 0
    assert one.truncated == 1 and len(together[6]) == one.max_length == one.kind.max_length


def test_rows_are_counted_without_the_model(other: Path) -> None:
    config = TextConfig(id=str(other))
    some = [rules.normalise(caption, describe_text(config)["normalisation"]) for caption in CAPTIONS]
    assert count_rows(config, some) == [len(each) for each in encoder(other).encode(some)]


def test_many_captions_are_cleaned_as_each(other: Path) -> None:
    import pyarrow as pa

    rule = describe_text(TextConfig(id=str(other)))["normalisation"]
    assert rules.normalise_all(pa.array(CAPTIONS), rule).to_pylist() == [rules.normalise(c, rule) for c in CAPTIONS]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"prompting": "nvlabs"}, naming("text.prompting", "nvlabs")),
        ({"instruction": "Draw: "}, naming("text.instruction", "Draw")),
        ({"max_length": 4096}, naming("text.max_length", "4096", "2048")),
    ],
)
def test_settings_of_another_kind_are_refused(other: Path, options: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names) as caught:
        describe_text(TextConfig(id=str(other), **options))
    assert caught.value.fix and "--set text." in caught.value.fix
    with pytest.raises(ConfigError, match=names):
        encoder(other, **options)
    with pytest.raises(ConfigError, match=names):
        count_rows(TextConfig(id=str(other), **options), ["a"])


def test_what_decides_rows_is_in_the_encoding(other: Path, tmp_path: Path) -> None:
    before = describe_text(TextConfig(id=str(other)))
    encoding = TextEncoding(**before)
    assert encoding.id not in {TextEncoding(**{**before, name: "x"}).id for name in ("encoder_kind", "template")}
    assert TextEncoding.from_values(encoding.values()) == encoding
    moved = Path(shutil.copytree(other, tmp_path / "moved"))
    assert describe_text(TextConfig(id=str(moved))) == before
    settings = moved / "text_encoder" / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "rms_norm_eps": 1e-5}))
    assert describe_text(TextConfig(id=str(moved)))["weights"] != before["weights"]


def test_an_encoding_of_gemma_keeps_its_id_and_its_document() -> None:
    plain = TextEncoding(weights="w", tokenizer="t", instruction="i", max_length=77)
    assert plain.id == "c14307018809aed0975c5b9455207007"
    assert not {"encoder_kind", "template"} & set(plain.values())


def set_settings(folder: Path, **values: Any) -> None:
    path = folder / "text_encoder" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "gemma3", "gemma3_text", "qwen3_moe", "t5"])
def test_an_encoder_of_no_known_kind_is_refused(qwen3: Path, tmp_path: Path, model_type: str) -> None:
    copy = Path(shutil.copytree(qwen3, tmp_path / "copy"))
    set_settings(copy, model_type=model_type)
    for tried in (describe_text, lambda config: TextEncoder.load(config, "cpu"), lambda c: count_rows(c, ["a"])):
        with pytest.raises(ModelError, match=naming(copy / "text_encoder", model_type, "gemma2", "qwen3", "text.id")):
            tried(TextConfig(id=str(copy)))


# ---------------------------------------------------------------- the chat template


def with_template(folder: Path, place: str, template: str | list[dict[str, str]] | None) -> None:
    """Put the chat template into one of the tokenizer's files, and into no other."""
    file, settings = folder / "tokenizer" / "chat_template.jinja", folder / "tokenizer" / "tokenizer_config.json"
    file.unlink(missing_ok=True)
    values = json.loads(settings.read_text())
    values.pop("chat_template", None)
    if place == "file" and isinstance(template, str):
        file.write_text(template)
    elif template is not None:
        values["chat_template"] = template
    settings.write_text(json.dumps(values))


@pytest.mark.parametrize("place", ["file", "settings", "list"])
def test_the_template_counts_wherever_it_stands(qwen3: Path, tmp_path: Path, place: str) -> None:
    copy, config = Path(shutil.copytree(qwen3, tmp_path / "copy")), TextConfig(id=str(tmp_path / "copy"))

    def put(text: str) -> None:
        named: Any = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": text}]
        with_template(copy, place, named if place == "list" else text)

    put(tiny_models.TEMPLATE)
    assert describe_text(config) == describe_text(TextConfig(id=str(qwen3)))
    put(tiny_models.TEMPLATE.replace("assistant", "system"))
    changed = describe_text(config)
    assert changed["template"] != tiny_models.TEMPLATE
    assert changed == {**describe_text(TextConfig(id=str(qwen3))), "template": changed["template"]}
    text = encoder(copy).kind.texts(encoder(copy).tokenizer, ["a"], changed["template"])
    assert text == ["<|im_start|>user\na<|im_end|>\n<|im_start|>system\n"]


def test_a_tokenizer_without_a_template_is_refused(qwen3: Path, tmp_path: Path) -> None:
    copy, config = Path(shutil.copytree(qwen3, tmp_path / "copy")), TextConfig(id=str(tmp_path / "copy"))
    with_template(copy, "file", None)
    for tried in (describe_text, lambda config: TextEncoder.load(config, "cpu"), lambda c: count_rows(c, ["a"])):
        with pytest.raises(ModelError, match=naming(copy / "tokenizer", "chat_template.jinja")) as caught:
            tried(config)
        assert "text.id" in str(caught.value.fix)


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ raise_exception('no') }}", "<|im_start|>user", "{{ messages }}x"]
)
def test_a_template_that_loses_the_caption_is_refused(qwen3: Path, tmp_path: Path, template: str) -> None:
    copy = Path(shutil.copytree(qwen3, tmp_path / "copy"))
    with_template(copy, "file", template)
    if template == "{{ messages }}x":  # odd, but the caption is in it
        assert len(encoder(copy).encode(["a"])) == 1
        return
    with pytest.raises(ModelError, match=naming(copy / "tokenizer", "template")):
        encoder(copy)


# ---------------------------------------------------------------- in the pipeline


class Killed(BaseException):
    pass


def some_of(photos: Path, folder: Path) -> Path:
    """Four of the photographs, with their captions."""
    folder.mkdir()
    for path in sorted(photos.glob("*.txt"))[:4]:
        for each in photos.glob(f"{path.stem}.*"):
            shutil.copy(each, folder)
    return folder


def test_a_killed_encoding_goes_on_and_gives_the_same_rows(
    other: Path, photos: Path, make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a snapshot of them, whose null record has the rows of the empty caption alone."""
    set_constants(monkeypatch, unit_sizes(64, 2))
    source = some_of(photos, tmp_path / "some")
    options = f"text.id={other}", "text.max_length=null", "data.resolution=64", "data.buckets=[[64, 64]]"
    config = make_config(tmp_path / "whole", *options)
    done = sana_pipe.stages.encode.run(config, data=str(source))
    assert done["captions"] == 4 + 1 and done["left"] == 0

    resumed, inner, calls = make_config(tmp_path / "killed", *options), TextEncoder.encode, 0

    def dies(self: TextEncoder, captions: list[str]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Killed
        return inner(self, captions)

    with monkeypatch.context() as patched:
        patched.setattr(TextEncoder, "encode", dies)
        with pytest.raises(Killed):
            sana_pipe.stages.encode.run(resumed, data=str(source))
    assert 0 < sana_pipe.stages.encode.run(resumed, data=str(source))["captions"] < 5

    taken = []
    for each in (config, resumed):
        sana_pipe.stages.bucket.run(each)
        snapshot = Cache(each.cache).open_snapshot()
        taken.append(snapshot)
        encoding = snapshot.encoding(TextEncoding)
        kind = encoder(other).kind
        assert (encoding.encoder_kind, encoding.max_length) == (kind.name, kind.max_length)
        assert snapshot.null.rows == snapshot.null.valid == encoder(other).null()[1]
    assert taken[0].id == taken[1].id
    shards = [
        {path.name: path.read_bytes() for path in Path(each.cache).glob("shards/text-*/**/*.tar")}
        for each in (config, resumed)
    ]
    assert shards[0] and shards[0] == shards[1]


def test_a_dry_run_counts_what_is_encoded(other: Path, photos: Path, make_config: Make, tmp_path: Path) -> None:
    config = make_config(tmp_path, f"text.id={other}", "text.max_length=null")
    assert sana_pipe.stages.encode.dry_run(config, data=str(photos), probe=False) == 0
    with pytest.raises(UserError, match=naming("text.prompting")):
        changed = make_config(tmp_path, f"text.id={other}", "text.max_length=null", "text.prompting=nvlabs")
        sana_pipe.stages.encode.dry_run(changed, data=str(photos), probe=False)
