"""From `id`, `subfolder`, `revision`, `variant` to files on this machine, for all models.

Recipes are digests of weights, so every module has to agree on which files those are. A repository may hold several
sets of the same weights. As in the libraries that wrote them, an index takes precedence over a single file in
diffusers' folders, and the reverse in transformers'. An index of a variant has three names (`weight_sets`).
Only files that are used are fetched: first the JSON files and the list of files, then the weights. Pickle files
(`*.bin`) are refused, since reading them runs code.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config import Weights, setting
from pipeline.errors import UserError, machine_error, not_permitted

STEMS = ("diffusion_pytorch_model", "model")
"""File stems under which diffusers and transformers save weights."""

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"^{_PART}/{_PART}$")
_HUB_FILE = re.compile(rf"^(?:hf://)?({_PART}/{_PART})/(.+\.(?:pth|safetensors))$")
_STEM = rf"(?P<stem>{'|'.join(STEMS)})"
_WEIGHTS = re.compile(rf"^{_STEM}(?:\.(?P<a>\w+))?(?P<shard>-\d+-of-\d+)?(?:\.(?P<b>\w+))?\.safetensors$")
_INDEX = re.compile(rf"^{_STEM}(?:\.(?P<a>\w+))?\.safetensors(?:\.(?P<b>\w+))?\.index(?:\.(?P<c>\w+))?\.json$")


class ModelError(UserError):
    """Weights, a model's configuration or a tokenizer that is missing or invalid."""


@dataclass(frozen=True)
class WeightSet:
    """One of the sets of weights in a folder.

    Attributes:
        files: names of the files present, in order.
        missing: further names in the index.
        size: bytes of all of them.
        index: the index's name, if the set has one.
        instead_of: the unused file or index of the same variant.
    """

    variant: str | None
    files: tuple[str, ...]
    missing: tuple[str, ...]
    size: int
    index: str | None = None
    instead_of: str | None = None


def is_local(weights: Weights) -> bool:
    """Whether `weights.id` is a folder or file on this machine (it takes precedence over a hub id)."""
    return Path(weights.id).exists()


def is_file(weights: Weights) -> bool:
    """Whether `weights.id` names a file, here or on the hub, and not a folder or repository."""
    return Path(weights.id).is_file() or _HUB_FILE.match(weights.id) is not None


def resolve(weights: Weights, patterns: Sequence[str] | None = None, *, widest: bool = False) -> Path:
    """The local folder (subfolder included) that holds `weights`, or the file if `id` names a file.

    Args:
        weights: `id` is a folder or a hub id; `subfolder` is inside it. Or a file, `hf://OWNER/NAME/FILE` on the hub.
        patterns: file name patterns inside the subfolder to fetch from the hub (default: the JSON files and one set of
            weights). Ignored for a local folder.
        widest: without a variant, the set of weights of the highest precision (see `choose`).

    Raises:
        ModelError: neither a folder nor a hub id; no such repository, revision or subfolder; a gated repository; no
            network and the hub's cache lacks some of it.
    """
    place, weights = _place(weights)
    if place is not None:
        return place
    what = f"the hub repository {weights.id!r}"
    if (file := _HUB_FILE.match(f"{weights.id}/{weights.subfolder or ''}")) is not None:
        root = _download(weights.model_copy(update={"id": file[1], "subfolder": None}), (file[2], _config_of(file[2])))
        if not (root / file[2]).is_file():
            raise _no_file(file[1], file[2])
        return root / file[2]
    if patterns is None:
        patterns = ("*.json", *look(weights, widest=widest).files)
    return _below(_download(weights, tuple(patterns)), weights, what)


@dataclass(frozen=True)
class Look:
    """Files and download size of some weights.

    Attributes:
        place: the folder, with its JSON files; or the path of the file, present or not.
        files: names of the weight files.
        size: their bytes.
        to_fetch: bytes still to be downloaded.
    """

    place: Path
    files: tuple[str, ...]
    size: int
    to_fetch: int


def look(weights: Weights, *, widest: bool = False) -> Look:
    """Inspect weights; fetches JSON files only. Arguments and errors as in `resolve`."""
    place, weights = _place(weights)
    if place is not None and place.is_file():
        return Look(place, (place.name,), place.stat().st_size, 0)
    if (file := _HUB_FILE.match(f"{weights.id}/{weights.subfolder or ''}")) is not None:
        return _look_at_file(weights, file[1], file[2])
    listing = None
    if place is None:
        folder = _below(_download(weights, ("*.json",)), weights, f"the hub repository {weights.id!r}")
        listing = sizes(weights)
    else:
        folder = place
    local = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    try:
        chosen = choose(folder, weights.variant, listing, widest=widest)
    except ModelError as error:
        if place is not None or listing is not None:
            raise
        raise ModelError(  # offline, and the cache is incomplete
            f"the hub cannot be reached, and its local cache does not suffice: {error.what}",
            expected=error.expected,
            found=error.found,
            fix=f"where the hub can be reached (HF_HUB_OFFLINE unset): {fetch_command(weights)}",
        ) from None
    sizes_of = {name: (listing or local)[name] for name in chosen.files}
    to_fetch = sum(size for name, size in sizes_of.items() if local.get(name) != size)
    return Look(folder, chosen.files, sum(sizes_of.values()), to_fetch)


def _look_at_file(weights: Weights, repository: str, file: str) -> Look:
    name, parent = Path(file).name, Path(file).parent.as_posix()
    folder = weights.model_copy(update={"id": repository, "subfolder": None if parent == "." else parent})
    listing = sizes(folder)
    if listing is not None and name not in listing:
        raise _no_file(repository, file)
    root = _download(folder.model_copy(update={"subfolder": None}), (_config_of(file),) if listing else (file,))
    present, size = (root / file).is_file(), (listing or {}).get(name, 0)
    return Look(root / file, (name,), (root / file).stat().st_size if present else size, 0 if present else size)


def _no_file(repository: str, file: str) -> ModelError:
    return ModelError(f"the hub repository {repository!r} has no file {file!r}", fix="correct `id`")


def _config_of(file: str) -> str:
    return Path(file).with_name("config.json").as_posix()


def _place(weights: Weights) -> tuple[Path | None, Weights]:
    """The folder or file on this machine; None if on the hub. A file's path on the hub is moved to `subfolder`.

    Raises:
        ModelError: neither, or no such subfolder.
    """
    root = Path(weights.id)
    if root.is_file():
        return root, weights
    if root.is_dir():
        return _below(root, weights, f"the folder {weights.id!r}"), weights
    if (file := _HUB_FILE.match(weights.id)) is not None:
        return None, weights.model_copy(update={"id": file[1], "subfolder": file[2]})
    if not _HUB_ID.match(weights.id):
        raise ModelError(
            f"there is no folder {weights.id!r}, and it is not a hub id",
            expected="an existing folder, or OWNER/NAME on the hub",
            fix="correct `id` in the configuration",
        )
    return None, weights


def fetch_command(weights: Weights) -> str:
    """The command that fetches all files of `weights.subfolder`."""
    revision = f" --revision {weights.revision}" if weights.revision else ""
    return f"hf download {weights.id}{revision} --include '{f'{weights.subfolder}/' if weights.subfolder else ''}*'"


def sizes(weights: Weights) -> dict[str, int] | None:
    """Name -> bytes of the hub's files in `weights.subfolder`; None if it cannot be reached.

    Raises:
        ModelError: no such repository or revision.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    prefix = f"{weights.subfolder}/" if weights.subfolder else ""
    with _explained(weights):
        try:
            info = HfApi().model_info(weights.id, revision=weights.revision, files_metadata=True)
        except OfflineModeIsEnabled:
            return None
        except Exception as error:
            if not _is_network(error):
                raise
            return None
    files = {
        file.rfilename.removeprefix(prefix): file.size or 0
        for file in info.siblings or ()
        if file.rfilename.startswith(prefix)
    }
    return {name: size for name, size in files.items() if "/" not in name}


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

    prefix = f"{weights.subfolder}/" if weights.subfolder else ""
    with _explained(weights):
        return Path(
            huggingface_hub.snapshot_download(
                weights.id, revision=weights.revision, allow_patterns=[prefix + p for p in patterns]
            )
        )


def _is_network(error: BaseException) -> bool:
    """Whether an error comes from one of huggingface_hub's HTTP libraries."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3")


@contextlib.contextmanager
def _explained(weights: Weights) -> Iterator[None]:
    """Turn the hub's errors into ModelErrors with a fix."""
    from huggingface_hub import errors

    repository = f"{weights.id!r}" + (f" at revision {weights.revision!r}" if weights.revision else "")
    copy = "or copy the model to this machine and set `id` to its folder"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"the hub repository {repository} is gated: its licence has to be accepted first",
            found=_first_line(error),
            fix=f"accept it on https://huggingface.co/{weights.id}, then `hf auth login` (or set HF_TOKEN)",
        ) from None
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"the hub repository {weights.id!r} has no revision {weights.revision!r}",
            found=_first_line(error),
            fix="correct `revision`, or leave it out for the newest",
        ) from None
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder and no hub repository {repository} that this login may read",
            found=_first_line(error),
            fix="correct `id`, or `hf auth login` if the repository is private",
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        raise ModelError(
            f"the hub cannot be reached, and {repository} is neither in its local cache nor a folder here",
            found=_first_line(error),
            fix=f"check the network (and HF_HUB_OFFLINE), {copy}",
        ) from None
    except errors.HFValidationError as error:
        raise ModelError(f"{weights.id!r} is not a hub id", found=_first_line(error), fix="correct `id`") from None
    except OSError as error:  # the hub's other HTTP errors
        raise machine_error(error, f"the hub repository {repository} could not be fetched") or ModelError(
            f"the hub repository {repository} could not be fetched",
            found=f"{type(error).__name__}: {_first_line(error)}",
            fix=f"try again: what was fetched is kept; {copy}",
        ) from None
    except Exception as error:
        if not _is_network(error):
            raise
        raise ModelError(
            f"the hub repository {repository} could not be fetched: the network failed",
            found=f"{type(error).__name__}: {_first_line(error)}",
            fix=f"check the network and the proxy, {copy}",
        ) from None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def load(kind: Any, folder: Path, what: str, **options: Any) -> Any:
    """`kind.from_pretrained(folder)`, the only call of it: from the files of this folder, of which no code is run.

    Args:
        kind: a class of transformers or diffusers.
        what: the kind of model, for the message.

    Raises:
        ModelError: the folder cannot be loaded, or only by running its code.
    """
    try:
        with no_progress_bars():
            return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except (RuntimeError, OSError, ValueError, KeyError, ImportError) as error:
        found = " ".join(str(error).split())[:600]
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"the {what} in {folder} names code of its own, which is not run",
                expected="a class of transformers, and no `auto_map` in its JSON files",
                fix="take the files of google/gemma-2-2b-it or of a Sana repository",
            ) from None
        what = f"the {what} in {folder} cannot be loaded"
        raise ModelError(what, found=found, fix="fetch the folder again") from None


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which would break our progress line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_settings(
    folder: Path, field: str, known: Collection[str], what: str, *, expected: str, fix: str
) -> dict[str, Any]:
    """The `config.json` of a folder, whose `field` must have one of the `known` values.

    Args:
        what: the kind of model, for the message.

    Raises:
        ModelError: it is missing, or of another kind.
    """
    settings = read_json(folder / "config.json")
    if settings.get(field) not in known:
        raise ModelError(
            f"{folder} is not a {what} that this pipeline knows",
            expected=expected,
            found=settings.get(field),
            fix=fix,
        )
    return settings


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
        raise not_permitted(path) or ModelError(f"{path} cannot be read as JSON", found=_first_line(error)) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object", found=type(value).__name__)
    return value


def open_tensors(path: Path) -> Any:
    """An open safetensors file.

    Raises:
        UserError: this user may not read it, or it cannot be read as one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        what = f"{path} cannot be read as safetensors"
        raise not_permitted(path) or ModelError(what, found=str(error), fix="fetch or export it again") from None


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files of a model folder, in name order (see `choose`).

    Raises:
        ModelError: no weights, weights in another format or variant only, or a shard that the index names is missing.
    """
    return [folder / name for name in choose(folder, variant).files]


def choose(
    folder: Path, variant: str | None = None, listing: Mapping[str, int] | None = None, *, widest: bool = False
) -> WeightSet:
    """Choose a set of weights.

    Args:
        listing: name -> bytes of files that could be fetched into the folder; default: the files in it.
        widest: without a variant, take the set with the most bytes, so of the highest precision; of equally large
            ones that without a variant's name. Otherwise no variant means the files without a variant's name.

    Raises:
        ModelError: as `weight_files`.
    """
    files = {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()} if listing is None else listing
    sets = weight_sets(folder, files)
    if variant is None and widest:
        sets.sort(key=lambda s: (-s.size if s.files else 1, s.variant or ""))
    else:
        sets = [s for s in sets if s.variant == variant]
    if not sets:
        others = sorted(n for n in files if n.endswith((".safetensors", ".bin", ".pth", ".pt", ".ckpt")))
        names = sorted({s.variant for s in weight_sets(folder, files) if s.files and s.variant})
        middle = f".{variant}" if variant else ""
        fix = "give the right `subfolder`; convert other formats with save_pretrained"
        if single := [name for name in others if name.endswith((".safetensors", ".pth"))]:
            file = f"{setting('model.weights.id', str(folder / single[-1]))} --set model.weights.subfolder=null"
            fix += f"; a transformer in NVlabs' form: {file}"
        raise ModelError(
            f"{folder} has no weights in safetensors files" + (f" of variant {variant!r}" if variant else ""),
            expected=" or ".join(f"{stem}{middle}.safetensors" for stem in STEMS) + ", or their index",
            found=", ".join(others) if others else "no weight files",
            fix=f"set `variant` (model.weights.variant for the transformer) to {' or '.join(names)}" if names else fix,
        )
    best = sets[0]
    if best.missing:
        other = ""
        if (complete := next((s for s in sets if not s.missing), None)) is not None:
            named = complete.variant not in (None, best.variant)
            how = f"set `variant: {complete.variant}`" if named else f"remove {best.index}"
            other = f", or {how}: {complete.files[0]} is complete"
        raise ModelError(
            f"{folder / (best.index or '')} names weight files that are not there",
            found="missing: " + ", ".join(best.missing[:8]) + (" .." if len(best.missing) > 8 else ""),
            fix=f"fetch or copy them too{other}",
        )
    return best


def weight_sets(folder: Path, files: Mapping[str, int]) -> list[WeightSet]:
    """Every set of weights, diffusers' first: the files of an index, or a single file. Indexes are read from `folder`.

    An index without any of its files is a set without files. The index of a variant is called
    `model.safetensors.index.bf16.json` (transformers, recent diffusers),
    `diffusion_pytorch_model.safetensors.bf16.index.json` (diffusers before 0.31) or
    `diffusion_pytorch_model.bf16.safetensors.index.json`.

    Args:
        files: name -> bytes.

    Raises:
        ModelError: an index that cannot be read.
    """
    single: dict[tuple[str, str | None], str] = {}
    index: dict[tuple[str, str | None], str] = {}
    for name in sorted(files):
        if (match := _WEIGHTS.match(name)) and not match["shard"] and not (match["a"] and match["b"]):
            single[match["stem"], match["a"] or match["b"]] = name
        elif match := _INDEX.match(name):
            index.setdefault((match["stem"], match["a"] or match["b"] or match["c"]), name)
    sets = []
    for stem, variant in sorted({*single, *index}, key=lambda key: (STEMS.index(key[0]), key[1] or "")):
        options = []
        if (file := single.get((stem, variant))) is not None:
            options.append(WeightSet(variant, (file,), (), files[file]))
        if (file := index.get((stem, variant))) is not None:
            names, total = _shards(folder / file)
            present = tuple(name for name in names if name in files)
            missing = tuple(name for name in names if name not in files)
            size = max(total if missing else 0, sum(files[name] for name in present))
            if present or not options:
                place = 0 if stem == STEMS[0] else len(options)
                options.insert(place, WeightSet(variant, present, missing, size, file))
        if len(options) > 1:
            options[0] = replace(options[0], instead_of=options[1].index or options[1].files[0])
        sets.append(options[0])
    return sets


def _shards(index: Path) -> tuple[list[str], int]:
    """The files that an index names, in order, and their total bytes according to it."""
    content = read_json(index)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return sorted({str(name) for name in weight_map.values()}), int(total) if isinstance(total, int | float) else 0
