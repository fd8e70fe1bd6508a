"""From `id`, `subfolder`, `revision`, `variant` to files on this machine.

What: `resolve` gives the local folder of a hub id or of a folder that `save_pretrained` wrote; `weight_files` gives the
safetensors files of that folder, sharded or not.
Why: recipes are made from the bytes of the weights, so every part has to agree on which bytes those are; and a mistyped
id, a gated model or a machine without network must end in a sentence that says what to do.
Price: weights in pickle files (`*.bin`, `*.pth`) are refused, since reading them runs code.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config import Weights
from pipeline.errors import UserError

STEMS = ("diffusion_pytorch_model", "model")
"""File stems under which diffusers and transformers save weights."""

_HUB_ID = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*$")


class ModelError(UserError):
    """Weights, a model's configuration or a tokenizer that cannot be found or cannot be right."""


def is_local(weights: Weights) -> bool:
    """Whether `weights.id` is a folder on this machine (it goes before a hub id of the same spelling)."""
    return Path(weights.id).expanduser().is_dir()


def weight_patterns(variant: str | None) -> tuple[str, ...]:
    """Files of one model folder that loading needs: its JSON and the safetensors of this variant alone."""
    middle = f".{variant}" if variant else ""
    return ("*.json", *(f"{stem}{middle}{end}" for stem in STEMS for end in (".safetensors", "-*.safetensors")))


def resolve(weights: Weights, patterns: Sequence[str] | None = None) -> Path:
    """The local folder (subfolder included) that holds `weights`.

    Args:
        weights: `id` is a folder or a hub id; `subfolder` is inside it.
        patterns: file name patterns inside the subfolder to fetch from the hub (default: `weight_patterns`). They do
            not matter for a folder.

    Raises:
        ModelError: neither a folder nor a hub id; no such repository, revision or subfolder; a gated repository; no
            network and nothing in the hub's cache.
    """
    if is_local(weights):
        root = Path(weights.id).expanduser()
        return _below(root, weights, f"the folder {weights.id!r}")
    if not _HUB_ID.match(weights.id):
        raise ModelError(
            f"there is no folder {weights.id!r}, and it is not a hub id",
            expected="an existing folder, or OWNER/NAME on the hub",
            fix="correct `id` in the configuration",
        )
    root = _download(weights, weight_patterns(weights.variant) if patterns is None else tuple(patterns))
    return _below(root, weights, f"the hub repository {weights.id!r}")


def _below(root: Path, weights: Weights, what: str) -> Path:
    folder = root / weights.subfolder if weights.subfolder else root
    if folder.is_dir():
        return folder
    inside = sorted(p.name for p in root.iterdir() if p.is_dir())
    raise ModelError(
        f"{what} has no subfolder {weights.subfolder!r}",
        found=", ".join(inside) if inside else "no subfolders",
        fix="set `subfolder` to one of those, or to null if the files lie directly in it",
    )


def _download(weights: Weights, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    prefix = f"{weights.subfolder}/" if weights.subfolder else ""
    where = f"{weights.id!r}" + (f" at revision {weights.revision!r}" if weights.revision else "")
    copy = f"or copy the model to this machine and set `id` to its folder; looked for {weights.id}/{prefix}"
    try:
        return Path(
            huggingface_hub.snapshot_download(
                weights.id, revision=weights.revision, allow_patterns=[prefix + p for p in patterns]
            )
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"the hub repository {where} is gated: its licence has to be accepted first",
            found=_first_line(error),
            fix=f"accept it on https://huggingface.co/{weights.id}, then `hf auth login`",
        ) from None
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"the hub repository {weights.id!r} has no revision {weights.revision!r}",
            found=_first_line(error),
            fix="correct `revision`, or leave it out for the newest",
        ) from None
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder and no hub repository {where} that this login may read",
            found=_first_line(error),
            fix="correct `id`, or `hf auth login` if the repository is private",
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        raise ModelError(
            f"there is no folder {weights.id!r}; the hub repository {where} is not in the local cache, "
            "and the hub cannot be reached",
            found=_first_line(error),
            fix=f"check the network (and HF_HUB_OFFLINE), {copy}",
        ) from None
    except errors.HFValidationError as error:
        raise ModelError(f"{weights.id!r} is not a hub id", found=_first_line(error), fix="correct `id`") from None
    except OSError as error:  # the hub's other HTTP errors, and a full disk
        raise ModelError(
            f"the hub repository {where} could not be fetched",
            found=f"{type(error).__name__}: {_first_line(error)}",
            fix=f"try again; {copy}",
        ) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore"):
            raise
        raise ModelError(
            f"the hub repository {where} could not be fetched: the network failed",
            found=f"{type(error).__name__}: {_first_line(error)}",
            fix=f"check the network and the proxy, {copy}",
        ) from None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars, which would break the progress line of whoever loads a model."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_json(path: Path) -> dict:
    """A JSON object from `path`.

    Raises:
        ModelError: the file is missing, unreadable or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing", fix="give a folder that `save_pretrained` wrote") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON", found=_first_line(error)) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object", found=type(value).__name__)
    return value


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files of a model folder, in name order.

    A sharded model is named by its index file (`STEM.safetensors.index[.VARIANT].json`), otherwise there is one file
    `STEM[.VARIANT].safetensors`.

    Raises:
        ModelError: no weights, weights in another format or variant only, or a shard that the index names is missing.
    """
    middle = f".{variant}" if variant else ""
    for stem in STEMS:
        single = folder / f"{stem}{middle}.safetensors"
        if single.is_file():
            return [single]
        index = folder / f"{stem}.safetensors.index{middle}.json"
        if index.is_file():
            return _shards(index)
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pth", ".pt", ".ckpt"))
    raise ModelError(
        f"{folder} holds no safetensors weights" + (f" of variant {variant!r}" if variant else ""),
        expected=" or ".join(f"{stem}{middle}.safetensors" for stem in STEMS) + ", or their index",
        found=", ".join(others) if others else "no weight files",
        fix="set `variant` if the names differ by one; convert other formats with save_pretrained",
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    files = [index.parent / name for name in sorted({str(name) for name in weight_map.values()})]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelError(
            f"{index} names weight files that are not there",
            found="missing: " + ", ".join(missing),
            fix="copy them too",
        )
    return files
