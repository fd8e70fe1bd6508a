"""Which command reads which option: the table against the configuration's fields and what the stages really read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sana_pipe import config as configuration
from sana_pipe.base.config import Section
from sana_pipe.base.errors import ConfigError
from sana_pipe.cli import cli
from sana_pipe.config import READS, Config, load, reads
from tests.support.messages import naming

PATHS = configuration._all_paths()
OPTIONS = [path for path in PATHS if not any(other.startswith(path + ".") for other in PATHS)]


def test_every_option_is_read_by_a_command_and_every_entry_is_an_option() -> None:
    assert [option for option in OPTIONS if not any(reads(command, option) for command in READS)] == []
    assert {name for names in READS.values() for name in names} <= set(PATHS)
    assert READS.keys() <= cli.commands.keys()


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("train", "bucket.batch=24"),
        ("train", "bucket={batch: 24}"),
        ("train", "data={resolution: 64, decoder: pillow}"),
        ("train", "data.caption_weights={long: 1}"),
        ("bucket", "train.steps=3"),
        ("bucket", "data.caption_field=long"),
        ("snapshots diff", "bucket.batch=24"),
        ("export", "bucket.batch=3"),
        ("status", "encode.device=cpu"),
    ],
)
def test_an_option_that_the_command_does_not_read_is_refused(command: str, given: str) -> None:
    with pytest.raises(ConfigError, match=f"sana-pipe {command} does not read"):
        load("tiny", [given], command)
    load("tiny", [given])


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("train", "data={resolution: 64, buckets: [[64, 64]]}"),
        ("train", "train.optim={lr: 1e-3}"),
        ("train", "model.arch.num_layers=2"),
        ("train", "mirror.gib=2"),
        ("bucket", "bucket.pack_mib=8"),
        ("bucket", "bucket.sources.photos.weight=2"),
        ("encode", "encode.workers=2"),
        ("encode", "encode.storage=int8"),
        ("verify", "encode.device=cpu"),
        ("gc", "cache=elsewhere"),
        # what these commands read only if pictures are drawn, damage is repaired
        ("train", "sample={steps: 3, guidance: 5.0, seed: 1}"),
        ("check", "train.precision=fp32"),
        ("check", "model.arch.num_layers=2"),
        ("plan", "text.max_length=100"),
        ("plan", "bucket={batch: 4, batch_multiple: 2, resolutions: []}"),
        ("sample", "vae.dtype=tf32"),
        ("sample", "encode.device=cpu"),
        ("sample", "text.max_length=100"),
        ("sample", "data.resolution=64"),
        ("report", "vae.dtype=tf32"),
        ("report", "encode.device=cpu"),
        ("view", "data.background=[0, 0, 0]"),
        ("verify", "bucket.caches=[elsewhere]"),
        ("verify", "encode.workers=1"),
        ("verify", "text.max_length=100"),
    ],
)
def test_an_option_that_it_reads_is_taken(command: str, given: str) -> None:
    if "buckets" in given:
        with pytest.raises(ConfigError, match=naming("data.buckets", "sana-pipe train")):
            load("tiny", [given], command)
        given = "data={resolution: 64}"
    load("tiny", [given], command)


def test_a_misspelt_option_is_still_named_as_such() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'bucket\.batch'"):
        load("tiny", ["bucket.bach=24"], "train")


@pytest.mark.parametrize(
    ("command", "given", "near"),
    [
        ("encode", "train.device=cpu", "encode.device"),
        ("train", "bucket.batch=24", None),
    ],
)
def test_a_refused_option_names_the_nearest_alone(command: str, given: str, near: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        load("tiny", [given], command)
    assert refused.value.expected == near
    assert str(refused.value.fix).startswith("leave it out")


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("train --set bucket.batch=24", "train"),
        ("verify --set train.steps=1", "verify"),
        ("snapshots diff a b --set train.steps=1", "snapshots diff"),
        ("gc --set train.steps=1", "gc"),
    ],
)
def test_the_command_line_says_what_it_is_about_to_do(words: str, refused: str) -> None:
    result = CliRunner().invoke(cli, [*words.split(), "--config", "tiny"])
    assert isinstance(result.exception, ConfigError)
    assert f"sana-pipe {refused} does not read" in str(result.exception)


def test_the_table_holds_what_the_stages_really_read(
    small_cache_copy: Path,
    make_config: Callable[..., Config],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every stage runs with a configuration whose fields note who reads them."""
    import sana_pipe.stages.bucket
    import sana_pipe.stages.encode
    import sana_pipe.stages.export
    import sana_pipe.stages.gc
    import sana_pipe.stages.inspect
    import sana_pipe.stages.pack
    import sana_pipe.stages.report
    import sana_pipe.stages.sample
    import sana_pipe.stages.snapshots
    import sana_pipe.stages.status
    import sana_pipe.stages.train
    import sana_pipe.stages.verify
    import sana_pipe.stages.view

    result: dict[str, set[str]] = defaultdict(set)
    places: dict[type, str] = {}  # by class: parts of a configuration are copied and replaced on the way
    command = ""
    read = object.__getattribute__

    def noted(section: Any, name: str) -> Any:
        value = read(section, name)
        if command and type(section) in places and (option := places[type(section)] + name) in OPTIONS:
            result[command].add(option)
        return value

    def place(section: Any, prefix: str) -> None:
        places[type(section)] = prefix
        for name, value in vars(section).items():
            if isinstance(value, Section):
                place(value, f"{prefix}{name}.")

    monkeypatch.setattr(Section, "__getattribute__", noted)
    few = ["train.steps=1", "train.save_every=1", "train.optim.warmup_steps=0", "train.ema={}", "sample.steps=1"]

    def run(words: str, stage: Callable[..., Any], **options: Any) -> None:
        nonlocal command
        config = make_config(tmp_path, *few)
        places.clear()
        place(config, "")
        command = words
        try:
            stage(config, **options)
        finally:
            command = ""

    run("encode", sana_pipe.stages.encode.run, data=str(photos))
    run("bucket", sana_pipe.stages.bucket.run, name="x")
    run("bucket", sana_pipe.stages.pack.run, snapshot="x", name="y")
    run("train", sana_pipe.stages.train.run)
    run("export", sana_pipe.stages.export.run, checkpoint="auto", out=tmp_path / "export")
    monkeypatch.setattr(
        sana_pipe.stages.sample, "decode_in_subprocess", lambda *_: (_ for _ in ()).throw(ConfigError("enough"))
    )
    with pytest.raises(ConfigError, match="enough"):
        run("sample", sana_pipe.stages.sample.run, checkpoint="auto", snapshot=None, out=tmp_path / "drawn", count=1)
    run("status", sana_pipe.stages.status.run)
    run("verify", sana_pipe.stages.verify.run)
    run("gc", sana_pipe.stages.gc.run, yes=False, older_than_hours=1)
    run("snapshots", sana_pipe.stages.snapshots.run)
    run("inspect", sana_pipe.stages.inspect.run)
    run("view", sana_pipe.stages.view.run, text="astronaut", out=tmp_path / "view.html")
    run("report", sana_pipe.stages.report.run, out=tmp_path / "report.html")
    odd = {words: sorted(o for o in options if not reads(words, o)) for words, options in result.items()}
    assert {words: options for words, options in odd.items() if options} == {}
    assert {"train.steps", "train.optim.lr", "data.resolution"} <= result["train"]
    assert "cache" in result["status"] and "train.steps" not in result["status"]
