"""What `init` writes: a table of folders and cards, what it changes in shipped configurations, and its page."""

from __future__ import annotations

import dataclasses
import re
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from sana_pipe.base.errors import UserError
from sana_pipe.base.options import flat, put, value_at
from sana_pipe.base.yaml_text import edited, from_yaml
from sana_pipe.config import SHIPPED, load, load_given
from sana_pipe.stages import init
from sana_pipe.stages.init import Options
from sana_pipe.tools.planning import recommend
from sana_pipe.tools.planning.recommend import FULL, LORA, SCRATCH, Facts
from tests.support.command_lines import dry_run
from tests.support.messages import naming

PAGE = Path(__file__).parents[2] / "docs/guides/lora.md"
SENTENCE = "a brown dog sits on the grass in front of a red house"
TAGS = "1girl, solo, long hair, blue eyes, smile"


def folder(place: Path, count: int, caption: str | None = SENTENCE, size: tuple[int, int] = (1024, 1024)) -> Path:
    """Pictures whose bytes differ behind the end of the image."""
    place.mkdir()
    buffer = BytesIO()
    Image.new("RGB", size, (9, 99, 199)).save(buffer, "PNG")
    for number in range(count):
        (place / f"{number:04d}.png").write_bytes(buffer.getvalue() + str(number).encode())
        if caption is not None:
            (place / f"{number:04d}.txt").write_text(f"{caption} {number}" if "," not in caption else caption)
    return place


LORA_STEPS = {"train.adapter.rank": 16, "bucket.batch": 4, "train.optim.lr": 1e-4}
BIG, SMALL = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", "Efficient-Large-Model/Sana_600M_512px_diffusers"
CASES: dict[str, tuple[list[dict[str, Any]], Options, dict[str, Any]]] = {
    "one picture without a caption": (
        [{"count": 1, "caption": None}],
        Options(gpu_memory="24GiB"),
        {**LORA_STEPS, "train.steps": 500, "data.caption": "sks", "train.validation": None, "model.weights.id": BIG},
    ),
    "three pictures with captions and a trigger": (
        [{"count": 3}],
        Options(gpu_memory="8GiB", trigger="sks  dog"),
        {**LORA_STEPS, "train.steps": 500, "data.caption_prefix": "sks dog, ", "data.caption": None},
    ),
    "twelve pictures on 12 GB": (
        [{"count": 12}],
        Options(gpu_memory="12GiB"),
        {**LORA_STEPS, "train.steps": 600, "train.validation": None, "data.resolution": 1024, "bucket.heldout": 0.0},
    ),
    "forty pictures on a 4090": (
        [{"count": 40}],
        Options(gpu="4090"),
        {**LORA_STEPS, "bucket.heldout": 0.1, "train.validation.every": 250, "train.steps": 1800, "data.caption": None},
    ),
    "forty with tags and a trigger": (
        [{"count": 40, "caption": TAGS}],
        Options(gpu="3090", trigger="sks"),
        {
            **LORA_STEPS,
            "data.caption_prefix": "sks, ",
            "data.tags.shuffle": 4,
            "data.tags.keep": 0,
            "train.pictures.every": 250,
        },
    ),
    "forty fully": (
        [{"count": 40}],
        Options(gpu="4090", purpose=FULL),
        {"train.adapter": None, "bucket.batch": 16, "train.optim.lr": 5e-5, "train.optim.name": "adamw8bit"},
    ),
    "400 pictures": (
        [{"count": 400}],
        Options(gpu="a100-80"),
        {**LORA_STEPS, "train.steps": 3100, "bucket.heldout": 0.1, "train.optim.warmup_steps": 100},
    ),
    "400 pictures fully on 8 GB": (
        [{"count": 400}],
        Options(gpu_memory="12GiB", purpose=FULL),
        {"model.weights.id": SMALL, "data.resolution": 512, "train.precision": "fp32", "bucket.batch": 16},
    ),
    "2,100 pictures on 80 GB": (
        [{"count": 2100}],
        Options(gpu="h100"),
        {
            "train.adapter": None,
            "bucket.batch": 64,
            "train.optim.lr": 1e-4,
            "train.precision": "bf16",
            "train.steps": 3216,
            "train.optim.warmup_steps": 643,
            "bucket.heldout": 0.02,
        },
    ),
    "two sources, one without captions, eight cards": (
        [{"count": 20}, {"count": 5, "caption": None}],
        Options(gpu="h100", gpus=8, trigger="sks"),
        {"bucket.batch": 8, "data.caption_prefix": "sks, ", "data.caption": "a picture", "train.steps": 625},
    ),
    "small pictures, some too small": (
        [{"count": 9, "size": (500, 600)}, {"count": 2, "size": (200, 200)}],
        Options(gpu="4080"),
        {**LORA_STEPS, "model.weights.id": SMALL, "data.resolution": 512, "data.max_upscale": 2.0},
    ),
    "from scratch": (
        [{"count": 400, "size": (512, 512)}],
        Options(gpu="h100", purpose=SCRATCH),
        {"model.weights": None, "model.arch.num_layers": 28, "train.steps": 10_000, "train.ema.decay": 0.9999},
    ),
    "Z-Image on 24 GB": (
        [{"count": 40}],
        Options(gpu="4090", model="zimage"),
        {
            "model.weights.id": "Tongyi-MAI/Z-Image",
            "train.adapter.rank": 16,
            "train.flow.shift": 6.0,
            "text.max_length": 512,
            "train.steps": 1800,
        },
    ),
    "Z-Image on 16 GB": (
        [{"count": 40}],
        Options(gpu="4080", model="zimage"),
        {"train.activation_checkpointing": "full", "train.activation_compression": "int8", "train.microbatch": 1},
    ),
    "PRX": (
        [{"count": 400, "size": (512, 512)}],
        Options(gpu="h100", model="prx"),
        {"model.weights.id": "Photoroom/prx-512-t2i-dc-ae", "train.adapter": None, "data.resolution": 512},
    ),
    "no card": (
        [{"count": 12, "caption": None}],
        Options(gpu="cpu", trigger="ohwx"),
        {**LORA_STEPS, "data.caption": "ohwx", "data.caption_prefix": "", "train.precision": "bf16"},
    ),
}
"""Folders, options, and what the written file says."""


def written(name: str, place: Path) -> tuple[Path, Path]:
    """(the file, the prompts) that a case writes."""
    folders, options, _ = CASES[name]
    sources = [str(folder(place / f"source{number}", **each)) for number, each in enumerate(folders)]
    out = place / "sana-pipe.yaml"
    assert init.run(sources, Options(**{**vars(options), "out": out})) == 0
    return out, place / "prompts.txt"


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the prediction, which takes seconds; `test_what_is_written_fits` makes it."""
    monkeypatch.setattr(init, "expected", lambda *arguments: [])


@pytest.mark.parametrize("name", CASES)
def test_the_choices_suit_pictures_and_card(
    name: str, tmp_path: Path, unplanned: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path, prompts = written(name, tmp_path)
    config, tree = load(path), load(path).model_dump()
    expected = CASES[name][2]
    assert {option: value_at(tree, option) for option in expected} == expected
    lines = prompts.read_text().splitlines()
    assert 0 < len(lines) <= 8 and all(lines)
    said, text = capsys.readouterr().out, path.read_text()
    for option in expected:
        leaf = option.rpartition(".")[2]
        assert leaf not in yaml.safe_load(text) or leaf in said
    comments = [line for line in text.splitlines() if "# " in line]
    assert len(comments) > 15 and max(map(len, comments[1:])) <= 120 and len(text.splitlines()) <= 120
    assert (config.train.pictures is not None) == (name != "PRX"), "its file draws no pictures"
    assert said.rstrip().splitlines()[-1].startswith("next: sana-pipe run ")


SEARCHED = {
    "three pictures with captions and a trigger",
    "forty fully",
    "400 pictures fully on 8 GB",
    "2,100 pictures on 80 GB",
    "from scratch",
    "Z-Image on 24 GB",
    "Z-Image on 16 GB",
    "PRX",
}
"""Cases whose prediction searches, 10 to 30 s of a core each, and whose card has more memory than a row of the memory
table, of which `test_each_row_of_the_memory_table_fits` predicts that it suffices."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if n in SEARCHED else pytest.mark.slow) for n in CASES]
)
def test_what_is_written_fits(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The card is predicted to suffice."""
    written(name, tmp_path)
    said = capsys.readouterr().out
    assert "the run: " in said and ("are predicted" in said) == (CASES[name][1].gpu != "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_trains(name: str, small_cache_copy: Path, tmp_path: Path, unplanned: None) -> None:
    """A small model trains a step with everything that the file says."""
    import sana_pipe.stages.train

    path, _ = written(name, tmp_path)
    small = load("tiny").model.arch
    assert small is not None
    arch = f"model.arch={ {**small, 'num_layers': 2} }".replace("None", "null")
    run = [f"cache={small_cache_copy}", f"train.output={tmp_path / 'run'}", "train.steps=1", "train.device=cpu"]
    run += ["train.validation=null", "train.pictures=null"]
    config = load(path, ["model.weights=null", arch, *run])
    assert sana_pipe.stages.train.run(config, log=lambda line: None).step == 1


def test_the_file_answers_the_commands(tmp_path: Path, unplanned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of the chain reads it, and so does `plan`."""
    path, _ = written("forty pictures on a 4090", tmp_path)
    for words in (["encode", "--data", "x"], ["bucket"], ["train"], ["sample"], ["export"], ["check"], ["plan"]):
        assert dry_run(monkeypatch, [*words, "--config", str(path)])[0] == 0


def test_the_prompts_show_the_trigger_and_what_else_changes(tmp_path: Path, unplanned: None) -> None:
    _, prompts = written("three pictures with captions and a trigger", tmp_path)
    lines = prompts.read_text().splitlines()
    assert lines[0] == "sks dog" and sum("sks dog" in line for line in lines) == len(lines) - 1
    assert recommend.CONTROL in lines and f"sks dog, {SENTENCE} 0" in lines


def test_a_caption_that_has_the_word_needs_no_prefix(tmp_path: Path, unplanned: None) -> None:
    source = folder(tmp_path / "dogs", 3, "a photo of a SKS dog on the grass")
    assert init.run([str(source)], Options(gpu="4090", trigger="sks dog", out=tmp_path / "a.yaml")) == 0
    assert load(tmp_path / "a.yaml").data.caption_prefix == ""
    assert f"sks dog, {SENTENCE}" not in (tmp_path / "prompts.txt").read_text()


def test_pictures_without_a_caption_get_the_word_that_the_other_captions_have(tmp_path: Path, unplanned: None) -> None:
    source = folder(tmp_path / "dogs", 3, "a photo of a SKS dog on the grass")
    (source / "0000.txt").unlink()
    assert init.run([str(source)], Options(gpu="4090", trigger="sks dog", out=tmp_path / "a.yaml")) == 0
    data = load(tmp_path / "a.yaml").data
    assert (data.caption_prefix, data.caption) == ("", "sks dog, a picture")


def test_a_file_is_replaced_only_by_force(tmp_path: Path, unplanned: None, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = folder(tmp_path / "dogs", 2), tmp_path / "a.yaml"
    out.write_text("mine")
    (tmp_path / "prompts.txt").write_text("my prompt\n")
    with pytest.raises(UserError, match=naming("a.yaml", "--force")):
        init.run([str(source)], Options(gpu="4090", out=out))
    assert out.read_text() == "mine"
    capsys.readouterr()
    assert init.run([str(source)], Options(gpu="4090", out=tmp_path / "b.yaml")) == 0
    kept = f"{tmp_path / 'prompts.txt'} exists already and is left unchanged"
    assert (tmp_path / "prompts.txt").read_text() == "my prompt\n" and kept in capsys.readouterr().out
    with pytest.raises(UserError, match=naming("a.yaml", "--out")):  # no configuration is in it
        init.run([str(source)], Options(gpu="4090", out=out, force=True))
    assert out.read_text() == "mine"
    out.write_text("train: {steps: 3}")
    assert init.run([str(source)], Options(gpu="4090", out=out, force=True)) == 0
    assert kept not in capsys.readouterr().out
    assert load(out).bucket.batch == 4 and "my prompt" not in (tmp_path / "prompts.txt").read_text()


def test_set_is_written_into_the_file(tmp_path: Path, unplanned: None) -> None:
    source, out = folder(tmp_path / "dogs", 2), tmp_path / "a.yaml"
    overrides = ("train.adapter.rank=32", "train.optim={lr: 2e-5}", "model.weights.id=./mine", "cache=/big/cache")
    assert init.run([str(source)], Options(gpu="4090", out=out, overrides=overrides)) == 0
    config = load(out)
    assert config.train.adapter is not None and (config.train.adapter.rank, config.train.adapter.alpha) == (32, None)
    assert (config.train.optim.lr, config.cache) == (2e-5, "/big/cache")
    assert config.model.weights is not None and config.model.weights.id == "./mine"
    assert config.model.weights.runs_in == ["bf16", "fp32"]


def test_a_name_cannot_write_options(tmp_path: Path, unplanned: None) -> None:
    source = folder(tmp_path / "a\ncache: stolen\nb", 2)
    assert init.run([str(source)], Options(gpu="4090", out=tmp_path / "a.yaml", trigger="x\ncache: stolen")) == 0
    config = load(tmp_path / "a.yaml")
    assert (config.cache, config.data.caption_prefix) == ("./cache", "x cache: stolen, ")


def test_what_cannot_be_trained_on_is_refused(
    tmp_path: Path, unplanned: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(source: Path, *words: str, **options: Any) -> None:
        with pytest.raises(UserError, match=naming(*words)):
            init.run([str(source)], Options(**{"gpu": "4090", "out": tmp_path / "a.yaml", **options}))
        assert not (tmp_path / "a.yaml").exists()

    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no picture")
    refused(folder(tmp_path / "tiny", 5, size=(64, 100)), "5 pictures are too small", "64 x 100", "256 x 256")
    broken = folder(tmp_path / "broken", 1)
    (broken / "0000.png").write_bytes(b"<html>no picture</html>")
    capsys.readouterr()
    refused(broken, "no picture is usable")
    assert "0 usable pictures, 1 rejects" in capsys.readouterr().out
    bare = folder(tmp_path / "bare", 3, None)
    refused(bare, "3 of 3 pictures have no caption", "--trigger", purpose=FULL)
    refused(bare, "a LoRA", "6 GiB", gpu_memory="4GiB")
    refused(bare, "8 x 1.0 GiB", "11 GiB", purpose=FULL, gpu_memory="1GiB", gpus=8, trigger="sks")
    shutil.copytree(bare, tmp_path / "other" / "bare")
    capsys.readouterr()
    with pytest.raises(UserError, match=naming("same name")):
        init.run([str(bare), str(tmp_path / "other/bare")], Options(gpu="4090", out=tmp_path / "a.yaml"))
    refused(bare, "cannot be written", "--out", out=tmp_path / "missing" / "a.yaml")
    refused(folder(tmp_path / "写真", 1), "cannot name a source", "rename the folder")
    assert not capsys.readouterr().out, "refused before a scan"


def test_validation_needs_a_digest_that_is_held_out(tmp_path: Path) -> None:
    sizes = np.full(40, 1024)
    facts = {"heights": sizes, "widths": sizes, "pictures": 40, "captioned": 40, "captions": (SENTENCE,)}
    for held_out, share in ((0, 0.0), (3, 0.1), (None, 0.1)):
        assert recommend.recommend(Facts(**facts, held_out=held_out)).value("bucket.heldout") == share


@pytest.mark.parametrize(
    ("caption", "answer"),
    [
        (TAGS, True),
        (SENTENCE, False),
        ("A red house, with a tall tree, near the lake, at dawn", False),
        ("a, b", False),
    ],
)
def test_tags_are_told_from_sentences(caption: str, answer: bool) -> None:
    assert recommend.is_tags(caption) == answer


def test_the_page_has_the_numbers() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"fewer than {recommend.FULL_FROM:,} pictures" in text
    assert f"enlarged by at most {recommend.SHARP:g} at 1024 px" in text
    assert f"enlarged by more than {recommend.LARGEST:g} " in text
    assert f"| {recommend.HELDOUT[-1][0]} pictures and more |" in text
    assert f"| fewer than {recommend.SMALL_SET:,} pictures for full fine-tuning | a batch of 16 " in text
    for steps in recommend.STEPS.values():
        assert f" {steps.visits} times" in text and f"in {steps.least:,} to {steps.most:,}" in text
    for path in (SHIPPED / f"{name}.yaml" for name in BASES):
        assert f"(../../configs/{path.name})" in text


BASES: dict[str, tuple[str, int, set[str]]] = {
    "sana_1600m_1024_lora": (LORA, 40, {"train.steps"}),
    "sana_1600m_1024": (FULL, 20_000, {"bucket.heldout", "train.validation"}),
    "sana_600m_512": (FULL, 20_000, {"bucket.heldout", "train.validation"}),
    "sana_600m_512_scratch": (SCRATCH, 400_000, {"bucket.heldout", "train.validation"}),
}
"""Configuration: purpose, and pictures for which only these options and the run directory are not those of the file."""


@pytest.mark.parametrize("name", BASES)
def test_a_shipped_configuration_is_what_is_written_for_its_pictures(name: str) -> None:
    """Its values, models and steps; what differs is read back, and nothing else is another value."""
    purpose, pictures, differing = BASES[name]
    given = load(name)
    side = np.full(pictures, given.data.resolution)
    facts = Facts(side, side, pictures, pictures, (SENTENCE,), memory_gib=80.0)
    made = recommend.recommend(facts, purpose)
    assert (made.base, made.is_mixed) == (name, False)
    assert {choice.option for choice in made.choices} == {*differing, "train.output"}
    if purpose == LORA:
        assert (given.train.epochs, made.value("train.steps")) == (recommend.STEPS[LORA].visits, 1800)
    else:
        assert given.train.steps == recommend.STEPS[purpose].most
    values, shipped = dict(flat(from_yaml(made.text()))), dict(flat(load_given(name)[1].tree))
    for choice in made.choices:
        assert value_at(from_yaml(made.text()), choice.option) == choice.value
    changed = {option for option in {*values, *shipped} if values.get(option) != shipped.get(option)}
    assert all(
        any(option.startswith(name) for name in (*differing, "train.output", "train.epochs")) for option in changed
    )


@pytest.mark.parametrize("name", CASES)
def test_the_comments_of_the_shipped_file_stay(name: str, tmp_path: Path, unplanned: None) -> None:
    """Every line of it is in the written file but those of at most eight options, whose lines have a reason."""
    path, _ = written(name, tmp_path)
    text = path.read_text()
    (base,) = re.findall(r"^# from configs/(\w+)\.yaml", text, re.MULTILINE)
    body = (SHIPPED / f"{base}.yaml").read_text().split("\n\n", 1)[1]
    body = body[body.index("\ndata:") :]
    gone = [line for line in body.splitlines() if line not in text.splitlines()]
    assert len(gone) <= 8, gone
    new = [number for number, line in enumerate(text.splitlines()) if line not in body.splitlines()]
    for line in gone:
        leaf = {"epochs": "steps"}.get(key := line.split(":")[0].strip(), key)
        (place,) = (number for number in new if text.splitlines()[number].strip().startswith(f"{leaf}:"))
        assert place - 1 in new and text.splitlines()[place - 1].strip().startswith("# ")


def test_another_model_is_for_what_its_file_is(tmp_path: Path, unplanned: None) -> None:
    source = str(folder(tmp_path / "pictures", 40))
    for options, words in (
        (Options(model="zimage", purpose=FULL, gpu="h100"), ("--for lora", "zimage_1024_lora")),
        (Options(model="prx", purpose=LORA, gpu="h100"), ("--for full", "prx_512")),
        (Options(model="zimage", gpu_memory="12GiB"), ("zimage_1024_lora", "--model sana")),
    ):
        with pytest.raises(UserError, match=naming(*words)):
            init.run([source], dataclasses.replace(options, out=tmp_path / "a.yaml"))
    assert not (tmp_path / "a.yaml").exists()


def test_without_a_card_memory_is_not_the_reason() -> None:
    side = np.full(recommend.FULL_FROM, 1024)
    facts = Facts(side, side, len(side), len(side), (SENTENCE,))
    made = recommend.recommend(facts)
    assert made.purpose == LORA and "no GPU here" in made.notes[0] and "memory" not in made.notes[0]
    assert recommend.recommend(facts, FULL).purpose == FULL


ROWS = [
    pytest.param(
        row,
        gpus,
        marks=pytest.mark.nightly if (gpus > 1 and row.gib != 21.5) or row.model != "sana" else pytest.mark.slow,
        id=f"{row.model}-{row.purpose}-{row.resolution}-{row.gib:g}" + "-on-four" * (gpus > 1),
    )
    for row in recommend.MEMORY
    for gpus in ((1, 4) if row.gib > 20 and row.model == "sana" else (1,))
]
"""On four cards by day only the row with the least room in each: what the others add is the same arithmetic."""


@pytest.mark.parametrize(("row", "gpus"), ROWS)
def test_each_row_of_the_memory_table_fits(row: recommend.Memory, gpus: int, tmp_path: Path, unplanned: None) -> None:
    """By the prediction, on a card with just so much memory, and on four with as much together where that is more."""
    from click.testing import CliRunner

    from sana_pipe.cli import cli

    size = (1024, 1024) if row.resolution == 1024 else (512, 512)
    source = folder(tmp_path / "pictures", 40, size=size)
    memory = f"{(row.gib + (gpus - 1) * recommend.OF_ANOTHER_CARD) / gpus:.4f}GiB"
    options = Options(row.purpose, None, tmp_path / "a.yaml", gpu_memory=memory, gpus=gpus, model=row.model)
    assert init.run([str(source)], options) == 0
    words = ["plan", "--config", str(options.out), "--gpus", str(gpus), "--gpu-memory", memory]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert {option: value_at(load(options.out).model_dump(), option) for option in row.settings} == row.settings


TEXT = """cache: ./cache  # here

train:           # the run
  # of the steps
  steps: 3       # few
  adapter: {rank: 16, targets: attention}  # a part
  optim:
    lr: 1.0e-4
  # at the end

sample: {steps: 2}
"""


@pytest.mark.parametrize(
    ("option", "value", "lost"),
    [
        ("cache", "s3://a/b", "# here"),
        ("train.steps", 7, "# few"),
        ("train.adapter.rank", 32, "# a part"),
        ("train.adapter", None, "# a part"),
        ("train.adapter.weights.id", "x: y", "# a part"),
        ("train.optim.warmup_steps", 5, None),
        ("train.optim", {"name": "came"}, None),
        ("train.parallel.tp_size", 2, None),
        ("train.output", "a # b", None),
        ("sample.seed", 1, None),
        ("metrics.textfile", "\u2028 'é' \U0001f600", None),
        ("data.caption_prefix", "sks, ", None),
    ],
)
def test_an_option_is_changed_in_a_text_and_all_else_stays(option: str, value: Any, lost: str | None) -> None:
    text = edited(edited(TEXT, option, 1, "first"), option, value, "a reason " * 30)
    tree, expected = from_yaml(text), from_yaml(TEXT)
    assert value_at(tree, option) == value
    put(expected, option, value)
    assert tree == expected
    comments = {"# here", "# the run", "# of the steps", "# few", "# a part", "# at the end"}
    assert {comment for comment in comments if comment not in text} == ({lost} if lost else set())
    assert all(len(line) <= 120 for line in text.splitlines()) and text.count("reason") == 30


def test_steps_take_the_place_of_epochs() -> None:
    text = edited(TEXT, "train.epochs", 2, "why", "steps")
    assert from_yaml(text)["train"].keys() == {"epochs", "adapter", "optim"}
    assert text.index("epochs") < text.index("adapter")
