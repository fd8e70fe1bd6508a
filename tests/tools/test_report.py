"""The numbers of `inspect` and the page of `report`: equal to the snapshot's and the journal's; self-contained."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import math
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.torch import save_file

from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.config import Config, load
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.stages import bucket, encode, inspect, report, train, view
from sana_pipe.tools.demo import small_models
from sana_pipe.tools.reporting import (
    data_figures,
    pair_page,
    plots,
    run_figures,
    run_plots,
    sample_figures,
    sample_names,
    sample_view,
)
from sana_pipe.tools.reporting import page as reporting_page
from sana_pipe.tools.reporting.figures import collect as figures_of
from sana_pipe.tools.reporting.sample_figures import SampleFigures
from sana_pipe.tools.reporting.sections import SECTIONS
from sana_pipe.tools.reporting.source_pictures import SourcePictures
from sana_pipe.train.training import metrics
from tests.support import drawings, synthetic, tiny_cache
from tests.support.messages import naming
from tests.support.reports import collect

HOSTILE = "<script>alert('x')</script> & \"quoted\" <img src=http://evil.example/x.png onerror=alert(1)>"
CAPTIONS = ("A red square", HOSTILE, "a blue field " * 200, "a yellow wall", "a grey road", "a white door")
SMALL = 40


@dataclass(frozen=True)
class Made:
    """A cache with two named snapshots, rejects and doubles, a run on the second, and what `bucket` reported."""

    root: Path
    config: Config
    reports: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("report")
    pictures = root / "photos"
    pictures.mkdir()
    generator = np.random.default_rng(0)

    def add(name: str, caption: str, height: int, width: int) -> None:
        pixels = generator.integers(0, 255, (height // 8, width // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
        Image.fromarray(pixels).save(pictures / f"{name}.png")
        (pictures / f"{name}.txt").write_text(caption)

    for i, caption in enumerate(CAPTIONS):
        add(f"{i}", caption, *((64, 64), (48, 80), (72, 64))[i % 3])
    small_models.make_all(root / "tiny", [], CAPTIONS, instruction="Draw this: ", steps=0, flow_shift=3.0)
    config = load(
        "tiny",
        [
            f"cache={root / 'cache'}",
            f"vae.id={root / 'tiny'}",
            f"text.id={root / 'tiny'}",
            "text.instruction='Draw this: '",
            f"train.output={root / 'run'}",
            "train.steps=3",
            "train.log_every=1",
            "train.optim.warmup_steps=0",
            "train.ema={}",
            "model.arch.num_layers=2",
            "bucket.batch=4",
            f"data.min_side={SMALL}",
            "encode.max_reject_rate=1",
        ],
    )
    reports = {}
    shutil.copy(pictures / "0.png", pictures / "double.png")
    (pictures / "double.txt").write_text(CAPTIONS[0])
    for name in ("round1", "round2"):
        if name == "round2":
            add("new", "a new picture", 64, 64)
            add("small", "too small", 32, 32)
            (pictures / "broken.png").write_bytes(b"no picture")
            (pictures / "broken.txt").write_text("broken")
        encode.run(config, str(pictures))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bucket, "_print", lambda report, as_json, name=name: reports.update({name: report}))
            bucket.run(config, name=name)
    train.run(config)
    return Made(root, config, reports)


@pytest.fixture
def run_copy(made: Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.root / "run", tmp_path / "run"))


def tokens_of(snapshot: Snapshot, row: int) -> list[int]:
    return [caption.rows for caption in snapshot.sample(row).captions]


def journal(folder: Path, *rows: dict[str, Any] | str) -> Path:
    """A run directory with these rows; texts are written as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def validation(step: int, loss: float) -> dict[str, Any]:
    return {
        "event": "validation",
        "step": step,
        "loss": loss,
        "by_sigma": {"0.0625": loss - 0.25, "0.5": loss + 1},
        "by_bucket": {"64x64": loss},
        "by_age": {"old": loss - 0.5, "new": None},
        "samples": 2,
        "ema_loss": loss + 0.5,
        "seconds": 0.25,
    }


# ---------------------------------------------------------------------------------------------------- numbers


def test_of_a_scan_only_what_is_shown_is_read(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan's captions are most of its bytes."""
    asked, table = list[set[str]](), Cache.table

    def noted(cache: Cache, digest: str, columns: list[str] | None = None) -> Any:
        asked.append(set(columns or ["captions"]))
        return table(cache, digest, columns)

    monkeypatch.setattr(Cache, "table", noted)
    collect(made.config)
    cache = Cache(made.config.cache)
    sample_figures.sample_figures(cache, cache.open_snapshot(), 0)
    assert len(asked) == 3 and "captions" not in set.union(*asked)


def test_the_numbers_of_a_snapshot_are_those_that_bucket_printed(made: Made) -> None:
    figures, cache, snapshot = collect(made.config)
    assert cache is not None and snapshot is not None
    data, printed = figures["snapshot"], made.reports["round2"]
    assert (data["id"], data["samples"], data["sources"]) == (
        printed["snapshot"],
        printed["samples"],
        printed["sources"],
    )
    assert data["steps_per_epoch"] == printed["steps_per_epoch"]
    assert [{**row, "crop": pytest.approx(row["crop"])} for row in printed["buckets"]] == data["buckets"]
    assert {(entry["reason"], entry["samples"]) for entry in data["left_out"]} == {
        (entry["reason"], entry["samples"]) for entry in printed["left_out"]
    }
    assert {(e["samples"], tuple(x["item"] for x in e["examples"])) for e in data["rejects"]} == {
        (1, ("small.png",)),
        (1, ("broken.png",)),
    }
    assert set(data["names"]) >= {"round2", "latest"}
    crop = data["crop"]
    assert sum(crop["samples"]) == data["samples"] and crop["largest"] > crop["mean"] > 0
    assert crop["enlarged"] == 0, "all have at least the size of their bucket"
    assert data["duplicates"]["pictures"] == {"entries": 8, "distinct": 7, "repeated": 2, "most": 2}
    assert data["duplicates"]["captions"]["repeated"] == 2


def test_caption_lengths_and_bytes_are_those_of_the_records(made: Made) -> None:
    _, cache, snapshot = collect(made.config, snapshot="round2")
    assert cache is not None and snapshot is not None
    captions = data_figures.snapshot_figures(cache, snapshot).captions
    rows = [tokens for row in range(len(snapshot)) for tokens in tokens_of(snapshot, row)]
    assert captions.by_tokens == np.bincount(rows, minlength=captions.max_length + 1).tolist()
    assert captions.mean_tokens == pytest.approx(np.mean(rows))
    assert captions.p50 == sorted(rows)[(len(rows) - 1) // 2]
    assert captions.p95 == sorted(rows)[math.ceil(0.95 * len(rows)) - 1]
    assert captions.at_max_length == 1 and captions.share_at_max_length == pytest.approx(1 / len(rows))
    storage = data_figures.snapshot_figures(cache, snapshot).storage
    for kind in ("latent", "text"):
        folder = made.root / "cache" / "shards" / snapshot.head.encodings_by_kind[kind].name
        assert storage.kinds[kind].bytes == sum(path.stat().st_size for path in folder.rglob("*.tar"))


def test_samples_without_scan_or_pictures_have_figures(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path / "cache")
    data = data_figures.snapshot_figures(cache, cache.open_snapshot())
    assert data.crop is None and data.captions.per_sample == {"1": 42, "2": 21}


def test_new_samples_are_those_that_the_earlier_snapshot_lacked(made: Made) -> None:
    new = collect(made.config)[0]["snapshot"]["new"]
    assert (new["earlier"], new["new"], new["old"], new["removed"]) == (made.reports["round1"]["snapshot"], 1, 7, 0)
    assert new["sources"] == {"photos": {"new": 1, "old": 7}}
    assert sum(row["new"] for row in new["buckets"]) == 1
    snapshot = Cache(made.config.cache).open_snapshot()
    tokens = {snapshot.source_item(row)[1]: tokens_of(snapshot, row)[0] for row in range(len(snapshot))}
    of_new = tokens.pop("new.png")
    assert new["mean_tokens"] == {"new": of_new, "old": pytest.approx(np.mean([*tokens.values()]))}
    figures = collect(made.config, snapshot="round1")[0]
    assert figures["snapshot"]["new"] is None and "new" in figures["missing"]


def test_several_chunks_give_the_numbers_of_one(made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = collect(made.config)[0]["snapshot"]
    shutil.copytree(made.root / "cache", tmp_path / "cache")
    monkeypatch.setattr("sana_pipe.data.snapshots.assemble.CHUNK_ROWS", 3)
    config = made.config.model_copy(update={"cache": str(tmp_path / "cache")})
    bucket.run(config, name="chunks")
    data = collect(config, snapshot="chunks")[0]["snapshot"]
    assert data["new"]["new"] == 0
    for name in ("buckets", "sources", "captions", "duplicates", "left_out", "rejects"):
        assert data[name] == expected[name], name
    assert data["crop"]["samples"] == expected["crop"]["samples"]


def test_the_numbers_of_a_run_are_those_of_its_journal(made: Made, run_copy: Path) -> None:
    with (run_copy / "metrics.jsonl").open("a") as file:
        for step in (1, 3):
            file.write(json.dumps(validation(step, 2.0 / step)) + "\n")
        file.write('{"step": 4, "los')
    rows = metrics.read(run_copy / "metrics.jsonl")
    [part] = collect(made.config, run=run_copy)[0]["run"]["parts"]
    assert (part["steps"], part["rows"], part["attempts"]) == (3, 3, 1)
    assert part["curves"]["loss"] == {"step": [1, 2, 3], "value": [row["loss"] for row in rows]}
    assert part["mean"]["images_per_s"] == pytest.approx(np.mean([row["images_per_s"] for row in rows]))
    assert part["snapshots"] == [made.reports["round2"]["snapshot"]]
    assert "memory_gib" not in part["curves"], "null on the CPU"
    checks = part["validation"]
    assert checks["loss"] == {"step": [1, 3], "value": [2.0, pytest.approx(2 / 3)]}
    assert list(checks["by_sigma"]) == ["0.0625", "0.5"] and checks["by_sigma"]["0.5"]["value"][0] == 3.0
    assert checks["ema_loss"]["value"][0] == 2.5 and checks["by_bucket"]["64x64"]["step"] == [1, 3]
    assert checks["by_age"].keys() == {"old"} and checks["by_age"]["old"]["value"][0] == 1.5


def test_rows_of_an_attempt_that_was_taken_back_do_not_count(tmp_path: Path) -> None:
    folder = journal(
        tmp_path / "run",
        {"event": "start", "step": 0, "snapshot": "a", "processes": 1},
        {"step": 1, "loss": 1.0},
        validation(1, 1.0),
        {"step": 2, "loss": 9.0},
        validation(2, 9.0),
        "[1]\n5\n\n",
        {"event": "start", "step": 1, "snapshot": "a", "processes": 2},
        {"step": 2, "loss": 3.0},
        '{"step": 3, "loss": Infin',
    )
    [part] = run_figures.run_figures(folder).parts
    assert part.curves["loss"].value == [1.0, 3.0] and part.attempts == 2
    assert part.processes == 2, "of the last attempt"
    assert part.validation is not None and part.validation.loss == run_figures.Curve([1], [1.0])
    assert [row["loss"] for row in metrics.read(folder / "metrics.jsonl")] == [1.0, 3.0], "no rows of validations"


def test_a_long_journal_is_thinned_without_hiding_a_spike() -> None:
    steps = np.arange(1, 100_001, dtype=float)
    values = np.ones(len(steps))
    values[70_000] = 50.0
    curve = run_figures.thinned(steps, values)
    assert curve.low is not None and curve.high is not None
    assert {len(column) for column in (curve.step, curve.value, curve.low, curve.high)} == {run_figures.POINTS}
    assert curve.step[-1] == 100_000 and max(curve.high) == 50.0 and min(curve.low) == 1.0
    assert np.mean(curve.value) == pytest.approx(values.mean())


def test_each_plot_has_a_column_of_the_journal_and_a_section(made: Made) -> None:
    [row, *_] = metrics.read(made.root / "run" / run_figures.JOURNAL)
    columns = [plot.column for plot in run_plots.PLOTS]
    assert set(columns) - row.keys() == {"loss_scale"}, "which only fp16 has"
    assert {*run_figures.NOT_PLOTTED} <= row.keys()
    assert len({plot.title for plot in run_plots.PLOTS}) == len(set(columns)) == len(columns)
    assert {plot.section for plot in run_plots.PLOTS} <= {section.id for section in SECTIONS}


def test_another_plot_is_a_row_of_one_table(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = run_plots.RunPlot("padded_tokens", "Padding", "rows", "throughput", compared=True)
    monkeypatch.setattr(run_plots, "PLOTS", (*run_plots.PLOTS, more))
    run, out = made.root / "run", tmp_path / "report.html"
    part = collect(made.config)[0]["run"]["parts"][0]
    assert part["curves"]["padded_tokens"]["value"] == [
        row["padded_tokens"] for row in metrics.read(run / run_figures.JOURNAL)
    ]
    report.run(made.config, out, pictures=False, compare=run)
    checked(out)
    throughput = out.read_text().partition('<section id="throughput">')[2].partition("</section>")[0]
    assert "<figcaption>Padding</figcaption>" in throughput
    assert "<figcaption>Padding: both runs</figcaption>" in out.read_text()


def test_rounds_stand_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    for name, hour in (("b-first", "01"), ("a-second", "02")):
        start = {"event": "start", "step": 0, "snapshot": name, "time": f"2026-01-01T{hour}:00:00+00:00"}
        journal(tmp_path / "run" / name, start, {"step": 1, "loss": 1.0})
        (tmp_path / "run" / name / "summary.json").write_text(json.dumps({"name": name, "steps": 1}))
    (tmp_path / "run" / "checkpoints").mkdir()
    parts = run_figures.run_figures(tmp_path / "run").parts
    assert [(part.name, part.summary and part.summary["steps"]) for part in parts] == [("b-first", 1), ("a-second", 1)]


def test_the_runs_that_a_run_began_from_are_parts_of_it(made: Made, tmp_path: Path) -> None:
    """Also where they lie elsewhere; one that is gone, and a damaged record, are named; a circle ends."""
    folders = [tmp_path / "elsewhere" / "first", tmp_path / "runs" / "second", tmp_path / "runs" / "third"]
    for hour, (folder, origin) in enumerate(zip(folders, [None, *folders], strict=False)):
        start = {"event": "start", "step": 0, "time": f"2026-01-01T0{hour}:00:00+00:00"}
        journal(folder, start, {"step": 1, "loss": 1.0 + hour})
        (folder / "config.yaml").write_text("train: {}\n")
        if origin is not None:
            values = {"checkpoint": str(origin / "checkpoints" / "step-00000001")}
            (folder / run_figures.ORIGIN).write_text(json.dumps(values))

    def names(**which: Any) -> list[str]:
        figures = figures_of(folders[2], None, run=folders[2], **which)[0]
        assert figures.run is not None and ("earlier" in figures.missing) == bool(figures.run.lost)
        return [part.name for part in figures.run.parts]

    assert names() == ["first", "second", "third"]
    assert names(compare=folders[0]) == ["third"], "a comparison is with what was compared"
    both = run_figures.run_figures(tmp_path / "runs", earlier=True)
    assert [part.name for part in both.parts] == ["first", "second", "third"] and not both.lost
    (folders[0] / run_figures.ORIGIN).write_text(json.dumps({"checkpoint": str(folders[2] / "checkpoints" / "x")}))
    assert names() == ["first", "second", "third"]
    shutil.rmtree(folders[0])
    assert names() == ["second", "third"]
    assert str(folders[0]) in collect(made.config, run=folders[2])[0]["missing"]["earlier"]["what"]
    assert report.run(made.config, tmp_path / "page.html", run=folders[2], pictures=False) == 0
    assert str(folders[0]) in (tmp_path / "page.html").read_text()
    (folders[1] / run_figures.ORIGIN).write_text("{")
    assert names() == ["second", "third"]
    moved = tmp_path / "moved"
    (folders[1] / run_figures.ORIGIN).unlink()
    (tmp_path / "runs").rename(moved)
    assert not run_figures.run_figures(moved, earlier=True).lost, "the run next to it is the one it began from"


def test_a_page_without_a_named_run_shows_the_snapshot_of_the_run(made: Made, tmp_path: Path) -> None:
    first = made.reports["round1"]["snapshot"]
    output = journal(tmp_path / "output", {"event": "start", "step": 0, "snapshot": first})
    train = made.config.train.model_copy(update={"output": str(output)})
    data = collect(made.config.model_copy(update={"train": train}))[0]["snapshot"]
    assert data is not None and data["id"] == first


def test_what_is_missing_is_named_with_its_command(made: Made, tmp_path: Path) -> None:
    """Without a cache, a run, validation; with an empty journal, and a snapshot that is gone."""
    elsewhere = made.config.model_copy(update={"cache": str(tmp_path / "none")})
    figures = collect(elsewhere, run=made.root / "run")[0]
    assert figures["snapshot"] is None and figures["run"]["parts"][0]["rows"] == 3
    assert "encode" in figures["missing"]["snapshot"]["command"]
    assert {"validation", "rounds"} <= set(figures["missing"])
    empty = collect(made.config, run=journal(tmp_path / "empty"))[0]
    assert empty["run"]["parts"][0]["rows"] == 0 and "losses" in empty["missing"]
    other = collect(made.config, run=journal(tmp_path / "other", {"event": "start", "step": 0, "snapshot": "f" * 32}))
    assert "f" * 12 in other[0]["missing"]["trained-on"]["what"]
    first = made.reports["round1"]["snapshot"]
    earlier = journal(tmp_path / "earlier", {"event": "start", "step": 0, "snapshot": first})
    data = collect(made.config, run=earlier)[0]["snapshot"]
    assert data is not None and data["id"] == first, "that of the run, not the newest"
    with pytest.raises(CacheError, match="nowhere"):
        collect(made.config, snapshot="nowhere")
    with pytest.raises(UserError, match=naming(tmp_path / "none")):
        collect(made.config, run=tmp_path / "none")


def test_a_scan_that_is_missing_leaves_the_crop_loss_out(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.root / "cache", tmp_path / "cache")
    cache = Cache(tmp_path / "cache")
    for path in (tmp_path / "cache" / "tables").rglob("*.parquet"):
        path.unlink()
    data = data_figures.snapshot_figures(cache, cache.open_snapshot())
    assert data.crop is None and data.crop_missing
    assert all(row.crop is None for row in data.buckets) and data.samples == 8
    assert all(entry.examples == [] for entry in data.rejects)


def test_inspect_prints_the_same_numbers(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.run(made.config, as_json=True) == 0
    figures = json.loads(capsys.readouterr().out)
    again = json.loads(json.dumps(collect(made.config)[0]))
    assert {**figures, "cache": None} == {**again, "cache": None}, "its rates depend on the time"
    assert inspect.run(made.config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Snapshot:" in lines and any(line.startswith("  8 samples in ") for line in lines)
    heads, values = (lines[lines.index("Run:") + place].split() for place in (2, 3))
    assert (heads[:2], values[:2]) == (["part", "steps"], ["run", "3"])
    assert any(
        line.startswith("  Held-out loss: ") and "sana-pipe" in line for line in lines[lines.index("Missing:") :]
    )


def test_foreign_text_commands_no_terminal(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "x\nfix: rm\x1b[2J\r\x9b1m"

    def collected(*given: Any, **which: Any) -> Any:
        figures, *opened = figures_of(*given, **which)
        assert figures.snapshot is not None
        figures.snapshot.left_out[0] = replace(figures.snapshot.left_out[0], reason=hostile)
        figures.missing["validation"] = replace(figures.missing["validation"], what=hostile)
        return figures, *opened

    monkeypatch.setattr(inspect, "collect", collected)
    assert inspect.run(made.config) == 0
    printed = capsys.readouterr().out
    assert "fix: rm" in printed and not any(line.startswith("fix:") for line in printed.splitlines())
    assert not set("\x1b\r\x9b") & set(printed)


def test_two_runs_differ_in_these_options(made: Made, run_copy: Path) -> None:
    options = yaml.safe_load((run_copy / "config.yaml").read_text())
    options["train"]["seed"] = 7
    (run_copy / "config.yaml").write_text(yaml.safe_dump(options))
    compared = collect(made.config, compare=run_copy)[0]["compare"]
    assert compared["options"] == [{"option": "train.seed", "here": made.config.train.seed, "there": 7}]
    (run_copy / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"config\.yaml"):
        collect(made.config, compare=run_copy)


# ---------------------------------------------------------------------------------------------------- the page

VOID = {"meta", "img", "br", "hr", "link", "input"}


@dataclass
class Page(HTMLParser):
    """What a page contains; a tag that is not closed, or closed by another, is an error."""

    text: str = ""
    open: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.tags.append((tag, values))
        self.ids += [values["id"]] if "id" in values else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def sections(self) -> list[str]:
        return [values["id"] for tag, values in self.tags if tag == "section"]

    @property
    def shown(self) -> str:
        return " ".join(" ".join(self.words).split())


def checked(path: Path) -> Page:
    """The page, after the checks that hold for every page: well formed, self-contained, pictures and plots whole."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "form", "style-src"}
    for tag, values in page.tags:
        assert not any(name.startswith("on") for name in values), (tag, values)
        for name in ("src", "href", "srcset", "action", "xlink:href"):
            if name in values:
                assert values[name].startswith("data:image/webp;base64," if name == "src" else "#"), (tag, values)
        if values.get("href"):
            assert values["href"][1:] in page.ids
        if tag == "img":
            assert values["alt"]
            with Image.open(io.BytesIO(base64.b64decode(values["src"].partition(",")[2]))) as picture:
                picture.load()
                assert picture.size == (int(values["width"]), int(values["height"]))
        if "aria-labelledby" in values:
            assert set(values["aria-labelledby"].split()) <= set(page.ids)
    outside = re.sub(r"data:image/webp;base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.search(r"(url\(|@import|https?:)", outside)
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        root = ElementTree.fromstring(drawing)
        assert root.find("title").text and root.find("desc").text  # type: ignore[union-attr]
        numbers = " ".join(v for node in root.iter() for k, v in node.attrib.items() if k in ("points", "x", "y", "d"))
        assert "nan" not in numbers and "inf" not in numbers
    return page


@pytest.fixture(scope="module")
def whole(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about a run that has everything: validation, a plan, memory, two rounds; compared with another run."""
    root = tmp_path_factory.mktemp("whole")
    for i, name in enumerate(("first", "second")):
        folder = Path(shutil.copytree(made.root / "run", root / "chain" / name))
        with (folder / "metrics.jsonl").open("a") as file:
            for step in (1, 2, 3):
                file.write(json.dumps(validation(step, 2.0 / step + i)) + "\n")
                row = {"step": step, "loss": 1.0 / step, "memory_gib": 7.5, "reserved_gib": 8.0, "data_wait": 0.01}
                row |= {"mfu": 0.25}
                file.write(json.dumps({**row, "images_per_s": 10.0, "lr": 1e-4, "grad_norm": 0.5}) + "\n")
        (folder / "summary.json").write_text(json.dumps({"name": name, "steps": 3, "validation": {"new": 0.25}}))
        plan = {"kinds": {"weights": 3 << 30}, "total": 5 << 30, "memory": 24 << 30}
        measured = {"memory_gib_predicted": 5.0, "memory_gib": 7.5}
        (folder / "prediction.json").write_text(json.dumps({"prediction": plan, "until_step": 2, "measured": measured}))
        for step in (1, 2):
            drawings.paint(drawings.draw(folder, step, tiny_cache.encodings()[0]), shade=100 * step)
    out = root / "page" / "report.html"
    assert report.run(made.config, out, run=root / "chain", compare=made.root / "run") == 0
    return out


def test_every_section_is_on_the_page(made: Made, whole: Path) -> None:
    page = checked(whole)
    absent = ("pictures", "adapter", "controls-and-masks", "visits", "alike", "gallery", "trained-on", "earlier")
    names = [section.id for section in SECTIONS if section.id not in absent]
    assert page.sections == [*names, "missing"]
    assert page.sections[0] == "progress", "before all data"
    assert "Decoded latents: no latents were decoded. sana-pipe report --gallery 8" in page.shown
    assert "overflow-wrap: anywhere" not in whole.read_text(encoding="utf-8"), "words of narrow cells stay whole"
    assert whole.stat().st_size < 1 << 20


def test_the_page_shows_the_numbers_of_the_snapshot_and_the_journal(made: Made, whole: Path) -> None:
    shown = checked(whole).shown
    data = collect(made.config)[0]["snapshot"]
    assert data["id"] in shown and f"{data['samples']} samples in {len(data['buckets'])} buckets" in shown
    for row in data["buckets"]:
        assert f"{row['height']}x{row['width']} {row['samples']} {row['batch']} {row['steps']:.2f}" in shown
    assert f"{data['crop']['mean']:.1%} of a picture's area" in shown
    assert f"{data['captions']['mean_tokens']:.1f} tokens on average" in shown
    assert "1 new samples, 7 old ones" in shown
    assert "predicted in total 5.0 GiB" in shown and "7.5 GiB" in shown
    assert "loss of the last row 0.3333 0.3333" in shown and "summary: validation.new 0.25 0.25" in shown
    assert "held-out loss, last 0.6667 1.667" in shown
    assert "Held-out loss by age" in shown and "old samples" in shown and "new samples (" not in shown
    losses = [row["loss"] for row in metrics.read(made.root / "run" / "metrics.jsonl")]
    first, last, low, high = (f"{value:.4g}" for value in (losses[0], losses[-1], min(losses), max(losses)))
    assert f"run: from {first} to {last}, lowest {low}, highest {high}" in shown, "the description of the plot"
    for percent in (25, 1):  # MFU and data wait
        assert f"chain: from {percent} to {percent}, lowest {percent}, highest {percent}" in shown
    assert f"{data['samples']} in {len(data['buckets'])} buckets" in shown, "one of the numbers above everything"
    for entry in data["left_out"]:
        assert entry["reason"] in shown


def test_rounds_stand_behind_one_another_on_the_axis_of_the_pictures(whole: Path) -> None:
    """Two rounds of three steps each, drawn after steps 1 and 2 of each."""
    text = whole.read_text(encoding="utf-8")
    root = ElementTree.fromstring(
        re.findall(r'<svg[^>]*"training-loss-and-held-out-loss-1000-t.*?</svg>', text, flags=re.DOTALL)[0]
    )
    middle = str((plots.LEFT + plots.WIDE - plots.RIGHT) // 2)
    assert [node.get("x1") for node in root.iter("line") if node.get("class") == "mark"] == [str(plots.LEFT), middle]
    assert {"first", "second"} <= {node.text for node in root.iter("text")}
    for line in root.iter("polyline"):
        across = [float(point.partition(",")[0]) for point in str(line.get("points")).split()]
        assert across == sorted(across) and across[-1] <= plots.WIDE - plots.RIGHT
    at = [(int(first), int(span)) for first, span in re.findall(r"--from: (\d+); --span: (\d+)", text)]
    assert len(at) == 8 and at[:4] == at[4:] and all(b[0] >= a[0] + a[1] for a, b in pairwise(at[:4]))
    assert sum(at[0]) < 168 * 2 / 6 < at[1][0] + at[1][1] / 2 + 21 and at[3][0] + at[3][1] / 2 > 168 / 2


def test_runs_of_one_name_are_told_apart_by_their_folders(made: Made, run_copy: Path, tmp_path: Path) -> None:
    report.run(made.config, tmp_path / "report.html", run=made.root / "run", compare=run_copy)
    shown = checked(tmp_path / "report.html").shown
    assert all(f"{folder}: from " in shown for folder in (made.root / "run", run_copy))


def test_a_thumbnail_is_never_larger_than_its_picture(made: Made) -> None:
    photos = SourcePictures(made.config.data, Cache(made.config.cache))
    sizes = [
        each and each.size
        for each in (photos.thumbnail("photos", "small.png"), photos.thumbnail("photos", "5.png", 36))
    ]
    assert sizes == [(32, 32), (32, 36)]


def test_rejects_are_shown_where_they_can_still_be_read(made: Made, whole: Path) -> None:
    page = checked(whole)
    pictures = {values["alt"] for tag, values in page.tags if tag == "img"}
    assert (
        pictures - {alt for alt in pictures if re.search(r"step \d", alt)} == {"small.png"}
        and "broken.png: can no longer be read" in page.shown
    )


def sliders(page: Page) -> dict[str, list[tuple[str, bool, str, str]]]:
    """By name of the radio buttons: (text of the label, whether it is chosen, caption, picture) of each frame."""
    found: dict[str, list[tuple[str, bool, str, str]]] = {}
    frames = re.findall(
        r'<input type="radio" name="([^"]+)" id="([^"]+)"( checked)?><label for="([^"]+)">([^<]*)</label>'
        r'<figure[^>]*>(?:<img src="([^"]+)"[^>]*>)?\s*<figcaption>([^<]*)</figcaption></figure>',
        page.text,
    )
    assert len(frames) == [values.get("type") for tag, values in page.tags if tag == "input"].count("radio")
    for name, identity, chosen, label_of, label, data, caption in frames:
        assert label_of == identity
        found.setdefault(name, []).append((label, bool(chosen), caption, data))
    return found


def red(data: str) -> int:
    with Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))) as picture:
        return picture.convert("RGB").getpixel((5, 5))[0]  # type: ignore[index, return-value]


def test_pictures_over_time_of_each_prompt_and_run(made: Made, run_copy: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run_copy, tmp_path / "other"))
    encoding, foreign = tiny_cache.encodings()[0], "<b onclick=alert(1)>&amp;"
    for step, shade in ((1, 50), (2, 150), (3, 250)):
        drawings.paint(drawings.draw(run_copy, step, encoding), shade=shade, missing=["0000"] if step == 2 else [])
    drawings.paint(drawings.draw(other, 2, encoding, [drawings.PROMPTS[0], foreign], ema=False))
    drawings.draw(other, 3, encoding)
    out = tmp_path / "report.html"
    report.run(made.config, out, run=run_copy, compare=other)
    page = checked(out)
    found = sliders(page)
    assert [[frame[0] for frame in frames] for frames in found.values()] == [
        ["1", "2", "3"],
        ["2"],
        ["1", "2", "3"],
        ["2"],
    ]
    assert all([chosen for _, chosen, _, _ in frames].index(True) == len(frames) - 1 for frames in found.values())
    first, of_other, second, _ = found.values()
    assert first[1][2:] == ("step 2: the latent was not finite", "")
    assert [abs(red(frame[3]) - shade) < 20 for frame, shade in zip(second, (50, 150, 250))] == [True] * 3
    assert red(of_other[0][3]) < 20
    assert (
        "run: pictures of 3 steps, drawn with the EMA" in page.shown
        and "other: pictures of 1 step, drawn with the last weights" in page.shown
    )
    assert page.shown.count(drawings.PROMPTS[0]) == 1 and foreign in page.shown
    assert f"1 of 2 drawings of {other} are not decoded: sana-pipe sample --watch {other} --once" in page.shown
    listed = collect(made.config, run=run_copy)[0]["run"]["parts"][0]["pictures"]
    assert [entry["step"] for entry in listed] == [1, 2, 3] and listed[0]["prompts"] == list(drawings.PROMPTS)
    assert listed[1]["pictures"] == [None, str(run_copy / "pictures" / "step-00000002" / "0001.png")]


def test_drawings_that_are_not_decoded_are_named_with_the_command(made: Made, run_copy: Path, tmp_path: Path) -> None:
    encoding, out = tiny_cache.encodings()[0], tmp_path / "report.html"
    none = collect(made.config, run=run_copy)[0]["missing"]["pictures"]
    assert "train.pictures" in none["command"]
    paths = [drawings.draw(run_copy, step, encoding) for step in (1, 2, 3)]
    command = f"sana-pipe sample --watch {run_copy} --once"
    report.run(made.config, out, run=run_copy)
    page = checked(out)
    assert sliders(page) == {} and f"3 of 3 drawings of {run_copy} are not decoded" in page.shown
    drawings.paint(paths[0])
    drawings.draw(run_copy, 1, encoding, seed=1)  # drawn again: its pictures are of the earlier file
    drawings.paint(paths[1])
    paths[2].write_bytes(b"damaged")
    report.run(made.config, out, run=run_copy)
    page = checked(out)
    assert [[frame[0] for frame in frames] for frames in sliders(page).values()] == [["2"], ["2"]]
    assert f"2 of 3 drawings of {run_copy} are not decoded: {command}" in page.shown
    paths[2].unlink()
    for path in (paths[0].with_suffix("") / "decoded.json", paths[0]):
        path.unlink()
    assert "pictures" not in collect(made.config, run=run_copy)[0]["missing"], "what was removed is not missing"


def test_a_slider_has_a_limit_and_shows_the_first_and_the_last(made: Made, run_copy: Path, tmp_path: Path) -> None:
    from sana_pipe.tools.reporting.progress import FRAMES

    for step in range(1, FRAMES + 20):
        drawings.paint(drawings.draw(run_copy, step, tiny_cache.encodings()[0], ["a cat"]))
    report.run(made.config, tmp_path / "report.html", run=run_copy)
    page = checked(tmp_path / "report.html")
    [frames] = sliders(page).values()
    steps = [int(frame[0]) for frame in frames]
    assert len(steps) == FRAMES == len(set(steps)) and (steps[0], steps[-1]) == (1, FRAMES + 19)
    assert f"{FRAMES} of {FRAMES + 19} steps" in page.shown


def test_without_pictures_no_source_is_read(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sana_pipe.tools.reporting import source_pictures

    monkeypatch.setattr(source_pictures, "reopen", None)
    assert report.run(made.config, tmp_path / "report.html", pictures=False) == 0
    assert "img" not in {tag for tag, _ in checked(tmp_path / "report.html").tags}


def test_a_long_table_ends_with_the_number_of_its_other_rows(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting_page, "ROWS", 1)
    report.run(made.config, tmp_path / "report.html", pictures=False)
    count = len(collect(made.config)[0]["snapshot"]["buckets"])
    shown = checked(tmp_path / "report.html").shown
    assert count > 1 and f"and {count - 1} more rows (sana-pipe inspect --json)" in shown


def test_foreign_text_is_shown_as_text(tmp_path: Path, made: Made) -> None:
    """Names of sources, items, runs and options, reasons, and keys of the journal."""
    shutil.copytree(made.root / "cache", tmp_path / "cache")
    config = made.config.model_copy(update={"cache": str(tmp_path / "cache")})
    folder = tmp_path / "run" / "<b>round"
    shutil.copytree(made.root / "run", folder)
    row = {**validation(3, 1.0), "by_sigma": {HOSTILE: 1.0}, "by_bucket": {"</svg><script>": 2.0}}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    (folder / "summary.json").write_text(json.dumps({HOSTILE: HOSTILE, "name": "\ud800"}))
    shutil.copytree(folder, tmp_path / "run" / "second")
    report.run(config, tmp_path / "report.html", run=tmp_path / "run")
    page = checked_of_hostile(tmp_path / "report.html")
    assert HOSTILE in page.shown and "<b>round" in page.shown


def checked_of_hostile(path: Path) -> Page:
    """`checked`; the address in the hostile text is text."""
    text = path.read_text(encoding="utf-8")
    assert "http://evil.example" in text and "<script" not in text and "<img src=http" not in text
    path.write_text(text.replace("http://evil.example", "ADDRESS"), encoding="utf-8")
    page = checked(path)
    page.words = [word.replace("ADDRESS", "http://evil.example") for word in page.words]
    return page


def test_the_gallery_shows_decoded_latents_next_to_their_pictures(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoding itself is `sample`'s; here it runs in this process, which is seconds faster."""
    from sana_pipe.stages import sample
    from sana_pipe.tools.reporting import encoder_process

    def here(config: Config, tensors: dict[str, Any], work: Path) -> Path:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, work / "latents")
        sample.decode(config, work / "latents", work / "pictures")
        return work / "pictures"

    monkeypatch.setattr(encoder_process, "decode", here)
    out = tmp_path / "report.html"
    assert report.run(made.config, out, gallery=3) == 0
    text = out.read_text(encoding="utf-8")
    page = checked_of_hostile(out) if "evil.example" in text else checked(out)
    assert "gallery" in page.sections and "no latents were decoded" not in page.shown
    alts = [values["alt"] for tag, values in page.tags if tag == "img"]
    assert alts.count("decoded latent") == alts.count("source") == 3
    snapshot = Cache(made.config.cache).open_snapshot()
    for row in (1, 4, 6):
        assert f"photos: {snapshot.source_item(row)[1]}" in page.shown and f"{snapshot.sample_id(row)}" in page.shown


@pytest.mark.slow
def test_the_gallery_decodes_in_another_process(made: Made, tmp_path: Path) -> None:
    from sana_pipe.tools.reporting.encoder_process import DecodeError

    assert report.run(made.config, tmp_path / "report.html", gallery=1) == 0
    config = made.config.model_copy(update={"vae": made.config.vae.model_copy(update={"id": str(tmp_path / "gone")})})
    with pytest.raises(DecodeError):
        report.run(config, tmp_path / "report.html", gallery=1)


def test_pages_about_little(made: Made, tmp_path: Path) -> None:
    """No cache; an empty journal; a run without validation: what is missing is listed with its command."""
    nowhere = made.config.model_copy(update={"cache": str(tmp_path / "none")})
    out = tmp_path / "report.html"
    report.run(nowhere, out, run=journal(tmp_path / "empty"))
    page = checked(out)
    assert page.sections == ["run", "missing"]
    assert "Losses: the journal has no rows yet. sana-pipe train --resume auto" in page.shown
    assert "Snapshot: " in page.shown and "sana-pipe encode --data DIR" in page.shown
    report.run(made.config, out, snapshot="round1")
    page = checked(out)
    assert {"losses", "throughput", "data-wait", "buckets"} <= set(page.sections)
    assert not {"validation", "ema", "rounds", "compare", "new"} & set(page.sections)
    assert "Held-out loss: no held-out loss was measured" in page.shown


def test_nothing_to_report_on_is_an_error(made: Made, tmp_path: Path) -> None:
    output = made.config.train.model_copy(update={"output": str(tmp_path / "no-run")})
    nowhere = made.config.model_copy(update={"cache": str(tmp_path / "none"), "train": output})
    with pytest.raises(UserError, match=naming(tmp_path / "none", tmp_path / "no-run", "sana-pipe encode --data DIR")):
        report.run(nowhere, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("code", [0, 2, 137])
def test_after_a_training_pictures_are_decoded_apart_and_the_page_is_of_the_run(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(report.processes, "call", lambda words, **options: started.append(words) or (code, None))
    folder = journal(tmp_path / "run", '{"step": 1, "loss": 0.5}\n')
    assert report.finish(made.config, folder, "mine.yaml") == 0
    assert started[0][-6:] == ["sample", "--watch", str(folder), "--once", "--config", "mine.yaml"]
    printed = capsys.readouterr().out
    assert (f"sana-pipe sample --watch {folder} --once" in printed) == (code != 0)
    assert (folder / "report.html").as_uri() in printed
    page = checked(folder / "report.html")
    assert "run" in page.sections and "buckets" not in page.sections
    (folder / "report.html").write_text("mine")
    assert report.finish(made.config, folder, "mine.yaml") == 0, "a training does not fail because of its page"
    assert "no report was written" in capsys.readouterr().out and (folder / "report.html").read_text() == "mine"


def test_a_page_that_cannot_be_written(made: Made, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=naming(tmp_path / "file")):
        report.run(made.config, tmp_path / "file" / "report.html", pictures=False)


def test_a_page_takes_the_place_of_a_page_only(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "empty"
    out.touch()
    report.run(made.config, out, pictures=False)
    report.run(made.config, out, pictures=False)
    settings, pipe = tmp_path / "sana-pipe.yaml", tmp_path / "pipe"
    settings.write_text("cache: ./cache\n")
    os.mkfifo(pipe)
    for other in (settings, pipe):
        with pytest.raises(UserError, match=naming(other, "--out")):
            report.run(made.config, other, pictures=False)
        with pytest.raises(UserError, match=naming(other, "--out")):
            view.run(made.config, "0.png", out=other)
    assert settings.read_text() == "cache: ./cache\n" and pipe.is_fifo()


def test_a_long_journal_gives_a_small_page(made: Made, tmp_path: Path) -> None:
    line = '{{"step": {0}, "loss": {1}, "lr": 1e-4, "images_per_s": {1}, "grad_norm": {1}}}\n'
    rows = [line.format(step, 1 + step % 97 / 100) for step in range(1, 100_001)]
    checks = [validation(step, 1.0 + 1 / step) for step in range(100, 100_001, 100)]
    folder = journal(tmp_path / "run", *rows, *checks)
    out = tmp_path / "report.html"
    report.run(made.config.model_copy(update={"cache": str(tmp_path / "none")}), out, run=folder)
    page = checked(out)
    assert {"losses", "validation", "throughput"} <= set(page.sections) and "100,000" in page.shown
    assert out.stat().st_size < 1 << 20


# ---------------------------------------------------------------------------------------------------- one sample


def viewed(made: Made, capsys: pytest.CaptureFixture[str], text: str, **options: Any) -> dict[str, Any]:
    assert view.run(made.config, text, as_json=True, **options) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_sample_is_shown_by_each_of_its_names(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    values = viewed(made, capsys, "3.png")
    others = (
        *("photos: 3.png", "3.p", str(values["sample_id"]), str(values["sample_id"])[:12]),
        *(values["latent"]["key"], values["latent"]["key"][:9], values["latent"]["key"][:10].upper()),
    )
    for text in others:
        assert viewed(made, capsys, text) == values, text


def test_the_bytes_of_a_sample_lie_where_view_says(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """Read with `open`, without this package."""
    for item, caption in (("2.png", CAPTIONS[2]), ("1.png", HOSTILE)):
        values = viewed(made, capsys, item, snapshot="round1")
        latent, [text] = values["latent"], values["captions"]
        data = Path(latent["shard"]).read_bytes()[latent["offset"] :][: latent["bytes"]]
        numbers = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(latent["shape"])
        assert latent["mean"] == pytest.approx(float(numbers.mean(dtype=np.float64)))
        assert (latent["min"], latent["max"]) == (float(numbers.min()), float(numbers.max()))
        assert len(latent["channel_std"]) == latent["shape"][0]
        rows = np.frombuffer(Path(text["shard"]).read_bytes()[text["offset"] :][: text["bytes"]], "<u2")
        assert len(rows) % text["tokens"] == 0 and text["text"] == caption.strip()
        assert text["at_max_length"] == (item == "2.png")
    picture = values["picture"]
    with Image.open(made.root / "photos" / "1.png") as original:
        assert (picture["width"], picture["height"]) == original.size
    assert picture["bytes"] == (made.root / "photos" / "1.png").stat().st_size and values["readable"] is True


def test_the_crop_is_the_part_that_the_loss_leaves(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    picture = viewed(made, capsys, "5.png")["picture"]
    left, top, right, bottom = picture["crop"]
    kept = (right - left) * (bottom - top) / (picture["width"] * picture["height"])
    assert (picture["width"], picture["height"]) == (64, 72) and kept == pytest.approx(1 - picture["crop_loss"])
    assert picture["crop_loss"] == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("4.pngg", "4.png"),
        ("photos: 4.pngg", "names are 4.png"),
        ("photos:4.png", "names are 4.png"),
        ("zzz", "nearest names"),
        ("", "nearest names"),
        ("99999999999999999999999", "nearest names"),
        ("small.png", "data.min_side"),
        ("broken.png", "source 'photos' has it"),
    ],
)
def test_an_unknown_sample_is_an_error_with_the_nearest(made: Made, text: str, named: str) -> None:
    with pytest.raises(UserError, match=naming(repr(text), named)):
        view.run(made.config, text)


def test_an_ambiguous_name_lists_the_samples(made: Made, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two files of equal content share the key; an item wins over names that begin with it."""
    first, second = viewed(made, capsys, "0.png"), viewed(made, capsys, "double.png")
    assert first["sample_id"] != second["sample_id"] and first["latent"]["key"] == second["latent"]["key"]
    both = f"{first['sample_id']} (photos: 0.png)", f"{second['sample_id']} (photos: double.png)"
    for text in (first["latent"]["key"], first["latent"]["key"][:8]):
        with pytest.raises(UserError, match=naming(repr(text), *both)):
            view.run(made.config, text)
    cache = tiny_cache.build(tmp_path / "cache", {(16, 16): 130})
    snapshot = cache.open_snapshot()
    assert snapshot.source_item(sample_names.find(cache, snapshot, "12")) == ("item", "12")


def test_a_file_name_finds_its_only_picture_in_any_folder(tmp_path: Path) -> None:
    of = synthetic.config(tmp_path / "cache")
    names = ["cats/1.png", "dogs/1.png", "dogs/2.png", "2.png.jpg", "dogs/big-3.png"]
    synthetic.add(of, "one", [synthetic.Picture(name, name) for name in names])
    bucket.run(of)
    cache = Cache(of.cache)
    snapshot = cache.open_snapshot()
    for text in ("2.png", "one: 2.png"):
        assert snapshot.source_item(sample_names.find(cache, snapshot, text)) == ("one", "dogs/2.png")
    with pytest.raises(UserError, match=naming("cats/1.png", "dogs/1.png")):
        sample_names.find(cache, snapshot, "1.png")
    with pytest.raises(UserError, match=naming("3.png")):
        sample_names.find(cache, snapshot, "3.png")


def test_the_page_of_a_sample(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert view.run(made.config, "1.png", out=tmp_path / "view.html") == 0
    printed = capsys.readouterr().out
    assert HOSTILE in printed and "48x80" in printed and "page:" in printed
    page = checked_of_hostile(tmp_path / "view.html")
    assert page.sections == ["pictures", "captions", "numbers"]
    assert len([tag for tag, _ in page.tags if tag == "img"]) == 3 and HOSTILE in page.shown


def test_a_caption_commands_no_terminal_and_prints_no_line_of_its_own(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hostile(*arguments: Any) -> SampleFigures:
        sample = sample_figures.sample_figures(*arguments)
        return replace(sample, captions=[replace(sample.captions[0], text="x\nfix: rm\x1b[2J\r\x9b1m")])

    monkeypatch.setattr(view, "sample_figures", hostile)
    assert view.run(made.config, "1.png") == 0
    printed = capsys.readouterr().out
    assert not any(line.startswith("fix:") for line in printed.splitlines())
    assert not set("\x1b\r\x9b") & set(printed)


def test_a_sample_whose_source_is_missing(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(made.root / "cache", tmp_path / "cache")
    for path in (tmp_path / "cache" / "tables").rglob("*.parquet"):
        path.unlink()
    config = made.config.model_copy(update={"cache": str(tmp_path / "cache")})
    assert view.run(config, "1.png", out=tmp_path / "view.html") == 0
    assert "can no longer be read" in capsys.readouterr().out
    assert [tag for tag, _ in checked_of_hostile(tmp_path / "view.html").tags if tag == "img"] == ["img"], "the latent"


def test_a_latent_becomes_a_picture_whatever_its_channels() -> None:
    generator = np.random.default_rng(0)
    for shape in ((32, 4, 6), (2, 2, 3), (1, 1, 1)):
        picture = sample_view.projected(generator.normal(size=shape).astype(np.float32))
        assert picture.mode == "RGB" and picture.width * shape[1] == picture.height * shape[2]
    assert sample_view.projected(np.zeros((4, 2, 2), np.float32)).getextrema() == ((0, 0), (0, 0), (0, 0))


# ---------------------------------------------------------------------------------------------------- a browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=10000"),
    *("--no-first-run", "--disable-quic", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-extensions"),  # nothing but the page is asked for
)
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
PROBE = r"""<script>const boxes = (what, where = document) =>
  [...where.querySelectorAll(what)].map(e => e.getBoundingClientRect()).filter(b => b.width);
const seen = () =>
  [...document.querySelectorAll('.slider img')].filter(i => i.offsetHeight > 20).map(i => i.alt);
addEventListener('load', () => parent.postMessage(JSON.stringify({
  broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.alt),
  images: document.images.length,
  frames: seen(), clicked: (document.querySelector('.slider label').click(), seen()),
  sections: [...document.querySelectorAll('section')].filter(s => s.offsetHeight > 20).map(s => s.id),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  width: document.documentElement.clientWidth,
  plots: boxes('svg').map(b => Math.round(b.width)),
  tops: ['#progress svg', '#progress img'].map(s => Math.round(boxes(s)[0].top + scrollY)),
  rows: [...document.querySelectorAll('.slider')].map(s => boxes('img', s).map(b => [b.left, b.right])),
  words: [...document.querySelectorAll('td, th')].flatMap(cell => [...cell.childNodes].flatMap(node =>
    [...node.textContent.matchAll(/[\w.,]+/g)].filter(word => {
      const range = document.createRange();
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      return range.getClientRects().length > 1;
    }).map(word => word[0]))),
}), '*'))</script></body>"""


def browser() -> str:
    """An executable of Chromium: on PATH, or playwright's."""
    for name in BROWSERS:
        if (path := shutil.which(name)) is not None:
            return path
    places = [Path.home() / ".cache" / "ms-playwright"]
    for path in (path for place in places for path in sorted(place.glob("chromium*/*/*"))):
        if path.name in ("chrome", "headless_shell", "chrome-headless-shell"):
            return str(path)
    pytest.skip("no Chromium on PATH (" + ", ".join(BROWSERS) + ") and none of playwright's")


def opened_in(executable: str, page: Path, profile: Path) -> tuple[str, str]:
    """The document of a page after its scripts, and what the browser logged."""
    command = [executable, *OPTIONS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_browser_marks_pairs_and_saves_them(tmp_path: Path) -> None:
    """A copy of the page with a probe clicks on pictures: better and worse of four; one of two; a mark that is taken
    back; no second mark."""
    drawn, out = tmp_path / "drawn", tmp_path / "pairs"
    drawn.mkdir()
    out.mkdir()
    captions = ['a "red", round <b>cube</b>', "of two", "unmarked", "only one"]
    rows = [
        {"caption": captions[number], "number": number, "picture": picture}
        for number, count in enumerate((4, 2, 2, 3))
        for picture in range(count)
    ]
    for row in rows:
        name = pair_page.file_name(int(str(row["number"])), int(str(row["picture"])))
        Image.new("RGB", (32, 32), (9, 9, 9)).save(drawn / f"{name}.png")
    page = pair_page.publish(rows, drawn, out, print)
    probe = """<script>
      const at = (number, picture) =>
        document.querySelector(`button[data-number="${number}"][data-picture="${picture}"]`).click();
      at(0, 2); at(0, 1); at(0, 3); at(1, 1); at(2, 0); at(2, 0); at(3, 0);
      document.body.append(Object.assign(document.createElement('pre'), {id: 'csv', textContent: csv()}));
      document.body.append(Object.assign(document.createElement('pre'), {id: 'broken', textContent:
        [...document.images].filter(i => i.complete && !i.naturalWidth).length}));
    </script></body>"""
    copy = out / "probed.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
    document, log = opened_in(browser(), copy, tmp_path / "profile")
    assert "Refused" not in log and "Error" not in "".join(re.findall(r"CONSOLE.*", log))
    [text], [broken] = (re.findall(rf'<pre id="{name}">(.*?)</pre>', document, re.DOTALL) for name in ("csv", "broken"))
    assert broken == "0"
    assert list(csv.reader(io.StringIO(html.unescape(text)))) == [
        list(pair_page.COLUMNS),
        ["0000-2.png", "0000-3.png", captions[0], "1"],
        ["0001-1.png", "0001-0.png", captions[1], "1"],
    ]


@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_every_section_and_picture(whole: Path, tmp_path: Path, width: int) -> None:
    """The page as it is logs no error. A copy with a probe, in a frame of that width, tells what is seen: a window may
    not be as narrow as a phone."""
    executable = browser()
    document, log = opened_in(executable, whole, tmp_path / "first")
    assert "CONSOLE" not in log and set(checked(whole).sections) <= set(re.findall(r'<section id="([^"]+)"', document))
    copy = POLICY.sub("", whole.read_text(encoding="utf-8"))
    assert copy.count("</body>") == 1
    (tmp_path / "copy.html").write_text(copy.replace("</body>", PROBE), encoding="utf-8")
    (tmp_path / "frame.html").write_text(
        "<!DOCTYPE html><body><pre id=seen></pre><script>"
        "addEventListener('message', e => document.getElementById('seen').textContent = e.data)</script>"
        f'<iframe src="copy.html" style="width:{width}px;height:800px;border:0"></iframe></body>',
        encoding="utf-8",
    )
    document, log = opened_in(executable, tmp_path / "frame.html", tmp_path / "second")
    [text] = re.findall(r'<pre id="seen">(.*?)</pre>', document, flags=re.DOTALL)
    seen = json.loads(html.unescape(text))
    assert seen["sections"] == checked(whole).sections
    assert seen["broken"] == [] and seen["images"] == [tag for tag, _ in checked(whole).tags].count("img") == 9
    assert seen["overflow"] <= 0 and width - 20 <= seen["width"] <= width
    assert seen["words"] == [], "words of tables that break"
    assert seen["tops"][0] < 800 and seen["tops"][1] < 1200, "loss and pictures stand above all data"
    steps = [f"{name}, step {step}" for name in ("first", "second") for step in (1, 2)]
    whole_plot, *plots = seen["plots"]
    assert len(plots) > 10 and all(250 <= drawn <= 600 for drawn in plots)
    if width == 360:
        assert seen["frames"] == ["second, step 2"] * 2, "of each prompt the last picture is in sight"
        assert seen["clicked"] == ["first, step 1", "second, step 2"] and whole_plot < 360
    else:
        assert seen["frames"] == seen["clicked"] == steps * 2 and whole_plot > 1000
        for row in seen["rows"]:
            assert row == sorted(row) and all(b[0] >= a[1] - 1 for a, b in pairwise(row)), "side by side"
