"""Configuration: strict, typed, and errors that name the key, the file and the nearest valid name."""

from __future__ import annotations

import json
import re
import shlex
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import sana_pipe.stages.config
from sana_pipe import config as module
from sana_pipe.base.config import setting
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.options import section_of
from sana_pipe.base.yaml_text import as_yaml, from_yaml
from sana_pipe.config import Config, dump, find, load, load_given, option_fields, shipped
from sana_pipe.train.training.config import OptimConfig
from sana_pipe.train.training.objectives.control import Controlled
from sana_pipe.train.training.objectives.prefer import Preferring
from tests.support.messages import naming
from tests.support.parameters import first_quick

MINIMAL = """\
vae: {id: some/vae}
text: {id: some/text}
model: {weights: {id: some/model}}
"""


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), overrides)
    return str(caught.value)


def test_minimal_file_takes_the_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL))
    assert config.vae.id == "some/vae"
    assert config.train.optim.lr == 1e-4
    assert config.data.buckets == "sana"


def test_the_home_folder_is_meant_in_files_and_in_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load(write(tmp_path, MINIMAL + "cache: ~/cache\n"), ["train.output=~/run", "bucket.caches=[~/a, ./b]"])
    assert config.cache == f"{tmp_path}/cache" and config.train.output == f"{tmp_path}/run"
    assert config.bucket.caches == [f"{tmp_path}/a", "./b"]
    for place in ("s3://bucket/~/cache", "./~", "./cache"):
        assert load("tiny", [f"cache={place}"]).cache == place
    with pytest.raises(UserError, match=naming("~no-such-user/cache", "HOME")):
        load("tiny", ["cache=~no-such-user/cache"])


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("train: {microbatc: 4}", "train.microbatc", "train.microbatch"),
        ("train: {optim: {learning_rate: 1.0}}", "train.optim.learning_rate", None),
        ("trian: {steps: 4}", "trian", "train"),
        ("train: {optim: {weight_decy: 0.1}}", "train.optim.weight_decy", "train.optim.weight_decay"),
        ("train: {warmup_steps: 4}", "train.warmup_steps", "train.optim.warmup_steps"),
        ("lr: 1.0e-4", "lr", "train.optim.lr"),
        ("data: {bucket: sana}", "data.bucket", "data.buckets"),
    ],
)
def test_unknown_key_names_file_key_and_nearest(tmp_path: Path, text: str, key: str, nearest: str | None) -> None:
    message = refusal(tmp_path, MINIMAL + text)
    assert str(tmp_path / "mine.yaml") in message
    assert f"unknown key {key!r}" in message
    if nearest:
        assert f"did you mean {nearest!r}?" in message
    else:
        assert "valid here: " in message
        assert "lr" in message


def test_an_unknown_key_of_a_large_section_names_the_command_that_lists_it(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "train: {xyzzy: 4}")
    assert "`sana-pipe config train` lists" in message and "valid here" not in message


def test_unknown_key_inside_an_optional_section(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL.replace("{id: some/model}", "{id: some/model, revisoin: x}"))
    assert "unknown key 'model.weights.revisoin'; did you mean 'model.weights.revision'?" in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train: {steps: '100'}", "train.steps"),
        ("train: {steps: 100.0}", "train.steps"),
        ("train: {steps: true}", "train.steps"),
        ("train: {steps: 0}", "train.steps"),
        ("train: {steps: null}", "train.steps"),
        ("train: {optim: {lr: fast}}", "train.optim.lr"),
        ("train: {optim: {lr: .nan}}", "train.optim.lr"),
        ("train: {optim: {lr: .inf}}", "train.optim.lr"),
        ("train: {optim: {betas: [0.9]}}", "train.optim.betas"),
        ("train: {optim: {betas: [0.9, 1.5]}}", "train.optim.betas"),
        ("train: {optim: {schedule: cosin}}", "train.optim.schedule"),
        ("train: {caption_drop: 1.1}", "train.caption_drop"),
        ("train: {precision: fp8}", "train.precision"),
        ("train: {parallel: {dp_shard: 0}}", "train.parallel"),
        ("train: [1, 2]", "train"),
        ("vae: 5", "vae"),
        ("data: {buckets: sanna}", "data.buckets"),
        ("data: {buckets: [[64, 64], [64, -8]]}", "data.buckets"),
        ("data: {buckets: [[64, 64], [64]]}", "data.buckets"),
        ("data: {background: [0, 0, 300]}", "data.background"),
        ("encode: {max_reject_rate: 2}", "encode.max_reject_rate"),
        ("text: {id: 1}", "text.id"),
    ],
)
def test_wrong_type_or_range_names_key_and_file(tmp_path: Path, text: str, key: str) -> None:
    base = {k: v for k, v in yaml.safe_load(MINIMAL).items() if k != text.partition(":")[0]}
    message = refusal(tmp_path, yaml.safe_dump(base) + text)
    assert str(tmp_path / "mine.yaml") in message
    assert f"'{key}" in message
    assert "literal[" not in message  # no names of pydantic
    assert "constrained-int" not in message


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "train: {stps: 1, seed: -1}\nbucket: {batch: x}")
    assert message.count("\n") == 2
    assert all(key in message for key in ("train.stps", "train.seed", "bucket.batch"))


def test_missing_section(tmp_path: Path) -> None:
    assert "'vae' is required and not given" in refusal(tmp_path, MINIMAL.replace("vae: {id: some/vae}\n", ""))
    assert "'vae' is required" in refusal(tmp_path, "")


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("{}", "either model.weights"),
        ("{weights: {id: a}, arch: {}}", "either model.weights"),
    ],
)
def test_impossible_combinations_of_the_model(tmp_path: Path, model: str, part: str) -> None:
    message = refusal(tmp_path, "vae: {id: a}\ntext: {id: b}\nmodel: " + model)
    assert part in message
    assert "'model" in message


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    assert "'cache' is given twice" in refusal(tmp_path, MINIMAL + "cache: a\ncache: b\n")
    assert "'steps' is given twice" in refusal(tmp_path, MINIMAL + "train:\n  steps: 1\n  steps: 2\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{text: packed, parallel: {pp_size: 2}}", "pp_size"),
        ("{compile: block, activation_compression: int8}", "activation_compression to none"),
        ("{compile: whole}", "train.compile"),
        ("{trackers: [tensorboards]}", "train.trackers"),
    ],
)
def test_incompatible_options_are_refused_with_values_that_work(tmp_path: Path, text: str, says: str) -> None:
    message = refusal(tmp_path, MINIMAL + "train: " + (text if text.startswith("{") else "{" + text + "}"))
    assert says in message


def test_compiled_blocks_go_with_every_other_strategy(tmp_path: Path) -> None:
    for more in ("activation_checkpointing: selective", "parallel: {tp_size: 2}", "parallel: {pp_size: 2}"):
        load(write(tmp_path, MINIMAL + f"train: {{compile: block, {more}}}"))


NOT_A_CONFIGURATION = ["a: [1", "\t- x", "? [1, 2]\n: 3", "- 1\n- 2", "just text", "a: !!python/object:x {}"]


@pytest.mark.parametrize("text", NOT_A_CONFIGURATION)
def test_a_file_that_is_not_a_configuration_is_named_without_a_traceback(tmp_path: Path, text: str) -> None:
    assert "mine.yaml" in refusal(tmp_path, text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path / "binary.yaml", tmp_path):
        with pytest.raises(ConfigError, match=naming(path)):
            load(path)


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = MINIMAL.replace("{id: some/vae}", "&v {id: some/vae, dtype: bf16}").replace(
        "{id: some/model}", "{<<: {id: x, variant: fp16}, id: some/model}"
    )
    config = load(write(tmp_path, text))
    assert config.model.weights is not None
    assert (config.model.weights.id, config.model.weights.variant) == ("some/model", "fp16")


def test_a_merged_mapping_may_hold_merged_keys_itself(tmp_path: Path) -> None:
    text = MINIMAL + "encode: {order: &e {<<: {image_batch: 2}, image_batch: 3}}\nbucket: {<<: *e}\n"
    assert "unknown key 'bucket.image_batch'" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "line", "says", "fix"),
    [
        ("train: {<<: *x}", 1, "undefined alias 'x'", "&x VALUE"),
        ("cache: &c a\ntrain:\n  <<: *c", 1, "expected a mapping", "correct it there"),
        ("train:\n  <<:", 2, "expected a mapping", "correct it there"),
        ("cache: a\ntrain: {<<: {steps: 3, steps: 4}}", 2, "'steps' is given twice", "one of the two"),
    ],
)
def test_a_wrong_merge_key_is_named_with_its_line_and_a_fix(
    tmp_path: Path, text: str, line: int, says: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=naming(f"mine.yaml, line {line}: not valid YAML")) as caught:
        load(write(tmp_path, text))
    assert says in caught.value.what and fix in str(caught.value.fix)


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.e-4", "1.0e-4", "0.0001", "+1e-4"])
def test_exponents_are_numbers(tmp_path: Path, number: str) -> None:
    assert load(write(tmp_path, MINIMAL + f"train: {{optim: {{lr: {number}}}}}")).train.optim.lr == 1e-4


@pytest.mark.parametrize(
    ("text", "value"),
    [("0100", 100), ("-07", -7), ("0o17", 15), ("0x1F", 31), ("1_000", "1_000"), ("1:30", "1:30"), ("0b11", "0b11")]
    + [(text, text) for text in ("2026-01-01", "2026-01-01 10:00:00", "no", "On", "y", "1.2.3", "e5", "=")]
    + [("089", 89), ("1.", 1.0), (".5", 0.5), ("1e3", 1e3), ("", None), ("~", None), ("TRUE", True), ("null ", None)],
)
def test_words_are_those_of_yaml_1_2_in_files_and_in_set(tmp_path: Path, text: str, value: object) -> None:
    file = write(tmp_path, MINIMAL + f"train:\n  tf32: {text}")
    for path, override in ((file, []), ("tiny", [f"train.tf32={text}"])):
        if isinstance(value, bool):
            assert load(path, override).train.tf32 is value
        else:
            with pytest.raises(ConfigError, match=naming(f"(found {value!r})")):
                load(path, override)
    assert from_yaml(as_yaml([text])) == [text], "written text stays text"
    assert yaml.safe_load(as_yaml([text, value])) == [text, value], "for other readers, too"


@pytest.mark.parametrize(
    ("override", "takes"),
    [
        ("train.ema=None", "{OPTION: VALUE, ...} | null"),
        ("train.trackers=tensorboard", "[tensorboard | wandb | "),
        ("train.steps=1e4", "integer above 0 | null"),
        ("train.steps=1:30", "integer above 0 | null"),
        ("train.microbatch=1e1", "integer above 0, or auto"),
        ("train.tf32=yes", "true | false"),
        ("train.optim.betas=0.9", "[number at least 0 and at most 1, ...]"),
        ("train.precision=fp8", "fp32 | bf16 | fp16 | bf16_pure"),
        ("model.weights.runs_in=bf16", "[fp32 | bf16 | fp16, ...] | null"),
        ("train.activation_checkpointing=5", "none | full | selective | every-K | auto"),
        ("bucket.sources.art=5", "{NAME: {OPTION: VALUE, ...}, ...}"),
        ("data.buckets=[[8]]", "sana | [[integer above 0, integer above 0], ...]"),
        ("bucket.sources={2024: {weight: 2}}", "put it in quotes"),
    ],
)
def test_a_wrong_value_shows_what_the_option_takes(override: str, takes: str) -> None:
    with pytest.raises(ConfigError, match=naming(takes)) as caught:
        load("tiny", [override])
    assert override.partition("=")[0] in str(caught.value) and "Config" not in str(caught.value)


@pytest.mark.parametrize("override", ["text.revision=0100", "data.caption= 1.5", "data.caption_field=true"])
def test_the_error_on_text_without_quotes_shows_what_to_paste(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("tiny", [override])
    [pasted] = re.findall(r"--set ('[^']*')", str(caught.value))
    option, _, value = override.partition("=")
    section, name = option.split(".")
    assert getattr(getattr(load("tiny", shlex.split(pasted)), section), name) == value.strip()


@pytest.mark.parametrize(
    "value", ["plain", "two words", "it's", "a|b; $HOME `x` *", "0100", "a\nb", "\u202ex", "é", " x", None]
)
def test_a_setting_in_a_message_means_its_value_when_pasted(value: str | None) -> None:
    words = shlex.split(setting("text.revision", value, "other"))
    assert words[0::3] == ["--set", "--set"] and words[2] == "or" and words[4] == "text.revision=other"
    assert load("tiny", [words[1]]).text.revision == value


@pytest.mark.parametrize("value", [" sks, ", "' sks, '", '" sks, "'])
def test_the_spaces_around_a_prefix_are_kept(value: str) -> None:
    assert load("tiny", [f"data.caption_prefix={value}"]).data.caption_prefix == " sks, "
    assert load("tiny", ["data.caption= 5 dogs "]).data.caption == "5 dogs"


PATHS = ("cache", "mirror.path", "train.output", "data.image_root", "vae.id", "text.id", "model.weights.id")


@pytest.mark.parametrize("option", [*PATHS, "bucket.caches", "model.weights", "vae.decoder"])
def test_variables_in_paths_are_replaced_or_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    base = ["model.arch=null", "model.weights={id: x}"]

    def value(path: str) -> object:
        given = f"['{path}']" if option == "bucket.caches" else f"'{path}'"
        return module.written(load("tiny", [*base, f"{option}={given}"]))

    assert f"{tmp_path}/scratch/x" in str(value("$SCRATCH/x")) and "$" not in str(value("${SCRATCH}/x"))
    monkeypatch.delenv("SCRATCH")
    with pytest.raises(UserError, match=naming("$SCRATCH/x", "SCRATCH")):
        value("$SCRATCH/x")
    with pytest.raises(UserError, match=naming("SCRATCH:-/tmp")):
        value("${SCRATCH:-/tmp}/x")
    assert "a$5/b$" in str(value("a$5/b$")), "no names of variables"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$SCRATCH").mkdir()
    assert "$SCRATCH" in str(value("$SCRATCH")), "a folder that is called so"


def test_an_unset_variable_in_a_secret_is_not_printed() -> None:
    for place in ("s3://key:pa$word@bucket/x", "https://host/x?signature=a$word"):
        with suppress(UserError):
            assert load("tiny", [f"cache={place}"]).cache == place


MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n" for a, b in pairwise("abcdefghij")
)


@pytest.mark.parametrize("text", [MERGES, MERGES.replace("{<<: ", "").replace("]}", "]"), "a: &a [1, *a]\n"])
def test_a_file_that_stands_for_billions_of_values_is_refused_at_once(tmp_path: Path, text: str) -> None:
    begun = time.monotonic()
    assert "mine.yaml" in refusal(tmp_path, MINIMAL + text)
    assert time.monotonic() - begun < 5
    with pytest.raises(ConfigError):
        load("tiny", ["train={" + ", ".join(text.replace("\n", ", ").split(", ")) + "}"])


def test_set_overrides(tmp_path: Path) -> None:
    config = load(
        write(tmp_path, MINIMAL),
        [
            "train.optim.lr=2e-5",
            "train.optim.clip=null",
            "train.output=/a=b",
            "data.buckets=[[64, 64], [48, 80]]",
            "model.weights=null",
            "model.arch.num_layers=2",
            "train.seed=1",
            "train.seed=2",
        ],
    )
    assert config.train.optim.lr == 2e-5
    assert config.train.optim.clip is None
    assert config.train.output == "/a=b"
    assert config.data.buckets == [(64, 64), (48, 80)]
    assert config.model.weights is None
    assert config.model.arch is not None
    assert config.model.arch["num_layers"] == 2
    assert config.train.seed == 2


@pytest.mark.parametrize(
    "text", ["train.steps", "=3", "train..steps=3", ".a=1", "train.steps.more=1", "train.steps=[1"]
)
def test_set_of_a_wrong_form(tmp_path: Path, text: str) -> None:
    assert f"--set {text!r}" in refusal(tmp_path, MINIMAL + "train: {steps: 3}", text)


def test_set_of_an_unknown_key_blames_the_flag_not_the_file(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL, "train.stepps=3")
    assert message == "--set: unknown key 'train.stepps'; did you mean 'train.steps'?"
    assert refusal(tmp_path, MINIMAL, "train.steps=many").startswith("--set: 'train.steps'")
    assert refusal(tmp_path, MINIMAL, "data.buckets=[[8]]").startswith("--set: 'data.buckets")


@pytest.mark.parametrize(
    ("overrides", "where", "key"),
    [
        (["train.optm.lr=1"], "--set: ", "'train.optm'"),
        (["trian.steps=4"], "--set: ", "'trian'"),
        (["bucket.sources.art.wieght=2"], "--set: ", "did you mean 'bucket.sources.art.weight'?"),
        (["train.optim.name=came", "train.optim.eps=1e-8"], "sana_1600m_1024.yaml with --set: ", "'train.optim'"),
        (["train.steps=x", "train.optim.lr=1"], "--set: ", "'train.steps'"),
    ],
)
def test_an_error_at_a_section_names_the_flag_that_set_an_option_below_it(
    overrides: list[str], where: str, key: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load("sana_1600m_1024", overrides)
    [line] = str(error.value).splitlines()
    assert where in line and key in line
    assert line.startswith("--set") == (where == "--set: ")


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find(None).name == "sana_1600m_1024.yaml"
    assert load().data.resolution == 1024
    write(tmp_path, MINIMAL + "data: {resolution: 512}", "sana-pipe.yaml")
    assert load().data.resolution == 512
    write(tmp_path, MINIMAL + "data: {resolution: 256}", "other.yaml")
    assert load("other.yaml").data.resolution == 256
    assert load("sana_600m_512").data.resolution == 512  # a shipped one by its bare name
    assert find("sana_600m_512.yaml").parent == module.SHIPPED
    (tmp_path / "tiny").mkdir()
    assert find("tiny").parent == module.SHIPPED, "the demonstration has a folder of this name"
    write(tmp_path, MINIMAL, "tiny.yaml")
    assert find("tiny.yaml") == Path("tiny.yaml")  # a file here goes before a shipped one
    with pytest.raises(ConfigError, match=r"'absent\.yaml'"):
        load("absent.yaml")
    with pytest.raises(ConfigError, match=naming("'folder/sana_600m_512.yaml'")):
        load("folder/sana_600m_512.yaml")  # a path is never taken for a bare name


UNPINNED = ("zimage_1024_lora", "prx_512")
"""Configurations whose head says that their revision is not pinned."""


def test_every_shipped_configuration_loads_and_says_what_it_is_for() -> None:
    released = {"sana_1600m_1024", "sana_1600m_1024_lora", "sana_600m_512", "sana15_1600m_1024", "sana15_4800m_1024"}
    released |= {"controlnet_24gb", "controlnet_80gb", "sana_600m_512_scratch", "sana_1600m_1024_prefer", *UNPINNED}
    assert {p.stem for p in shipped()} == {*released, "tiny"}
    for path in shipped():
        load(path)
        head = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        assert all(line.startswith("#") for line in head), path
        text = "\n".join(head)
        for part in ("sana-pipe encode", "sana-pipe bucket", "train", "Expected figures"):
            assert part in text, f"{path.name}: its head does not say {part!r}"


def test_constants_of_the_released_models() -> None:
    big, small = load("sana_1600m_1024"), load("sana_600m_512")
    for config in (big, small):
        optim = config.train.optim
        assert (optim.lr, optim.betas, optim.eps, optim.weight_decay) == (1e-4, (0.9, 0.999), 1e-8, 0.01)
        assert (optim.clip, optim.warmup_steps) == (0.1, 2000)
        assert (config.train.flow.shift, config.train.caption_drop) == (3.0, 0.1)
        assert (config.vae.dtype, config.text.dtype, config.text.max_length) == ("fp32", "bf16", 300)
    assert big.model.weights is not None
    assert small.model.weights is not None
    assert (big.train.precision, big.model.weights.runs_in) == ("bf16", ["bf16", "fp32"])
    assert (small.train.precision, small.model.weights.runs_in) == ("fp32", ["fp32", "fp16"])
    assert (big.data.resolution, small.data.resolution) == (1024, 512)


def test_constants_of_the_released_models_of_1_5() -> None:
    for name, size, warmup in (("sana15_1600m_1024", "1.6B", 1000), ("sana15_4800m_1024", "4.8B", 2000)):
        config = load(name)
        optim = config.train.optim
        assert (optim.lr, optim.betas, optim.eps, optim.weight_decay) == (1e-5, (0.9, 0.999), 1e-10, 0.0)
        assert (optim.clip, optim.warmup_steps, config.train.flow.shift) == (0.1, warmup, 3.0)
        assert config.model.weights is not None
        for source in (config.vae, config.text, config.model.weights):
            assert source.id == f"Efficient-Large-Model/SANA1.5_{size}_1024px_diffusers"
        assert config.model.weights.variant is None  # one set of weights, bf16
        assert config.model.weights.runs_in == ["bf16", "fp32"]


def test_a_precision_in_which_the_weights_fail_is_refused_with_the_reason(tmp_path: Path) -> None:
    for name, precision in (
        ("sana_600m_512", "bf16"),
        ("sana_600m_512", "bf16_pure"),
        ("sana_1600m_1024", "fp16"),
    ):
        with pytest.raises(ConfigError, match="runs_in") as caught:
            load(name, [f"train.precision={precision}"])
        assert "#109" in str(caught.value)
        assert load(name, [f"train.precision={precision}", "model.weights.runs_in=null"]).train.precision == precision
        load(name, [f"train.precision={precision}", "model.weights=null", "model.arch={}"])  # other weights
        moved = [f"train.precision={precision}", f"model.weights={tmp_path}"]  # a copy, or an export after training
        with pytest.raises(ConfigError, match="runs_in"):
            load(name, moved)
        free = load(name, [*moved, "model.weights.runs_in=null"]).model.weights
        assert free is not None and (free.id, free.runs_in) == (str(tmp_path), None)
    assert load("sana_600m_512", ["train.precision=fp16"]).train.precision == "fp16"
    assert load("sana_1600m_1024", ["train.precision=bf16_pure"]).train.precision == "bf16_pure"
    wrong = "model: {weights: {id: a/b, runs_in: []}}\n"
    assert "runs_in" in refusal(tmp_path, MINIMAL.replace("model: {weights: {id: some/model}}\n", wrong))


def test_shipped_configurations_name_one_revision_for_all_parts() -> None:
    for path in shipped():
        config = load(path)
        if config.model.weights is not None:
            revisions = {part.revision for part in (config.vae, config.text, config.model.weights)}
            assert len(revisions) == 1
            if path.stem in UNPINNED:
                assert revisions == {None} and "revision is not pinned" in path.read_text(encoding="utf-8")
            else:
                assert all(len(revision or "") == 40 for revision in revisions), path


@pytest.mark.parametrize("name", first_quick(*(path.stem for path in shipped())))
def test_every_shipped_configuration_trains(
    name: str, small_cache_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One optimizer step of everything that the file says of training, for a small model on a real cache."""
    import sana_pipe.stages.train
    from sana_pipe.train.training import metrics

    small = load("tiny").model.arch
    assert small is not None
    norm = "rms_norm_across_heads" if name.startswith("sana15") else None
    given = {**small, "num_layers": 2, "qk_norm": norm}
    overrides = ["model.weights=null", f"model.arch={given}".replace("None", "null")]
    run = [f"cache={small_cache_copy}", f"train.output={tmp_path / 'run'}", "train.steps=1", "train.device=cpu"]
    run += ["train.validation=null", "train.pictures=null"]  # the cache has no held-out part and no prompts
    if name.startswith("controlnet"):
        run.append("train.controlnet.layers=1")  # the small model has two blocks
        with pytest.raises(ConfigError, match="has no control records"):
            sana_pipe.stages.train.run(load(name, [*overrides, *run]), log=lambda line: None)
        assert not (tmp_path / "run").exists()
        monkeypatch.setattr(Controlled, "pictures", ("latent",))  # the picture is its own control
    if name.endswith("_prefer"):
        run.append("train.prefer.stop=null")  # it looks at held-out pairs
        with pytest.raises(ConfigError, match="has no rejected records"):
            sana_pipe.stages.train.run(load(name, [*overrides, *run]), log=lambda line: None)
        assert not (tmp_path / "run").exists()
        begin, prepare = Preferring.__init__, Preferring.prepare

        def without_records(self: Preferring, *given: Any) -> None:
            begin(self, *given)
            self.pictures = ()

        def prepared(self: Preferring, batch: Any, *given: Any) -> Any:  # the picture is its own rejected picture
            return prepare(self, replace(batch, pictures={"rejected": batch.latents}), *given)

        monkeypatch.setattr(Preferring, "__init__", without_records)
        monkeypatch.setattr(Preferring, "prepare", prepared)
    config = load(name, [*overrides, *run])
    report = sana_pipe.stages.train.run(config, log=lambda line: None)
    assert report.step == 1
    (row,) = metrics.read(tmp_path / "run/metrics.jsonl")
    assert row["lr"] == pytest.approx(config.train.optim.lr / config.train.optim.warmup_steps)
    assert (tmp_path / "run/tensorboard").exists() == (config.train.trackers == ["tensorboard"])


def test_a_dumped_configuration_loads_to_the_same(tmp_path: Path) -> None:
    for path in shipped():
        config = load(path)
        assert load(write(tmp_path, dump(config))) == config


def test_a_configuration_cannot_be_changed_in_place() -> None:
    config = load("sana_1600m_1024")
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]


def _sections(model: type[BaseModel], prefix: str = "") -> list[tuple[str, type[BaseModel]]]:
    sections = [(prefix, model)]
    for name, field in model.model_fields.items():
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                sections += _sections(inner, f"{prefix}{name}.")
    return sections


def test_every_section_refuses_unknown_keys_and_coercion() -> None:
    for prefix, model in _sections(Config):
        assert model.model_config.get("extra") == "forbid", prefix
        assert model.model_config.get("strict") is True, prefix


def test_every_option_and_section_is_documented() -> None:
    for name, field in option_fields():
        assert (field.description or "").strip().endswith((".", ")")), name
        section = section_of(field)
        assert section is None or (section.__doc__ or "").strip().endswith("."), name


def test_the_page_of_options_is_up_to_date() -> None:
    page = Path(__file__).parent.parent / "docs/configuration.md"
    assert page.read_text(encoding="utf-8") == sana_pipe.stages.config.markdown() + "\n", (
        "sana-pipe config --markdown > docs/configuration.md"
    )


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_the_printed_configuration_loads_to_the_same(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["train.ema={decay: 0.5}", "bucket.sources={a: {weight: 2}, b: {}}", "data.caption='#: -'", "cache='1'"]
    config, given = load_given(path, overrides)
    assert sana_pipe.stages.config.run(config, given) == 0
    printed = capsys.readouterr().out
    assert load(write(tmp_path, printed)) == config
    comments = [line for line in printed.splitlines() if line.lstrip().startswith("#")]
    assert max(map(len, comments)) <= 120


def test_the_origin_of_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, MINIMAL + "train: {steps: 7, optim: {lr: 1e-3}}\nencode: {storage: int8}\n")
    overrides = ["train.seed=3", "bucket.remainder=drop", "train.parallel={tp_size: 2}", "bucket.sources.a.weight=2"]
    sana_pipe.stages.config.run(*load_given(file, overrides), as_json=True)
    report = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in report["options"]}
    assert report["file"] == str(file)
    origins = {
        "train.steps": str(file),
        "train.optim.lr": str(file),
        "encode.storage.text": str(file),
        "train.optim.clip": "default",
        "train.seed": "--set",
        "bucket.remainder": "--set",
        "bucket.sources": "--set",
        "train.parallel.tp_size": "--set",
        "model.arch": "default",
    }
    assert {name: rows[name]["from"] for name in origins} == origins
    assert (rows["train.steps"]["value"], rows["train.steps"]["default"]) == (7, "10000")
    assert rows["vae.id"]["default"] is None
    assert load_given("tiny")[1].given_by("train.steps") == "shipped tiny.yaml"
    sana_pipe.stages.config.run(*load_given(file, ["train.seed=3"]), "train.seed")
    assert "set by --set]\n  seed: 3\n" in capsys.readouterr().out


def test_one_section_or_option_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    sana_pipe.stages.config.run(*load_given("tiny"), "train.optim")
    tree = from_yaml(capsys.readouterr().out)
    assert list(tree) == ["train"] and list(tree["train"]) == ["optim"]
    assert list(tree["train"]["optim"]) == list(OptimConfig.model_fields)
    with pytest.raises(ConfigError, match=r"train\.optim"):
        sana_pipe.stages.config.run(*load_given("tiny"), "train.optin")
    with pytest.raises(
        ConfigError, match=r"train\.controlnet\.layers is an option of train\.controlnet, which is null"
    ) as error:
        sana_pipe.stages.config.run(*load_given("tiny"), "train.controlnet.layers")
    assert "sana-pipe config train.controlnet --set train.controlnet={}" in str(error.value.fix)
    sana_pipe.stages.config.run(*load_given("tiny", ["train.controlnet={}"]), "train.controlnet.layers")
    with pytest.raises(ConfigError, match="no option"):
        sana_pipe.stages.config.run(*load_given("tiny"), "train.controlnet.layer")


def test_secrets_of_addresses_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    sana_pipe.stages.config.run(
        *load_given("tiny", ["cache='s3://user:secret@host/x'", "bucket.caches=['s3://user:secret@host/y']"])
    )
    said = capsys.readouterr().out
    assert "host/x" in said and "host/y" in said and "secret" not in said


KEYS = st.sampled_from(["id", "train", "optim", "lr", "buckets", "data", "model", "arch", "vae", "x"])
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


def test_weights_may_be_a_folder_alone(tmp_path: Path) -> None:
    for weights in (tmp_path, "OWNER/NAME"):
        start = load("sana_1600m_1024", [f"model.weights={weights}"]).model.weights
        assert start is not None and (start.id, start.revision, start.variant) == (str(weights), None, None)
    with pytest.raises(ConfigError, match=r"--set model\.arch=null"):
        load("tiny", ["model.weights=OWNER/NAME"])
    assert load("tiny", ["model.weights=OWNER/NAME", "model.arch=null"]).model.arch is None


@given(TREES)
def test_any_tree_either_loads_or_is_refused_in_words(tmp_path_factory: pytest.TempPathFactory, tree: object) -> None:
    path = write(tmp_path_factory.mktemp("any"), yaml.safe_dump(tree, allow_unicode=True))
    try:
        load(path)
    except ConfigError as error:
        assert str(path) in str(error)


def test_options_are_few() -> None:
    """Each one is a question to everybody who reads the page: an option that nobody sets is a constant."""
    options = [name for name, field in option_fields() if section_of(field) is None]
    assert len(options) <= 153, len(options)
