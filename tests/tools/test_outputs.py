"""Where commands may write: inputs of a configuration and files of others stay, whatever is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from sana_pipe.base.errors import UserError
from sana_pipe.config import Config, load
from sana_pipe.tools import outputs
from sana_pipe.tools.reporting import page


def configured(folder: Path, *settings: str) -> Config:
    return load("tiny", [f"cache={folder / 'cache'}", f"train.output={folder / 'run'}", *settings])


@pytest.mark.parametrize(
    "setting",
    [
        "model.weights={{id: {}}}",
        "vae.id={}",
        "vae.decoder={}",
        "text.id={}",
        "train.adapter={{start: {}}}",
        "train.controlnet={{start: {}}}",
        "data.image_root={}",
        "bucket.caches=[{}]",
        "cache={}",
    ],
)
def test_every_option_that_names_a_place_to_read_protects_it(setting: str, tmp_path: Path) -> None:
    (tmp_path / "there/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    whole = ["model.arch=null"] if setting.startswith("model") else []
    config = configured(tmp_path, setting.format(tmp_path / "there/below"), *whole)
    for out in ("there/below", "there", "link/below", "there/../there/below"):
        with pytest.raises(UserError):
            outputs.check(config, tmp_path / out, whole=True)
    outputs.check(config, tmp_path / "there")  # nothing of it is replaced
    outputs.check(config, tmp_path / "there/beside", whole=True)
    outputs.check(config, tmp_path / "new", whole=True)


def test_results_do_not_lie_among_the_pictures_of_a_source_unless_it_is_the_project(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError):
        outputs.check(configured(tmp_path), tmp_path / "photos/samples", sources=[str(tmp_path / "photos")])
    outputs.check(configured(tmp_path), tmp_path / "samples", sources=[str(tmp_path)])


def test_files_of_others_are_those_that_were_added_or_changed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        (folder / "sub").mkdir(parents=True)
        for name in ("same", "edited.md", "sub/w.safetensors"):
            (folder / name).write_text(f"{folder.name} {name}")
    record = outputs.recorded(old)
    assert outputs.foreign(old, record) == []
    (old / "edited.md").write_text("mine")
    (old / "mine").mkdir()
    (old / "mine/v1.safetensors").write_text("v1")
    (old / "link").symlink_to("same")
    found = outputs.foreign(old, record)
    assert [str(path) for path in found] == ["edited.md", "link", "mine/v1.safetensors"]
    assert outputs.carry(old, new, found) == [(Path("edited.md"), Path("edited.kept.md"))]
    assert (new / "edited.md").read_text() == "new edited.md" and (new / "edited.kept.md").read_text() == "mine"
    assert (new / "mine/v1.safetensors").read_text() == "v1" and (new / "link").is_symlink()
    assert outputs.carry(old, new, [Path("edited.md")]) == [(Path("edited.md"), Path("edited.kept-2.md"))]


def test_a_page_of_others_is_not_replaced_by_a_report(tmp_path: Path) -> None:
    mine, ours = tmp_path / "index.html", tmp_path / "page.html"
    mine.write_text("<!DOCTYPE html>\n<html lang=en><title>my album</title>")
    with pytest.raises(UserError):
        page.check_out(mine)
    page.write("title", [], ours)
    page.check_out(ours)
