"""What is installed: one package, sana_pipe, with every file of pipeline/, stages/ and configs/."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.package_links import FOLDERS, link

ROOT = Path(__file__).resolve().parent.parent


def files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


def test_a_build_has_one_package_with_every_file(tmp_path: Path) -> None:
    """setuptools builds what a wheel would hold. A new room must be listed in pyproject.toml."""
    for name in ("pipeline", *FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    code = "import setuptools; setuptools.setup()"
    command = [sys.executable, "-c", code, "-q", "build", "--build-base", "built"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = tmp_path / "built" / "lib"
    assert [path.name for path in library.iterdir()] == ["sana_pipe"]
    wanted = files(ROOT / "pipeline").union(*({f"{name}/{file}" for file in files(ROOT / name)} for name in FOLDERS))
    assert files(library / "sana_pipe") == wanted


def test_the_links_are_the_package_as_it_is_installed(tmp_path: Path) -> None:
    """Also when they are made again, without a folder that has gone."""
    for name in ("pipeline/data", "pipeline/old", *FOLDERS):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text(f"name = {name!r}")
    (tmp_path / "pipeline/__init__.py").write_text("")
    before = (link(tmp_path) / "sana_pipe/data").lstat().st_ino
    shutil.rmtree(tmp_path / "pipeline/old")
    package = link(tmp_path) / "sana_pipe"
    assert (package / "data").lstat().st_ino == before, "another process may import from it"
    assert {path.name for path in package.iterdir()} == {"__init__.py", "data", *FOLDERS}
    code = "import sana_pipe.data, sana_pipe.stages; print(sana_pipe.data.name, sana_pipe.stages.name)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(package.parent)}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["pipeline/data", "stages"]
    assert (package / "__pycache__").is_dir() and link(tmp_path) == package.parent, "what imports wrote is no link"


def test_the_image_copies_what_there_is(tmp_path: Path) -> None:
    steps = instructions()
    assert [word for word, _ in steps].count("FROM") == 1 and re.fullmatch(r"nvidia/cuda:\d\S+", dict(steps)["FROM"])
    *sources, _ = dict(steps)["COPY"].split()
    assert [name for name in sources if name != "dist/*.whl" and not (ROOT / name).exists()] == []
    assert re.search(r"^image:.*\n.*wheel .*-w dist", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.nightly
def test_the_steps_of_the_image_install_the_command(tmp_path: Path) -> None:
    """Every RUN but that of the operating system, with its folders below `tmp_path`, and then the entry point."""
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(wheel, check=True)
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    steps = instructions()
    for word, text in steps:
        if word == "RUN" and "apt-get" not in text:
            line = (
                text.replace("python3 ", f"{sys.executable} ")
                .replace("/opt/", f"{tmp_path}/")
                .replace("/tmp/", f"{tmp_path}/")
            )
            subprocess.run(["bash", "-c", line], check=True)
    [entry] = json.loads(dict(steps)["ENTRYPOINT"])
    folder = dict(steps)["ENV"].removeprefix("PATH=/opt").partition(":")[0]
    done = subprocess.run(
        [f"{tmp_path}{folder}/{entry}", "config"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "train.optim.lr" in done.stdout or "lr:" in done.stdout


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, in order."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]
