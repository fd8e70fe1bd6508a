"""The pages are a contract: their commands are accepted, their links lead somewhere, their tests and options exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from sana_pipe import config as configuration
from sana_pipe.config import SHIPPED, load
from tests.support.command_lines import dry_run, words_of

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "tests/README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
}
README = PAGES["README.md"]


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_the_readme_leads_to_every_page_and_fits_on_two_screens() -> None:
    linked = re.findall(r"\]\(([^)#]+)", README)
    assert set(PAGES) - set(linked) == {"README.md"}
    assert len(README.splitlines()) <= 130 and len(PAGES) + 1 <= 18  # with cache_layout.md


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_a_page_begins_with_its_summary(page: str) -> None:
    """Title, then three lines: what to do first, and what else the page is for."""
    title, empty, *summary, after = PAGES[page].splitlines()[:6]
    assert title.startswith("# ") and empty == after == ""
    assert all(re.match(r"(\* )?\S.{40,150}[.:]$", line) for line in summary), summary


@pytest.mark.parametrize("page", PAGES)
def test_every_named_test_exists(page: str) -> None:
    defined = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_[a-z0-9_]+)`", PAGES[page])
    assert [name for name in named if f"def {name}(" not in defined] == []
    assert page != "tests/README.md" or len(named) > 8


def test_every_promise_names_a_test_file() -> None:
    rows = [line for line in PAGES["tests/README.md"].splitlines() if line.startswith("| ") and "| tests |" not in line]
    assert len(rows) > 45
    assert [row for row in rows if not re.search(r"\]\((?:\w+/)?test_", row.split(" | ")[-1])] == []


def test_every_figure_has_a_command_that_exists() -> None:
    figures = PAGES["docs/measurements.md"].partition("\n## On 2 CPU cores\n")[2].partition("\n## ")[0]
    rows = [line for line in figures.splitlines() if line.startswith("| ") and "| command |" not in line]
    assert len(rows) > 50
    number = r"(?<![\w.^])\d[\d.,/e-]*"
    for row in rows:
        assert re.search(r"`python -m benchmarks\.[a-z0-9_]+` \|$", row), row
        values = [re.findall(number, cell) for cell in row.split(" | ")[1:-1]]
        assert max(map(len, values)) <= 1, f"one number a cell: {row}"
    for text in PAGES.values():
        for name in re.findall(r"python -m (benchmarks\.[a-z0-9_]+)", text):
            place = ROOT / name.replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), name


def command_lines() -> list[tuple[str, str]]:
    """(page, line) of every `sana-pipe` command: in console blocks, indented, and inline."""
    lines = []
    for page, text in PAGES.items():
        inline = re.findall(r"`((?:torchrun [^`]*)?sana-pipe [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        shown = "\n".join(blocks("(?:console|bash)", page) + re.findall(r"^    (.*)$", text, flags=re.MULTILINE))
        long = [line.removeprefix("$ ").strip() for line in shown.replace("\\\n", " ").splitlines()]
        lines += [(page, line) for line in [*long, *inline] if re.match(r"(torchrun .*)?sana-pipe ", line)]
    return list(dict.fromkeys(lines))


def test_the_commands_of_the_documentation_are_read() -> None:
    assert {words_of(line)[0] for page, line in command_lines() if page == "README.md"} == {
        *(
            "check",
            "encode",
            "bucket",
            "train",
            "report",
            "sample",
            "export",
            "config",
            "status",
            "plan",
            "help",
            "init",
            "run",
        )
    }
    assert {words_of(line)[0] for _, line in command_lines()} >= {"snapshots", "status", "verify", "gc", "forget"}


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_every_command_is_accepted(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parsed, its `--set` and `--config` loaded and read by that command; then its stage is called."""
    monkeypatch.chdir(tmp_path)
    words = words_of(line)
    if words == ["encode"]:
        words += ["--data", "pictures"]  # the stage by its name
    for file in re.findall(r"--config (\S+\.yaml)", line):  # which an earlier command wrote
        shutil.copy(SHIPPED / "sana_1600m_1024.yaml", file)
    code, calls = dry_run(monkeypatch, words)
    assert code == 0, capsys.readouterr().err
    assert calls or words[0] in ("config", "help")


def test_a_wrong_command_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for line in ("sana-pipe train --resum auto", "sana-pipe train --set train.stepps=1", "sana-pipe export --set x=1"):
        assert dry_run(monkeypatch, words_of(line))[0] == 2


@pytest.mark.parametrize("page", PAGES)
def test_every_named_option_exists(page: str) -> None:
    options = {name for name, _ in configuration.option_fields()}
    named = re.findall(
        r"`(?:--set )?'?((?:data|encode|bucket|train|mirror|sample)\.[a-z_]+(?:\.[a-z_]+)*)", PAGES[page]
    )
    named = [name for name in named if not name.endswith((".py", ".md"))]
    known = {f"{name}." for name in options}
    assert [name for name in named if name not in options and not any(name.startswith(k) for k in known)] == []
    for name, value in re.findall(r"`((?:bucket|train)\.[a-z_.]+)(?:: |=)([^`]+)`", PAGES[page]):
        load("sana_1600m_1024", [f"{name}={value}", *NEEDED.get(name, [])])


NEEDED = {
    "train.optim.in_backward": ["train.optim.clip=null"],
    "train.prefer.stop": ["train.adapter={}"],
}
"""Settings that an option needs; the pages say so in words."""


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for page, text in PAGES.items():
        assert set(re.findall(r"(?:`|^\$ |^)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets, page


def test_the_bucket_section_is_a_configuration(tmp_path: Path) -> None:
    """The example is valid as it stands, with the batches that its comments state."""
    import yaml

    from sana_pipe.data.images import buckets
    from sana_pipe.data.snapshots.filters import Filter

    example = yaml.safe_load(blocks("yaml", "docs/snapshots.md")[0])
    whole = yaml.safe_load((SHIPPED / "sana_1600m_1024.yaml").read_text(encoding="utf-8"))
    (tmp_path / "example.yaml").write_text(yaml.safe_dump({**whole, **example}))
    config = load(tmp_path / "example.yaml")
    for text in (config.bucket.filter, config.bucket.sources["art"].filter):
        assert text
        Filter(text, "bucket.filter")
    tables = buckets.resolutions(config.bucket, config.data, 32)
    shapes = [shape for _, table in tables for shape in table]
    batches = dict(zip(shapes, buckets.batches(config.bucket, shapes, 32), strict=True))
    assert (batches[1024, 1024], batches[512, 512]) == (32, 128)
    assert set(example["bucket"]) | {"batch", "grow"} == set(type(config.bucket).model_fields)


WINGS = ("base", "data", "train", "tools")


def test_every_room_is_listed() -> None:
    """docs/code.md names each room of the tree, CONTRIBUTING.md what is next to it, and no other."""
    firsts = re.findall(r"^\| (`[^|]+`) \|", PAGES["docs/code.md"] + PAGES["CONTRIBUTING.md"], flags=re.MULTILINE)
    listed = {name for cell in firsts for name in re.findall(r"`([a-z_/.]+)`", cell)}
    rooms = {
        f"{path.parent.relative_to(ROOT).as_posix()}/" for path in (ROOT / "pipeline").rglob("*.py") if path.parent.name
    }
    rooms -= {"pipeline/", *(f"pipeline/{wing}/" for wing in WINGS)}
    modules = {
        path.relative_to(ROOT).as_posix()
        for folder in ("", *WINGS)
        for path in (ROOT / "pipeline" / folder).glob("*.py")
    }
    modules = {name for name in modules if not name.endswith("__init__.py")}
    others = {
        "stages/",
        "configs/",
        "docs/",
        "tests/",
        "tests/support/",
        "tests/cuda/",
        "benchmarks/",
        "cache_layout.md",
    }
    assert listed == rooms | modules | others
    assert all((ROOT / name).exists() for name in listed)


def test_the_page_on_the_code_names_what_is_there() -> None:
    """Files below the rooms of their line, and, from one picture's way on, what is defined in the file before it."""
    way = PAGES["docs/code.md"].partition("## One picture's way")[2]
    pairs = re.findall(r"`([\w/]+\.py)` ((?:`[\w.]+`(?:, )?)+)", way)
    for file, names in pairs:
        text = next((ROOT / "pipeline").rglob(file)).read_text(encoding="utf-8")
        missing = [
            name
            for name in re.findall(r"(\w+)`", names)
            if not re.search(rf"(def|class) {name}\b|^{name}\b", text, re.M)
        ]
        assert not missing, (file, missing)
    files = 0
    for line in PAGES["docs/code.md"].partition("## One picture's way")[0].splitlines():
        rooms = re.findall(r"`(pipeline/[a-z_/]+/|stages/)`", line)
        for name in re.findall(r"`([\w/]+\.py)`", line):
            files += 1
            assert any((ROOT / room / name).exists() for room in ("", *rooms)), name
    assert len(pairs) > 10 and files > 40 and len(PAGES["docs/code.md"].splitlines()) <= 90


def test_constants_that_contributors_are_sent_to_exist() -> None:
    named = set(re.findall(r"`(_?[A-Z][A-Z_]{3,})`", PAGES["CONTRIBUTING.md"])) - {"AWS_ENDPOINT_URL"}
    code = "\n".join(
        path.read_text(encoding="utf-8") for room in ("pipeline", "tests") for path in (ROOT / room).rglob("*.py")
    )
    assert len(named) >= 10
    assert [name for name in sorted(named) if not re.search(rf"^{name}\b", code, re.M)] == []


def _install_wheel(tree: Path, folder: Path) -> tuple[str, ...]:
    """Build the wheel of `tree` and install it into `tree`/.venv, next to foreign packages with the folders' names."""
    code = "import setuptools.build_meta as m, sys; print(m.build_wheel(sys.argv[1]))"
    built = subprocess.run([sys.executable, "-c", code, folder], cwd=tree, capture_output=True, text=True, check=True)
    shutil.rmtree(tree / "build")
    venv.create(tree / ".venv", with_pip=True)
    site = next((tree / ".venv/lib").glob("python*/site-packages"))
    libraries = [
        path for path in sys.path if path.endswith("site-packages")
    ]  # lines of a .pth: their own .pth are not read
    (site / "libraries.pth").write_text("\n".join(libraries))
    foreign = ("pipeline", "stages", "configs")
    for name in foreign:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("")
    wheel = folder / built.stdout.strip().splitlines()[-1]
    pip = [tree / ".venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, cwd=folder, capture_output=True, text=True, check=True)
    tops = {path.name for path in site.iterdir() if "sana_pipe" in path.name}
    assert len(tops) == 2 and "sana_pipe" in tops, tops
    return foreign


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_two_commands_run(tmp_path: Path) -> None:
    """`make demo` (quick) in a copy of the tree with this environment, then a stage by hand, as the README says."""
    commands = blocks("bash")[0]
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == ["make demo", "make test"]
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("Makefile", "README.md", "pyproject.toml", "constraints.txt", "pipeline", "stages", "configs"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    packages = "sana_pipe", *_install_wheel(tree, tmp_path)
    (tree / ".venv" / ".installed-for-users").touch()
    outside = {
        k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTHON"))
    }  # may run under make
    environment = {**outside, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["make", "demo", "DEMO_ARGS=--quick"], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = subprocess.run(
        [tree / ".venv/bin/python", "-c", "import sys; print([__import__(name) for name in sys.argv[1:]])", *packages],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert names.count(str(tree / ".venv")) == len(packages), names
    sheet = tree / done.stdout.strip().splitlines()[-1].partition("contact sheet: ")[2]
    assert sheet.read_bytes().startswith(b"\x89PNG")
    done = subprocess.run(
        ["../.venv/bin/sana-pipe", "status"],
        cwd=tree / "demo",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_worked_example_of_a_model_has_the_stated_length() -> None:
    section = PAGES["CONTRIBUTING.md"].partition("## Add a model")[2].partition("\n## ")[0]
    stated = re.search(r"`(pipeline/\S+/prx\.py)` \(some (\d+) lines", section)
    assert stated is not None
    code = (ROOT / stated[1]).read_text(encoding="utf-8")
    assert abs(len(code.splitlines()) - int(stated[2])) <= 10
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\d\. (.*?):", section, flags=re.MULTILINE)))
    spec = (ROOT / "pipeline/train/models/spec.py").read_text(encoding="utf-8")
    assert len(named) > 8 and not [name for name in named if name not in code + spec]
