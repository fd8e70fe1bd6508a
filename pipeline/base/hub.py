"""Find the files of an `id` and its `revision` on this machine or the hub, for all models.

Encodings are named by digests of weights, so every module has to agree on which files those are. A repository may hold
several sets of the same weights. As in the libraries that wrote them, an index takes precedence over a single file in
diffusers' folders, and the reverse in transformers'. An index of a variant has three names (`weight_sets`).
Only files that are used are fetched: first the JSON files and the list of files, then the weights. Pickle files
(`*.bin`) are refused, since reading them runs code.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sana_pipe.base.config import Weights, setting
from sana_pipe.base.errors import UserError, machine_error, not_permitted

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
    """One of the sets of weights in a folder. files: names of those present, in order. missing: further names in the
    index. size: bytes of all of them."""

    variant: str | None
    files: tuple[str, ...]
    missing: tuple[str, ...]
    size: int
    index: str | None = None


@dataclass(frozen=True)
class _Repository:
    """A model on the hub or a folder here. folder: where a pipeline has the model; "": at the top."""

    id: str
    folder: str
    revision: str | None

    @classmethod
    def of(cls, weights: Weights) -> _Repository:
        return cls(weights.id, weights.folder, weights.revision)

    def inside(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name


def is_local(weights: Weights) -> bool:
    """Return whether `weights.id` is a folder or file on this machine (it takes precedence over a hub id)."""
    return Path(weights.id).exists()


def is_file(weights: Weights) -> bool:
    """Return whether `weights.id` names a file, here or on the hub, and not a folder or repository."""
    return Path(weights.id).is_file() or _HUB_FILE.match(weights.id) is not None


def resolve(weights: Weights, patterns: Sequence[str] | None = None, *, widest: bool = False) -> Path:
    """Return the local folder that holds `weights`, or the file if `id` names a file.

    Args:
        weights: `id` is a folder or a hub id, of the model or of a pipeline that has the model in `weights.folder`. Or
            a file, `hf://OWNER/NAME/FILE` on the hub.
        patterns: file name patterns inside the model's folder to fetch from the hub (default: the JSON files and one
            set of weights). Ignored for a local folder.
        widest: without a variant, the set of weights of the highest precision (see `choose`).

    Raises:
        ModelError: neither a folder nor a hub id; no such repository or revision, or no such model in it; a gated
            repository; no network and the hub's cache lacks some of it.
    """
    place, repository, file = _place(weights)
    if place is not None:
        return place
    if file is not None:
        path = _download(repository, (file, "config.json")) / repository.inside(file)
        if not path.is_file():
            raise _no_file(repository, file)
        return path
    if patterns is None:
        patterns = ("*.json", *look(weights, widest=widest).files)
    return _fetched(repository, patterns)


@dataclass(frozen=True)
class Look:
    """Files and download size of some weights. place: the folder, with its JSON files, or the path of the file, present
    or not. size: bytes of the weight files. to_fetch: bytes still to be downloaded."""

    place: Path
    files: tuple[str, ...]
    size: int
    to_fetch: int


def look(weights: Weights, *, widest: bool = False) -> Look:
    """Inspect weights; fetches JSON files only. Arguments and errors as in `resolve`."""
    place, repository, file = _place(weights)
    if place is not None and place.is_file():
        return Look(place, (place.name,), place.stat().st_size, 0)
    if file is not None:
        return _look_at_file(repository, file)
    folder = place or _fetched(repository, ("*.json",))
    listing = None if place is not None else sizes(weights)
    local = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    try:
        variant = weights.weight_variant
        chosen = choose(folder, variant, listing, widest=widest)
    except ModelError as error:
        if place is not None or listing is not None:
            raise
        revision = f" --revision {weights.revision}" if weights.revision else ""
        inside = repository.inside("*") if folder.name == repository.folder else "*"
        command = f"hf download {weights.id}{revision} --include '{inside}'"
        raise ModelError(  # offline, and the cache is incomplete
            f"the hub cannot be reached, and its local cache lacks files: {error.what}",
            expected=error.expected,
            found=error.found,
            fix=f"where the hub can be reached (HF_HUB_OFFLINE unset): {command}",
        ) from None
    sizes_of = {name: (listing or local)[name] for name in chosen.files}
    to_fetch = sum(size for name, size in sizes_of.items() if local.get(name) != size)
    return Look(folder, chosen.files, sum(sizes_of.values()), to_fetch)


def _look_at_file(repository: _Repository, file: str) -> Look:
    listing = _listed_sizes(repository)
    if listing is not None and file not in listing:
        raise _no_file(repository, file)
    path = _download(repository, ("config.json",) if listing else (file,)) / repository.inside(file)
    size = path.stat().st_size if path.is_file() else (listing or {}).get(file, 0)
    return Look(path, (file,), size, 0 if path.is_file() else size)


def _no_file(repository: _Repository, file: str) -> ModelError:
    return ModelError(
        f"the hub repository {repository.id!r} has no file {repository.inside(file)!r}", fix="correct `id`"
    )


def _place(weights: Weights) -> tuple[Path | None, _Repository, str | None]:
    """The folder or file on this machine (None: it is on the hub), the repository with the folder in it, and the name
    if a file in that folder is meant."""
    root, repository = Path(weights.id), _Repository.of(weights)
    if root.is_file():
        return root, repository, None
    if root.is_dir():
        return _below(root, repository), repository, None
    if (match := _HUB_FILE.match(weights.id)) is not None:
        folder, _, name = match[2].rpartition("/")
        return None, _Repository(match[1], folder, weights.revision), name
    if not _HUB_ID.match(weights.id):
        raise ModelError(
            f"there is no folder {weights.id!r}, and it is not a hub id",
            expected="an existing folder, or OWNER/NAME on the hub",
            fix="correct `id` in the configuration",
        )
    return None, repository, None


def sizes(weights: Weights) -> dict[str, int] | None:
    """List name -> bytes of the hub's files of a model; None if the hub cannot be reached."""
    repository = _Repository.of(weights)
    found = _listed_sizes(repository)
    return _listed_sizes(replace(repository, folder="")) if found == {} and repository.folder else found


def _listed_sizes(repository: _Repository) -> dict[str, int] | None:
    """The same of the files in the repository's folder alone; empty if there is no such folder."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    prefix = repository.inside("")
    with _explained(repository):
        try:
            info = HfApi().model_info(repository.id, revision=repository.revision, files_metadata=True)
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


_AT_THE_TOP = ("config.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model")
"""A folder with one of these files is a model's or a tokenizer's, not a pipeline's."""


def _below(root: Path, repository: _Repository) -> Path:
    """The model's folder below `root`: that of its name, else `root` itself if it is a model's."""
    folder = root / repository.folder
    if folder.is_dir():
        return folder
    if any((root / name).is_file() for name in _AT_THE_TOP):
        return root
    inside = sorted(p.name for p in root.iterdir() if p.is_dir())
    raise ModelError(
        f"the {'folder' if Path(repository.id).exists() else 'hub repository'} {repository.id!r} has no folder "
        f"{repository.folder!r}, and is not a model's folder itself",
        found=", ".join(inside) if inside else "no folders",
        fix="set `id` to the model's folder, or to a pipeline that has it",
    )


def _fetched(repository: _Repository, patterns: Sequence[str]) -> Path:
    """Fetch files of the model's folder, or of the top of a repository without that folder."""
    root = _download(repository, patterns)
    if repository.folder and not (root / repository.folder).is_dir():
        root = _download(replace(repository, folder=""), patterns)
    return _below(root, repository)


def _download(repository: _Repository, patterns: Sequence[str]) -> Path:
    import huggingface_hub

    names = [repository.inside(pattern) for pattern in patterns]
    with _explained(repository):
        found = huggingface_hub.snapshot_download(repository.id, revision=repository.revision, allow_patterns=names)
    return Path(found)


def _is_network(error: BaseException) -> bool:
    """Return whether an error comes from one of huggingface_hub's HTTP libraries."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3")


@contextlib.contextmanager
def _explained(repository: _Repository) -> Iterator[None]:
    """Turn the hub's errors into ModelErrors with a fix."""
    try:
        yield
    except Exception as error:
        if (explained := _explanation(error, repository)) is None:
            raise
        raise explained from None


def _explanation(error: Exception, weights: _Repository) -> UserError | None:
    from huggingface_hub import errors

    place = weights.id + (f" at revision {weights.revision}" if weights.revision else "")
    copy = "or copy the model here and set `id` to its folder"
    gated = f"accept it on https://huggingface.co/{weights.id}, then `hf auth login` (or set HF_TOKEN)"
    private = "correct `id`, or `hf auth login` if the repository is private"
    unreachable = errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError
    offline = f"check the network (and HF_HUB_OFFLINE), {copy}"
    known: tuple[tuple[Any, str, str], ...] = (
        (errors.GatedRepoError, "is gated: its licence has to be accepted first", gated),
        (errors.RevisionNotFoundError, "has no such revision", "correct `revision`, or leave it out for the newest"),
        (errors.RepositoryNotFoundError, "does not exist (nor such a folder), or this login may not read it", private),
        (unreachable, "is not in the local cache (nor such a folder), and the hub cannot be reached", offline),
        (errors.HFValidationError, "has no valid name", "correct `id`"),
        (OSError, "could not be fetched", f"try again: what was fetched is kept; {copy}"),  # other errors of HTTP
    )
    what = f"the hub repository {place}"
    for kind, happened, fix in known:
        if isinstance(error, kind):
            full = machine_error(error, f"{what} could not be fetched") if kind is OSError else None
            return full or ModelError(f"{what} {happened}", found=_first_line(error), fix=fix)
    if not _is_network(error):
        return None
    fix = f"check the network and the proxy, {copy}"
    return ModelError(f"{what} could not be fetched: the network failed", found=_first_line(error), fix=fix)


def listed(names: Iterable[str], limit: int = 8) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def load(kind: Any, folder: Path, what: str, **options: Any) -> Any:
    """`kind.from_pretrained(folder)`, the only call of it: from the files of this folder, of which no code is run."""
    try:
        with no_progress_bars():
            return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except (RuntimeError, OSError, ValueError, KeyError, ImportError) as error:
        found = " ".join(str(error).split())[:600]
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"the {what} in {folder} names code of its own, which is not run",
                expected="a class of transformers, and no `auto_map` in its JSON files",
                fix="take the files of the repository of the model that is trained",
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


def read_settings(folder: Path, field: str, known: Sequence[str], what: str, fix: str) -> dict[str, Any]:
    """The `config.json` of a folder, whose `field` must have one of the `known` values. what: the kind of model."""
    settings = read_json(folder / "config.json")
    if settings.get(field) not in known:
        what = f"{folder} is not a {what} that this pipeline knows"
        raise ModelError(what, expected=f"{field} {' or '.join(known)}", found=settings.get(field), fix=fix)
    return settings


def read_json(path: Path) -> dict:
    """A JSON object from `path`; anything else is a ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        fix = "give a folder that `save_pretrained` wrote, the model's or a pipeline's"
        raise ModelError(f"{path} is missing", fix=fix) from None
    except (OSError, ValueError, RecursionError) as error:
        raise not_permitted(path) or ModelError(f"{path} cannot be read as JSON", found=_first_line(error)) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object", found=type(value).__name__)
    return value


def open_tensors(path: Path) -> Any:
    """An open safetensors file; anything else is a UserError."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        what = f"{path} cannot be read as safetensors"
        raise not_permitted(path) or ModelError(what, found=str(error), fix="fetch or export it again") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of an encoder's folder, in name order. Errors as in `choose`."""
    return [folder / name for name in choose(folder).files]


def choose(
    folder: Path, variant: str | None = None, listing: Mapping[str, int] | None = None, *, widest: bool = False
) -> WeightSet:
    """Choose a set of weights.

    Args:
        listing: name -> bytes of files that could be fetched into the folder; default: the files in it.
        variant: that of the files' names, such as `fp16`.
        widest: without a variant, take the set with the most bytes, so of the highest precision; of equally large
            ones that without a variant's name. Otherwise the files without a variant's name come first.

    Raises:
        ModelError: no weights, weights in another format, no such variant, or a shard that the index names is missing.
    """
    files = {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()} if listing is None else listing
    sets = weight_sets(folder, files)
    if variant is None:
        sets.sort(key=lambda s: (not s.files, not widest and s.variant is not None, -s.size, s.variant or ""))
    else:
        sets = [s for s in sets if s.variant == variant]
    if not sets:
        others = sorted(n for n in files if n.endswith((".safetensors", ".bin", ".pth", ".pt", ".ckpt")))
        names = sorted({s.variant for s in weight_sets(folder, files) if s.files and s.variant})
        middle = f".{variant}" if variant else ""
        fix = "give the model's folder as `id`; convert other formats with save_pretrained"
        if single := [name for name in others if name.endswith((".safetensors", ".pth"))]:
            file = setting("model.weights.id", str(folder / single[-1]))
            fix += f"; a transformer in NVlabs' form: {file}"
        raise ModelError(
            f"{folder} has no weights in safetensors files" + (f" of variant {variant!r}" if variant else ""),
            expected=" or ".join(f"{stem}{middle}.safetensors" for stem in STEMS) + ", or their index",
            found=", ".join(others) if others else "no weight files",
            fix=setting("model.weights.variant", *names) if names else fix,
        )
    best = sets[0]
    if best.missing:
        other = ""
        if (complete := next((s for s in sets if not s.missing), None)) is not None:
            named = complete.variant not in (None, best.variant)
            how = setting("model.weights.variant", complete.variant) if named and widest else f"remove {best.index}"
            other = f", or {how}: {complete.files[0]} is complete"
        raise ModelError(
            f"{folder / (best.index or '')} names weight files that are not there",
            found=f"missing: {listed(best.missing)}",
            fix=f"fetch or copy them too{other}",
        )
    return best


def weight_sets(folder: Path, files: Mapping[str, int]) -> list[WeightSet]:
    """Every set of weights among files (name -> bytes), diffusers' first: the files of an index, perhaps none of them
    there, or a single file. Indexes are read from `folder`. That of a variant is called
    `model.safetensors.index.bf16.json` (transformers, recent diffusers),
    `diffusion_pytorch_model.safetensors.bf16.index.json` (diffusers before 0.31) or
    `diffusion_pytorch_model.bf16.safetensors.index.json`."""
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
