"""`sana-pipe demo`: photographs to generated pictures, on two cores, without downloads.

Puts photographs with captions and small models into a folder, then runs the commands encode, bucket, train, export,
sample and report there, each in its process, as a user would. So every command can be repeated by hand. There are two
rounds: the second adds photographs; both are validated on other crops of those, and draw some captions as they go on.
The price: Python starts a dozen times. A second demo in the same folder reuses its content; each stage continues, and a
finished round is left alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sana_pipe.base.disk import replacing
from sana_pipe.base.errors import UserError, writing
from sana_pipe.base.processes import command, shown
from sana_pipe.config import LOCAL_NAME, SHIPPED, Config, load
from sana_pipe.data.images import decoding
from sana_pipe.data.sources.caption_rules import instruction
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.source import Item
from sana_pipe.tools.demo import photographs, small_models
from sana_pipe.train.training import summary

TINY = "tiny.yaml"
MARK = "demo.json"
MODELS = "tiny"
VAE_STEPS, QUICK_VAE_STEPS = 400, 20
PROMPTS = "prompts.txt"
PROMPTED = ("astronaut", "galaxies", "tissue", "retina")
"""The square photographs; their captions are drawn during training."""
ROUND_STEPS, QUICK_STEPS = {"round1": 500, "round2": 350}, 10
VALIDATIONS, DRAWINGS = 4, 2
"""The validations of a round, without those before its first step."""


def run(out: Path, quick: bool = False) -> int:
    """Run the demonstration.

    Args:
        out: its folder; created if it does not exist.
        quick: a few steps only, to show that every stage runs.

    Returns:
        0, or the exit code of the command that failed.

    Raises:
        UserError: `out` belongs to another demonstration, or to something else.
    """
    began = time.monotonic()
    out = Path(out)
    with writing(out, "check the permissions, or give another --out"):
        _claim(out, quick)
        config = _configuration(out)
        _photographs(out)
        _models(out, config, quick)
    for arguments in _rounds(out, quick):
        print(f"\n$ cd {out} && {shown(*arguments)}", flush=True)
        start = time.monotonic()
        code = subprocess.run(command("--quiet", *arguments), cwd=out, check=False).returncode
        if code:
            ended = f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}"
            print(f"the demonstration stopped: {shown(*arguments)} {ended}", flush=True)
            return code if code > 0 else 128 - code
        print(f"  ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"\nthe demonstration took {time.monotonic() - began:.0f} s; the exported pipeline is in {out / 'export'}")
    print(f"report: {out / 'report.html'}", flush=True)
    print(f"contact sheet: {out / 'samples' / 'contact_sheet.png'}", flush=True)
    return 0


RUNS = "runs/tiny"
"""The folder of the rounds' run directories: `train.output` of the configuration, so `report` is about both."""
_LAST = ["--checkpoint", f"{RUNS}/round2"]
_RESULTS = (
    ["export", *_LAST, "--out", "export", "--overwrite"],
    ["sample", *_LAST, "--out", "samples", "--count", "12"],
    ["report", "--out", "report.html", "--gallery", "4"],
)


def _rounds(out: Path, quick: bool) -> Iterator[list[str]]:
    """The commands of two rounds. A first round that is finished is left alone: `photos` alone was encoded for it."""
    without_heldout = ["--set", "bucket.sources.heldout.weight=0"]
    if not (out / RUNS / "round1" / summary.NAME).exists():
        yield ["encode", "--data", "photos"]
        yield ["encode", "--data", "heldout", "--prompts", PROMPTS]
        yield ["bucket", "--name", "heldout", "--set", "bucket.sources.photos.weight=0"]
        yield ["bucket", "--name", "round1", *without_heldout]
        yield _train("round1", quick)
    yield ["encode", "--data", "more"]
    yield ["bucket", "--name", "round2", *without_heldout]
    yield _train("round2", quick, "--from", f"{RUNS}/round1")
    yield from _RESULTS


def _train(name: str, quick: bool, *origin: str) -> list[str]:
    """The command of a round, on the snapshot of its name."""
    steps = QUICK_STEPS if quick else ROUND_STEPS[name]
    options = {
        "output": f"{RUNS}/{name}",
        "steps": steps,
        "validation": f"{{snapshot: heldout, every: {-(-steps // VALIDATIONS)}}}",
        "pictures": f"{{every: {-(-steps // DRAWINGS)}}}",
    }
    settings = [word for option, value in options.items() for word in ("--set", f"train.{option}={value}")]
    return ["train", *origin, "--snapshot", name, *settings, "--resume", "auto"]


def _claim(out: Path, quick: bool) -> None:
    """Mark the folder with this demonstration's options; refuse a folder of other content or options."""
    options = {"quick": quick}
    mark = out / MARK
    try:
        marked = json.loads(mark.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(
                f"{out}: exists and is not the folder of a demonstration",
                expected="a new or empty folder, or that of an earlier demonstration",
                fix="give another --out",
            ) from None
        out.mkdir(parents=True, exist_ok=True)
        with replacing(mark) as work:
            work.write_text(json.dumps(options) + "\n", encoding="utf-8")
        return
    except (OSError, ValueError) as error:
        raise UserError(f"{mark}: cannot be read: {error}", fix="remove the folder, or give another --out") from None
    if marked != options:
        raise UserError(
            f"{out}: is the folder of a demonstration with other options",
            expected=json.dumps(options),
            found=json.dumps(marked),
            fix="give another --out",
        )


def _configuration(out: Path) -> Config:
    """The demonstration's configuration, as a file in its folder that a user may edit afterwards."""
    path = out / LOCAL_NAME
    if not path.exists():
        with replacing(path) as work:
            shutil.copyfile(SHIPPED / TINY, work)
    return load(path)


def _photographs(out: Path) -> None:
    for name, photos in photographs.ROUNDS.items():
        if not (out / name).is_dir():
            work = out / f".{name}.partial"
            shutil.rmtree(work, ignore_errors=True)
            photographs.demo_photos(work, photos)
            os.rename(work, out / name)
            print(f"{len(photos)} photographs with captions in {out / name}", flush=True)
    if not (out / PROMPTS).exists():
        captions = [
            photo.caption for photos in photographs.ROUNDS.values() for photo in photos if photo.name in PROMPTED
        ]
        (out / PROMPTS).write_text("".join(f"{caption}\n" for caption in dict.fromkeys(captions)), encoding="utf-8")


def _models(out: Path, config: Config, quick: bool) -> None:
    if (out / MODELS).is_dir():
        print(f"small models in {out / MODELS} are reused", flush=True)
        return
    pictures, captions = _read(config, [out / name for name in ("photos", "more")])
    sizes = config.data.buckets
    assert sizes != "sana", "the demonstration's configuration lists its buckets"
    start = time.monotonic()
    steps = QUICK_VAE_STEPS if quick else VAE_STEPS
    print(f"making small models: fitting a VAE to {len(pictures)} pictures, {steps} steps", flush=True)
    work = out / f".{MODELS}.partial"
    shutil.rmtree(work, ignore_errors=True)
    summary = small_models.make_all(
        work,
        pictures,
        captions,
        instruction=instruction(config.text),
        steps=steps,
        sizes=sizes,
        flow_shift=config.train.flow.shift,
    )
    os.rename(work, out / MODELS)
    vae, text = summary["vae"], summary["text"]
    print(
        f"  VAE: {vae['parameters'] / 1e6:.1f} M parameters, scaling factor {vae['scaling_factor']:.4f}, "
        f"reconstruction {vae['psnr']:.1f} dB; text encoder: {text['parameters'] / 1e6:.1f} M parameters  "
        f"({time.monotonic() - start:.0f} s)",
        flush=True,
    )


def _read(config: Config, folders: Sequence[Path]) -> tuple[list[np.ndarray], list[str]]:
    """Pictures (H, W, 3) uint8, their shorter side at most four times the resolution, and captions."""
    pictures: list[np.ndarray] = []
    captions: list[str] = []
    most = config.data.max_pixels
    for folder in folders:
        source = open_source(str(folder), config.data)
        items = sorted((item for item in source.items() if isinstance(item, Item)), key=lambda item: item.key)
        captions += [text for item in items for text, _ in item.captions]
        for item in items:
            content = source.read(item.place)
            width, height = decoding.probe(content, most)
            scale = min(1.0, 4 * config.data.resolution / min(width, height))
            size = round(height * scale), round(width * scale)
            pictures.append(decoding.load(content, size, config.data.background, most))
    return pictures, captions
