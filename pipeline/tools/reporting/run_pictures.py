"""Drawn latents of a run and their pictures: `RUN/pictures/step-XXXXXXXX.safetensors` and the folder next to it.

What: `train` writes a file of latents whenever it draws; `Watcher` decodes each to `step-XXXXXXXX/NNNN.png` (a control
to `NNNN-control.png`) and then writes `decoded.json` there, with the digest of the file of latents. So pictures count
only if they are of the present file: after a resume from an earlier checkpoint another may take its place.
Why a watcher: training imports no encoder. The watcher has the VAE's decoder and no transformer, reads only the run
directory, and may run on a CPU or another GPU.
"""

from __future__ import annotations

import functools
import json
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sana_pipe.base.disk import replacing
from sana_pipe.base.errors import ConfigError, UserError, not_permitted, writing
from sana_pipe.base.launch import gpus, resolve_device
from sana_pipe.base.processes import catching, shown
from sana_pipe.data.cache import layout
from sana_pipe.data.encoders.config import VaeConfig
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.train.training import lock

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from sana_pipe.data.encoders.vae import LatentDecoder

FOLDER = "pictures"
DECODED = "decoded.json"
POLL_S = 2.0
_DECIDES = ("weights", "compression", "channels", "scaling_factor", "shift_factor")
"""Fields of a latent encoding that a decoder has to fit."""


@dataclass(frozen=True)
class DrawingFacts:
    """The description of drawn latents, as their file states it. None: it does not.

    Attributes:
        latent: the values of the latent encoding.
        controlled: drawn by a ControlNet.
    """

    step: int
    prompts: list[str]
    latent: dict[str, Any]
    ema: bool | None
    height: int | None
    width: int | None
    sampling_steps: int | None
    guidance: float | None
    seed: int | None
    prompt_set: str | None
    controlled: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> DrawingFacts:
        stated: dict[str, Any] = {each.name: values.get(each.name) for each in fields(cls)}
        stated |= {
            "step": int(values["step"]),
            "prompts": [str(prompt) for prompt in values.get("prompts") or ()],
            "latent": values.get("latent") or {},
            "controlled": "controls" in values,
        }
        return cls(**stated)


@dataclass(frozen=True)
class Drawing:
    """A file of drawn latents. digest: of its bytes."""

    path: Path
    data: bytes
    digest: str
    facts: DrawingFacts

    @classmethod
    def read(cls, path: Path) -> Drawing:
        """Raises a UserError if it is not a file of drawn latents."""
        try:
            data = path.read_bytes()
            head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            facts = DrawingFacts.of(json.loads(head["__metadata__"]["drawing"]))
            return cls(path, data, layout.content_digest(data), facts)
        except OSError as error:
            raise not_permitted(path) or UserError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: is not a file of drawn latents: {error!r}", fix="remove it") from None

    @property
    def folder(self) -> Path:
        """Return the folder of its pictures."""
        return self.path.with_suffix("")

    def latents(self) -> dict[str, torch.Tensor]:
        """Read the latents by name, (C, h, w) float32, multiplied by the scaling factor.

        Raises:
            UserError: the file is damaged, or holds something else.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            latents = load(self.data)
        except SafetensorError as error:
            raise UserError(f"{self.path}: cannot be read as safetensors: {error}", fix="remove it") from None
        odd = [f"{name}: {tuple(each.shape)}" for name, each in latents.items() if each.ndim != 3]
        if odd:
            what, expected = f"{self.path}: holds tensors that are not latents", "tensors of shape (C, h, w)"
            raise UserError(what, expected=expected, found=", ".join(odd), fix="remove it")
        return latents

    def pictures(self) -> dict[str, Path | None] | None:
        """The decoded pictures by the names of the latents; None: one that could not be decoded. None if the present
        file is not decoded."""
        try:
            document = json.loads((self.folder / DECODED).read_bytes())
            if document["latents"] != self.digest:
                return None
            return {name: file and self.folder / file for name, file in document["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


@dataclass(frozen=True)
class DrawingFigures:
    """A drawing for reports, with the values that its file states (None: it does not).

    Attributes:
        pictures: a path or None (not decodable) for each prompt; None: they are not decoded yet.
        controls: likewise of a run with a ControlNet, else None.
    """

    step: int
    file: str
    ema: bool | None
    height: int | None
    width: int | None
    sampling_steps: int | None
    guidance: float | None
    seed: int | None
    prompt_set: str | None
    prompts: list[str]
    pictures: list[str | None] | None
    controls: list[str | None] | None


@dataclass(frozen=True)
class UnreadableDrawing:
    """A drawing whose file cannot be read."""

    step: int
    file: str
    problem: str


def listed(run: Path, rows: list[dict[str, Any]]) -> list[DrawingFigures | UnreadableDrawing]:
    """The drawings of a run directory for reports, by step; files that were removed are left out.

    Args:
        rows: the journal's `pictures` rows, those of the last attempts.
    """
    drawings = list[DrawingFigures | UnreadableDrawing]()
    for row in rows:
        path = run / FOLDER / Path(str(row.get("file"))).name
        if not path.is_file():
            continue
        try:
            drawing = Drawing.read(path)
        except UserError as error:
            drawings.append(UnreadableDrawing(row["step"], str(path), error.what))
            continue
        facts, made, count = drawing.facts, drawing.pictures(), len(drawing.facts.prompts)
        drawings.append(
            DrawingFigures(
                step=row["step"],
                file=str(path),
                ema=facts.ema,
                height=facts.height,
                width=facts.width,
                sampling_steps=facts.sampling_steps,
                guidance=facts.guidance,
                seed=facts.seed,
                prompt_set=facts.prompt_set,
                prompts=facts.prompts,
                pictures=None if made is None else _places(made, count),
                controls=None if made is None or not facts.controlled else _places(made, count, "-control"),
            )
        )
    return drawings


def _places(made: dict[str, Path | None], count: int, ending: str = "") -> list[str | None]:
    """The files of the first pictures. made: of `Drawing.pictures`."""
    files = [made.get(f"{number:04d}{ending}") for number in range(count)]
    return [None if file is None else str(file) for file in files]


def files(run: Path) -> list[Path]:
    """The files of drawn latents of a run directory and of those in it, in the order of steps."""
    return sorted([*run.glob(f"{FOLDER}/step-*.safetensors"), *run.glob(f"*/{FOLDER}/step-*.safetensors")])


class Watcher:
    """Decodes the drawings of a run.

    Args:
        run: the run directory, or a folder of run directories.
        device: gives the decoder's, again and again: it may change.
        log: called with each line for people.
        publish: called with the run directory, the step and the pictures of each drawing.
    """

    def __init__(
        self,
        vae: VaeConfig,
        run: Path,
        device: Callable[[], torch.device],
        log: Callable[[str], None],
        publish: Callable[[Path, int, dict[str, Image.Image]], None] = lambda run, step, pictures: None,
    ):
        self.vae, self.run, self.device, self.log, self.publish = vae, run, device, log, publish
        self.failed: dict[Path, str] = {}
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self.decoder: LatentDecoder | None = None
        self._described: dict[str, Any] | None = None

    def watch(self, *, once: bool = False, poll_s: float = POLL_S) -> None:
        """Decode what is there and what appears, until SIGINT, SIGTERM or SIGHUP; the drawing at hand is finished.

        Args:
            once: return when everything is decoded.

        Raises:
            UserError: the drawings are of another VAE, or the VAE cannot be read; with `once` also: no run
                directory with drawings, or a file that could not be decoded.
        """
        if once and not files(self.run):
            what = "has no drawings" if self.run.is_dir() else "there is no such run directory"
            fix = "--watch RUN, as train.output names it; a training draws with --set 'train.pictures={}'"
            raise UserError(f"{self.run}: {what}", fix=fix)
        stop = threading.Event()

        def asked(number: int, frame: object) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            stop.set()

        with catching((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), asked):
            made = self.decode_new(stop)
            if not made and not once:
                absent = "" if self.run.is_dir() else ", which does not exist yet"
                self.log(f"waiting for drawings in {self.run}{absent}; press Ctrl-C to stop")
            while not once and not stop.wait(poll_s):
                self.decode_new(stop)
        if stop.is_set():
            self.log("stopped; the same command continues")
        elif self.failed:
            raise UserError(
                f"{len(self.failed)} files of drawn latents could not be decoded",
                found="; ".join(self.failed.values()),
                fix="remove them; a resumed training draws them again",
            )
        elif not made:
            self.log(f"{self.run}: all drawings are decoded already")

    def decode_new(self, stop: threading.Event) -> int:
        """Decode every new file; returns how many."""
        made = 0
        if self.decoder is not None:
            self._leave_other_devices()
        for path in files(self.run):
            if stop.is_set():
                break
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._seen.get(path) == seen:
                continue
            self._seen[path] = seen
            try:
                drawing = Drawing.read(path)
                latents = drawing.latents() if drawing.pictures() is None else None
            except UserError as error:
                self.failed[path] = error.what
                self.log(error.line)
                continue
            if latents is not None:
                self._decode(drawing, latents)
                made += 1
        return made

    def _leave_other_devices(self) -> torch.device:
        """The device of the decoder from now on; the memory of one on another device is given back."""
        import torch

        device = self.device()
        if self.decoder is not None and self.decoder.device != device:
            self.decoder = None
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        return device

    def _decode(self, drawing: Drawing, latents: dict[str, torch.Tensor]) -> None:
        from PIL import Image

        from sana_pipe.data.encoders.frozen import NonFiniteOutputError
        from sana_pipe.data.encoders.vae import LatentDecoder

        self._check(drawing)
        device = self._leave_other_devices()
        if self.decoder is None:
            self.decoder = LatentDecoder.load(self.vae, device)
        names: dict[str, str | None] = {}
        pictures = dict[str, Image.Image]()
        with writing(drawing.folder, "check the permissions"):
            drawing.folder.mkdir(exist_ok=True)
            for name, latent in sorted(latents.items()):
                try:
                    picture = Image.fromarray(self.decoder.decode(latent[None])[0])
                except NonFiniteOutputError as error:
                    self.log(f"{drawing.path}: {name} has no picture: {error.line}")
                    names[name] = None
                    continue
                names[name], pictures[name] = f"{name}.png", picture
                with replacing(drawing.folder / f"{name}.png") as work:
                    picture.save(work, "PNG")
            with replacing(drawing.folder / DECODED) as work:
                work.write_text(json.dumps({"latents": drawing.digest, "files": names}) + "\n", encoding="utf-8")
        count = sum(name is not None for name in names.values())
        self.log(f"step {drawing.facts.step}: {count} pictures in {drawing.folder}")
        self.publish(drawing.path.parent.parent, drawing.facts.step, pictures)

    def _check(self, drawing: Drawing) -> None:
        """ConfigError unless the configured VAE made the latents that the model was trained on."""
        from sana_pipe.data.encoders.vae import describe_vae

        if self._described is None:
            described = describe_vae(self.vae)
            self._described = {name: described[name] for name in _DECIDES}
        encoding = LatentEncoding.from_values(drawing.facts.latent)
        if differences := encoding.unlike(self._described):
            raise ConfigError(
                f"{drawing.path}: was drawn for the latents of another VAE (drawn | configured)",
                found="; ".join(differences),
                fix="give the configuration of the training: --config FILE (vae.decoder may name a faster decoder)",
            )


def decode_command(run: Path) -> str:
    """The command that decodes what is not decoded yet, as a user types it."""
    return shown("sample", "--watch", str(run), "--once")


def decoder_device(name: str, run: Path, log: Callable[[str], None]) -> Callable[[], torch.device]:
    """Give the decoder's device, anew for each picture. `auto` takes the CPU from the moment that a training of this
    host is alive: a decoder on the training's GPU takes 3 GiB that the training may need. Until a picture is decoded no
    GPU is opened."""
    resolved = functools.cache(partial(resolve_device, option="encode.device", log=log))
    avoids = False
    if name != "auto":
        resolved(name)  # a wrong one is refused at the start

    def device() -> torch.device:
        nonlocal avoids
        if name == "auto" and not avoids and gpus().count and (owner := lock.owner_here(run)) is not None:
            avoids = True
            log(
                f"decoding on the CPU, because {owner} trains in {run} and may need the GPU's memory; to decode on "
                "another GPU: --set encode.device=cuda:1"
            )
        return resolved("cpu" if avoids else name)

    return device
