"""Public layouts of pictures and captions, and what `init` makes of each: the table of docs/encoding.md.

python -m tests.support.layouts     # writes the table into the page
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from sana_pipe.base.errors import UserError
from sana_pipe.config import Config, load
from sana_pipe.stages import init

PAGE = Path(__file__).parents[2] / "docs/encoding.md"
BEGIN, END = "<!-- layouts: python -m tests.support.layouts -->", "<!-- end of layouts -->"
SENTENCES = [
    "a red barn on a hill at dusk",
    "two boats in a quiet harbour",
    "an old clock on a wooden table",
    "a cat asleep on a blue chair",
]
COUNT = len(SENTENCES)
TAGS = "1girl, solo, red hair, smile, outdoors"
_BYTES: dict[tuple[int, int], bytes] = {}


def picture(path: Path | None = None, size: tuple[int, int] = (512, 512)) -> bytes:
    """The bytes of a picture, and the picture as a file; no two files have equal bytes."""
    if size not in _BYTES:
        buffer = BytesIO()
        Image.new("RGB", size, (9, 99, 199)).save(buffer, "PNG")
        _BYTES[size] = buffer.getvalue()
    data = _BYTES[size] + str(path).encode()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return data


def text(path: Path, content: str | dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def pictures(folder: Path, name: str = "{}.png", caption: str | None = "{}.txt", more: str = "{}") -> None:
    """`COUNT` pictures. name: with the number; caption: of the file with a sentence, written as `more` says."""
    for number, sentence in enumerate(SENTENCES):
        picture(folder / name.format(number))
        if caption is not None:
            text(folder / caption.format(number), more.format(sentence))


def rows(folder: Path, file: str, line: Callable[[int, str], str], head: str = "") -> None:
    text(folder / file, head + "".join(line(number, sentence) + "\n" for number, sentence in enumerate(SENTENCES)))


@dataclass(frozen=True)
class Layout:
    """A layout of some tool.

    Attributes:
        tool: whose. files: as people write them. build: makes them in a folder.
        options: for `init`.
        config: options of the written file; empty: it is refused. caption: a prompt that the file draws, so a caption
            as it is trained on.
        asks: settings, or words, of the commands that the refusal prints; the first of them is tried.
        says: what the lines name.
    """

    tool: str
    files: str
    build: Callable[[Path], None]
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    caption: str | None = None
    asks: tuple[str, ...] = ()
    says: tuple[str, ...] = ()


TRIGGER = {"trigger": "sks dog"}
NONE = {"data.caption": None, "data.caption_prefix": ""}
FIRST = SENTENCES[0]
OPTIONS = ("--data", "--set")


def kohya(folder: Path) -> None:
    pictures(folder / "img/10_sks dog")
    pictures(folder / "reg/1_dog", "r{}.png", None)


def one_trainer(folder: Path) -> None:
    pictures(folder)
    pictures(folder, "{}-masklabel.png", None)


def simple_tuner(folder: Path) -> None:
    pictures(folder)
    pictures(folder, "conditioning/{}.png", None)


def diffusion_pipe(folder: Path) -> None:
    pictures(folder, "images/{}.png", "images/{}.txt")
    pictures(folder, "masks/{}.png", None)


def preference_pairs(folder: Path) -> None:
    pictures(folder, "{}_w.png", "{}_w.txt")
    pictures(folder, "{}_l.png", None)


def img2dataset(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "00000.tar", "w") as tar:
        for number, sentence in enumerate(SENTENCES):
            url = json.dumps({"url": "http://x/y.jpg", "caption": sentence}).encode()
            for ending, data in (("png", picture()), ("txt", sentence.encode()), ("json", url)):
                member = tarfile.TarInfo(f"{number:09d}.{ending}")
                member.size = len(data)
                tar.addfile(member, BytesIO(data))


def hub_csv(folder: Path) -> None:
    pictures(folder, "{}.png", None)
    rows(folder, "metadata.csv", lambda number, sentence: f"{number}.png,{sentence}", "file_name,caption\n")


def hub_parquet(folder: Path, **columns: list[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    shown = [{"bytes": picture(Path(folder / f"{n}")), "path": f"{n}.png"} for n in range(COUNT)]
    images = {name: pa.array(shown, struct) for name in ("image", *(c for c in columns if columns[c] is shown))}
    pq.write_table(pa.table({**images, **columns}), folder / "train-0.parquet")


def fill50k(folder: Path) -> None:
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    hub_parquet(folder, text=SENTENCES)
    table = pq.read_table(folder / "train-0.parquet")
    more = pa.array([{"bytes": picture(folder / f"c{n}"), "path": None} for n in range(COUNT)], struct)
    pq.write_table(table.append_column("conditioning_image", more), folder / "train-0.parquet")
    for number in range(COUNT):
        (folder / f"c{number}").unlink()


def classes(folder: Path) -> None:
    pictures(folder, "cats/{}.png", None)
    pictures(folder, "dogs/{}.png", None)


def masks_by_class(folder: Path) -> None:
    for kind in ("cats", "dogs"):
        pictures(folder, f"{kind}/{{}}.png", f"{kind}/{{}}.txt")
        pictures(folder, f"{kind}/masks/{{}}.png", None)


def four_folders(folder: Path) -> None:
    pictures(folder, "images/{}.png", "images/{}.txt")
    for kind in ("edges", "poses", "masks"):
        pictures(folder, f"{kind}/{{}}.png", None)


def cvat(folder: Path) -> None:
    pictures(folder, "JPEGImages/{}.png", None)
    pictures(folder, "SegmentationClass/{}.png", None)
    text(folder / "labelmap.txt", "# label:color_rgb:parts:actions\ncat:1,2,3::\n")


def controlnet(folder: Path) -> None:
    for kind in ("source", "target"):
        pictures(folder, f"{kind}/{{}}.png", None)
    rows(
        folder,
        "prompt.json",
        lambda n, text: json.dumps({"source": f"source/{n}.png", "target": f"target/{n}.png", "prompt": text}),
    )


def kaggle(folder: Path) -> None:
    pictures(folder, caption=None)
    rows(folder, "captions.txt", lambda number, sentence: f"{number}.png,{sentence}", "image,caption\n")


def captions_json(folder: Path) -> None:
    pictures(folder, caption=None)
    text(folder / "captions.json", {f"{n}.png": [sentence, "a picture"] for n, sentence in enumerate(SENTENCES)})


def meta_cap(folder: Path) -> None:
    pictures(folder, caption=None)
    text(folder / "meta_cap.json", {f"{n}": {"caption": s, "tags": "a, b"} for n, s in enumerate(SENTENCES)})


def yolo(folder: Path) -> None:
    pictures(folder, "{}.png", "{}.txt", "0 0.5 0.5 0.1 0.2\n")
    text(folder / "classes.txt", "dog\ncat\n")


LAYOUTS: dict[str, Layout] = {
    "kohya": Layout(
        "kohya's sd-scripts",
        "`img/10_sks dog/x.png`, `x.txt`, `reg/1_dog/y.png`",
        kohya,
        TRIGGER,
        {**NONE, "data.caption_prefix": "sks dog, "},
        f"sks dog, {FIRST}",
        ("--data img --data reg", "data.pictures={}"),
    ),
    "kohya, one folder": Layout(
        "kohya's sd-scripts",
        "`10_sks dog/x.png`, `x.caption`",
        lambda folder: pictures(folder, "10_sks dog/{}.png", "10_sks dog/{}.caption"),
        config=NONE,
        caption=FIRST,
    ),
    "OneTrainer": Layout(
        "OneTrainer",
        "`x.png`, `x.txt`, `x-masklabel.png`",
        one_trainer,
        TRIGGER,
        {"data.caption": None, "data.pictures.mask.suffix": "-masklabel", "train.mask.outside": 0.0},
        f"sks dog, {FIRST}",
        ("data.pictures.mask.suffix=-masklabel", "data.pictures={}"),
    ),
    "SimpleTuner": Layout(
        "SimpleTuner",
        "`x.png`, `x.txt`, `conditioning/x.png`",
        simple_tuner,
        TRIGGER,
        {"data.caption": None, "data.pictures.control.folder": "conditioning"},
        f"sks dog, {FIRST}",
        ("data.pictures.control.folder=conditioning", "data.pictures={}"),
    ),
    "ai-toolkit": Layout(
        "ai-toolkit",
        "`x.png`, `x.txt` with `[trigger]`",
        lambda folder: pictures(folder, more="[trigger] {}"),
        TRIGGER,
        {"data.caption_prefix": "sks dog, "},
        f"sks dog {FIRST}",
        says=("[trigger]",),
    ),
    "diffusion-pipe": Layout(
        "diffusion-pipe",
        "`images/x.png`, `x.txt`, `masks/x.png`",
        diffusion_pipe,
        {},
        {"data.caption": None, "data.pictures.mask.folder": "masks", "train.mask.outside": 0.0},
        FIRST,
        ("data.pictures.mask.folder=masks", "data.pictures={}"),
    ),
    "preference pairs": Layout(
        "preference pairs",
        "`x_w.png`, `x_w.txt`, `x_l.png`",
        preference_pairs,
        {},
        {"data.caption": None, "data.pictures.rejected.suffix": "_w/_l"},
        FIRST,
        ("data.pictures.rejected.suffix=_w/_l", "data.pictures={}"),
    ),
    "img2dataset": Layout(
        "img2dataset",
        "`00000.tar` with `.png`, `.txt`, `.json`",
        img2dataset,
        config={**NONE, "data.caption_field": "text"},
        caption=FIRST,
    ),
    "hub, metadata.csv": Layout(
        "hub's `imagefolder`",
        "`x.png`, `metadata.csv` (`file_name`, `caption`)",
        hub_csv,
        config={**NONE, "data.caption_field": "caption"},
        caption=FIRST,
    ),
    "hub, parquet": Layout(
        "hub",
        "`train-0.parquet` (`image`, `caption`)",
        lambda folder: hub_parquet(folder, caption=SENTENCES),
        config={**NONE, "data.caption_field": "caption"},
        caption=FIRST,
    ),
    "hub, classes": Layout(
        "hub's `imagefolder`",
        "`cats/x.png`, `dogs/x.png`",
        classes,
        TRIGGER,
        {"data.caption": "sks dog"},
        "sks dog",
        says=("captions: 0 of 8",),
    ),
    "ControlNet": Layout(
        "ControlNet's `prompt.json`",
        "`source/x.png`, `target/x.png`, `prompt.json`",
        controlnet,
        TRIGGER,
        {"data.pictures.control.column": "source", "data.image_field": "target", "data.caption_field": "prompt"},
        f"sks dog, {FIRST}",
        asks=("prompt.json",),
    ),
    "Kaggle": Layout(
        "Kaggle (Flickr8k)",
        "`x.png`, `captions.txt` (`image,caption`)",
        kaggle,
        config=NONE,
        caption=FIRST,
    ),
    "captions.json": Layout(
        "diffusion-pipe",
        "`x.png`, `captions.json` (`{picture: [captions]}`)",
        captions_json,
        config=NONE,
        caption=FIRST,
    ),
    "meta_cap.json": Layout(
        "kohya's sd-scripts",
        "`x.png`, `meta_cap.json`",
        meta_cap,
        config=NONE,
        caption=FIRST,
    ),
    "fill50k": Layout(
        "fill50k",
        "`train-0.parquet` (`image`, `conditioning_image`, `text`)",
        fill50k,
        config=NONE,
        caption=FIRST,
        says=("data.pictures.control.column=conditioning_image",),
    ),
    "JSON beside pictures": Layout(
        "many",
        '`x.png`, `x.json` with `{"caption": ...}`',
        lambda folder: pictures(folder, caption="{}.json", more='{{"caption": "{}"}}'),
        TRIGGER,
        {"data.caption": None, "data.caption_field": "caption"},
        f"sks dog, {FIRST}",
    ),
    "CVAT": Layout(
        "CVAT (Pascal VOC)",
        "`JPEGImages/x.png`, `SegmentationClass/x.png`",
        cvat,
        TRIGGER,
        {"data.caption": "sks dog", "data.pictures.mask.folder": "SegmentationClass"},
        "sks dog",
        ("data.pictures.mask.folder=SegmentationClass", "data.pictures={}"),
    ),
    "masks by class": Layout(
        "many",
        "`cats/x.png`, `x.txt`, `cats/masks/x.png`, `dogs/...`",
        masks_by_class,
        {},
        {"data.caption": None, "data.pictures.mask.folder": "masks"},
        FIRST,
        ("data.pictures.mask.folder=masks", "data.pictures={}"),
    ),
    "four folders": Layout(
        "many",
        "`images/x.png`, `x.txt`, `edges/x.png`, `poses/x.png`, `masks/x.png`",
        four_folders,
        {},
        {"data.caption": None, "data.pictures.mask.folder": "masks", "data.pictures.control.folder": "edges"},
        FIRST,
        ("data.pictures.mask.folder=masks", "data.pictures.control.folder=edges", "data.pictures={}"),
        ("poses",),
    ),
    "gallery-dl": Layout(
        "gallery-dl",
        '`x.png`, `x.png.json` with `{"tags": [...]}`',
        lambda folder: pictures(
            folder,
            caption="{}.png.json",
            more=json.dumps({"tags": TAGS.split(", ")}).replace("{", "{{").replace("}", "}}"),
        ),
        config={**NONE, "data.caption_field": "tags"},
        caption=TAGS,
    ),
    "Danbooru": Layout(
        "Danbooru",
        "`x.png`, `x.json` with `tag_string_general`",
        lambda folder: pictures(
            folder, caption="{}.json", more='{{"id": 1, "rating": "s", "tag_string_general": "1girl solo red_hair"}}'
        ),
        config={**NONE, "data.caption_field": "tag_string_general"},
        caption=None,
    ),
    "Hydrus": Layout(
        "Hydrus",
        "`x.png`, `x.png.txt`, a tag a line",
        lambda folder: pictures(folder, caption="{}.png.txt", more="1girl\nsolo\nred hair\nsmile\n"),
        config=NONE,
        says=("caption_parts",),
    ),
    "YOLO": Layout(
        "YOLO",
        "`x.png`, `x.txt` with `0 0.5 0.5 0.1 0.2`, `classes.txt`",
        yolo,
        TRIGGER,
        {"data.caption": "sks dog"},
        "sks dog",
        says=("has no letters", "classes.txt"),
    ),
    "names in another case": Layout(
        "cameras",
        "`Photo1.PNG`, `photo1.txt`",
        lambda folder: pictures(folder, "Photo{}.PNG", "photo{}.txt"),
        config=NONE,
        caption=FIRST,
    ),
    "DreamBooth": Layout(
        "DreamBooth",
        "`x.png`",
        lambda folder: pictures(folder, caption=None),
        TRIGGER,
        {"data.caption": "sks dog"},
        "sks dog",
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What `init` made of a layout. said: its lines. error: the refusal of the first try. prompts: what is drawn."""

    config: Config
    said: str
    prompts: list[str]
    error: UserError | None = None


def made(layout: Layout, folder: Path) -> Outcome:
    """Build a layout and run `init`; where it is refused, again as its first command says."""
    data, out, said = folder / "data", folder / "sana-pipe.yaml", io.StringIO()
    layout.build(data)
    error = None
    with mock.patch.object(init, "expected", return_value=[]), contextlib.redirect_stdout(said):
        try:
            init.run([str(data)], init.Options(gpu="4090", out=out, **layout.options))
        except UserError as refusal:
            error, first = refusal, re.split("; |, or ", str(refusal.fix))[0]
            words = shlex.split(first)
            given = {option: [words[n + 1] for n, word in enumerate(words) if word == option] for option in OPTIONS}
            options = init.Options(gpu="4090", out=out, overrides=tuple(given["--set"]), **layout.options)
            init.run(given["--data"], options)
    prompts = (folder / "prompts.txt").read_text(encoding="utf-8").splitlines()
    return Outcome(load(out), said.getvalue(), prompts, error)


def table(outcome_of: Callable[[str], Outcome]) -> str:
    """The table of the page. outcome_of: what `made` gives for the layout of a name."""
    lines = ["| tool | files | what `init` makes of it |", "|---|---|---|"]
    for name, layout in LAYOUTS.items():
        options = f" --trigger '{layout.options['trigger']}'" if layout.options else ""
        lines.append(f"| {layout.tool} | {layout.files} | {_cell(layout, outcome_of(name), options)} |")
    return "\n".join(lines) + "\n"


def _cell(layout: Layout, outcome: Outcome, options: str) -> str:
    says = re.findall(r"^captions: (\d+ of .*?)(?:; the other|$)", outcome.said, re.MULTILINE)[-1]
    parts = [f"captions: {says}"]
    data = outcome.config.data
    if data.caption_field != "text":
        parts[0] += f", `data.caption_field: {data.caption_field}`"
    if data.caption_prefix:
        parts.append(f"`data.caption_prefix: '{data.caption_prefix}'`")
    if data.caption is not None:
        parts.append(f"`data.caption: {data.caption}`")
    if layout.asks:
        parts.insert(0, "asks: " + " or ".join(f"`{each}`" for each in layout.asks) + "; with the first")
    if layout.says:
        parts.append("names " + ", ".join(f"`{each}`" for each in layout.says))
    return f"{'`' + options.strip() + '`: ' if options else ''}" + "; ".join(parts).replace(
        "with the first; ", "with the first: "
    )


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    with tempfile.TemporaryDirectory() as folder:
        shown = table(lambda name: made(LAYOUTS[name], Path(tempfile.mkdtemp(dir=folder))))
    PAGE.write_text(f"{before}{BEGIN}\n\n{shown}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
