"""The configuration: one strict, typed YAML file for every stage. Each option is documented at its field.

`load()` reads `--config F`, else `./sana-pipe.yaml`, else the shipped `sana_1600m_1024.yaml`, and applies `--set a.b=c`
on top. A mistake must stop the run before it costs GPU hours: unknown keys are errors that name the key, the file and
the nearest valid name, and values are not converted (an integer may serve as a float, nothing else).

Defaults are Sana's (NVlabs/Sana `configs/sana_config/*`, diffusers' `SanaTransformer2DModel`); see docs/training.md.
"""

from __future__ import annotations

import difflib
import re
import shlex
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo

from sana_pipe import __version__, configs
from sana_pipe.base.config import Location, Section, setting
from sana_pipe.base.errors import ConfigError, not_permitted
from sana_pipe.base.metrics.config import MetricsConfig
from sana_pipe.base.options import (
    MISSING,
    deepest,
    field_at,
    fields_below,
    flat,
    put,
    section_of,
    value_at,
    values_of,
    within,
)
from sana_pipe.base.urls import strip_credentials
from sana_pipe.base.yaml_text import NO_YAML, as_yaml, from_yaml, not_yaml, on_one_line
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.encoders.config import TextConfig, VaeConfig
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.snapshots.config import BucketConfig
from sana_pipe.data.sources.config import DataConfig, DataGiven
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.config import ModelConfig, SampleConfig, StartWeights

SHIPPED = Path(configs.__file__).resolve().parent
DEFAULT_NAME = "sana_1600m_1024.yaml"
LOCAL_NAME = "sana-pipe.yaml"


class Config(Section):
    """The whole file."""

    cache: Location = "./cache"
    """The cache: a folder or a URL (s3://...)."""
    mirror: MirrorConfig = MirrorConfig()
    """Local copies of a cache in an object store."""
    patience_s: Annotated[float, Field(ge=0)] = 300.0
    """Seconds to wait for storage that does not answer (of the cache or a source: object store, web server, network
    disk). It is named after some seconds, and `train` saves before it gives up. Storage that has never answered gets
    5 s: its address is probably wrong. Processes of a training wait for each other as long and 5 minutes more."""
    vae: VaeConfig
    """The image encoder."""
    text: TextConfig
    """The text encoder."""
    model: ModelConfig
    """The transformer."""
    data: DataConfig = DataConfig()
    """Pictures and captions."""
    encode: EncodeConfig = EncodeConfig()
    """The stage `encode`."""
    bucket: BucketConfig = BucketConfig()
    """The stage `bucket`."""
    train: TrainConfig = TrainConfig()
    """The stage `train`."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics of the stages `encode` and `train`."""
    sample: SampleConfig = SampleConfig()
    """The stage `sample`."""
    _data_given: DataGiven = PrivateAttr(default_factory=DataGiven)

    @property
    def data_given(self) -> DataGiven:
        """The origin of the values of `data`: which the file and `--set` name. Not an option, so no file has it."""
        return self._data_given

    def with_train(self, **changes: Any) -> Config:
        """The configuration with other values of `train`'s options; they are not validated."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})

    def supports(self, precision: str) -> bool:
        """Return whether the weights to begin from work in this value of `train.precision`, as far as is known."""
        return self.model.weights is None or self.model.weights.supports(precision)

    def _conflicts(self) -> Iterator[str]:
        weights, precision = self.model.weights, self.train.precision
        if weights is not None and not weights.supports(precision):
            working = weights.runs_in or []
            yield (
                f"train.precision: {precision} breaks these weights, which run in {' and '.join(working)} "
                "(model.weights.runs_in): weights trained in fp16 fail in bf16 (NVlabs/Sana #47, #109), weights "
                f"trained in bf16 overflow in fp16 (#65); set train.precision={working[0]}"
            )


_CACHE = ("cache", "mirror", "patience_s")
_BUCKETS = (
    *("data.resolution", "data.buckets", "data.background"),
    *("data.min_side", "data.max_upscale", "data.max_crop_loss"),
)
READS: dict[str, tuple[str, ...]] = {
    "encode": (*_CACHE, "vae", "text", "data", "encode", "metrics"),
    "bucket": (*_CACHE, "vae", "text", "bucket", *_BUCKETS, "encode"),
    "check": ("vae", "text", "model", "data", "train"),
    "train": (*_CACHE, "model", "train", "metrics", "data.resolution", "data.caption_prefix", "sample"),
    "plan": (*_CACHE, "vae", "text", "model", "train", "data", "bucket"),
    "export": (*_CACHE, "vae", "text", "model", "data", "train", "sample"),
    "sample": (*_CACHE, "vae", "text", "model", "data", "encode", "train", "sample"),
    "decode": ("vae", "encode"),
    "inspect": (*_CACHE, "train"),
    "status": (*_CACHE, "train"),
    "report": (*_CACHE, "vae", "data", "encode", "train"),
    "view": (*_CACHE, "data"),
    "verify": (*_CACHE, "vae", "text", "data", "encode", "bucket"),
}
"""The sections and options that a command reads. Commands that are not listed read `_CACHE` only. A file serves every
command, so it may hold any option; `--set` takes what the command reads."""


def reads(command: str, option: str) -> bool:
    """Return whether a command reads an option (`train.optim.lr`)."""
    return any(within(option, name) for name in READS.get(command, _CACHE))


def _check_read(command: str, option: str, value: Any) -> None:
    for name, _ in flat({option: value}):
        if reads(command, name):
            continue
        others = [other for other in READS if reads(other, name) and other != "decode"]
        near = _similar(name, [other for other in _all_paths() if reads(command, other)])
        raise ConfigError(
            f"--set {name}: sana-pipe {command} does not read this option",
            expected=" or ".join(near) or None,
            fix=f"leave it out; it is read by sana-pipe {', '.join(others)}" if others else "leave it out",
        )


def shipped() -> list[Path]:
    """The configuration files that come with the package."""
    return sorted(SHIPPED.glob("*.yaml"))


def find(path: str | Path | None) -> Path:
    """`--config F`, else `./sana-pipe.yaml`, else the shipped default. A bare name may be a shipped one."""
    if path is None:
        local = Path(LOCAL_NAME)
        return local if local.exists() else SHIPPED / DEFAULT_NAME
    given = Path(path)
    if given.exists() and not given.is_dir():
        return given
    inside = SHIPPED / (given.name if given.suffix else given.name + ".yaml")
    if inside.exists() and given.parent == Path("."):
        return inside
    raise ConfigError(
        f"there is no configuration file {str(path)!r}",
        expected="a path, or one of " + ", ".join(p.name for p in shipped()),
        fix=f"--config {shipped()[0].stem}, or no --config for {LOCAL_NAME} here, else {Path(DEFAULT_NAME).stem}",
    )


@dataclass(frozen=True)
class Given:
    """The options that a configuration file and `--set` give, and where each comes from.

    Attributes:
        file: the configuration file.
        tree: what the file and `--set` say together.
        overridden: the options named in `--set`.
    """

    file: Path
    tree: dict[str, Any]
    overridden: tuple[str, ...] = ()

    def given_by(self, option: str) -> str:
        """Name what gives an option its value: `--set`, the file (`shipped NAME` if it came with the package), or
        `default`."""
        if any(within(option, name) or within(name, option) for name in self.overridden):
            return "--set"
        value, rest = deepest(self.tree, option)
        if rest and isinstance(value, dict):  # a value that is no section is a short form, such as `storage: int8`
            return "default"
        return f"shipped {self.file.name}" if self.file.parent == SHIPPED else str(self.file)


def load(
    path: str | Path | None = None, overrides: tuple[str, ...] | list[str] = (), command: str | None = None
) -> Config:
    """Read, override and check a configuration.

    Args:
        path: see `find`.
        overrides: `a.b=c` strings; the value is YAML (`train.optim.lr=2e-5`, `model.weights=null`).
        command: a key of `READS`; overrides of options that it does not read are refused. None: any option.

    Raises:
        ConfigError: unknown key, wrong type, impossible combination, unreadable file, an option that is not read.
    """
    config, given = load_given(path, overrides)
    for option in given.overridden if command else ():
        _check_read(str(command), option, value_at(given.tree, option))
    return config


def load_given(path: str | Path | None = None, overrides: tuple[str, ...] | list[str] = ()) -> tuple[Config, Given]:
    """Load as `load` does, and say where the values come from."""
    source = find(path)
    tree = read_tree(source)
    data_given = _data_given(tree, is_chosen=path is not None or source.parent != SHIPPED)
    assignments = [_parse_override(text) for text in overrides]
    overridden = [".".join(keys) for keys, _, _ in assignments]
    for name, other in (("steps", "epochs"), ("epochs", "steps")):  # the flag replaces what the file says of the other
        if f"train.{name}" in overridden and f"train.{other}" not in overridden and isinstance(tree.get("train"), dict):
            tree["train"].pop(other, None)
    for keys, value, text in assignments:
        _assign(tree, keys, value, text)
    if "phases" in tree:
        raise _phases_refused(tree, source if source != Path(LOCAL_NAME) else None)
    config = validated(tree, source, dict(zip(overridden, overrides, strict=True)))
    names = [name for keys, value, _ in assignments if keys[0] == "data" for name in _named(keys[1:], value)]
    signals = ["signals"] if any(within("encode.signals", option) for option in overridden) else []
    config._data_given = replace(data_given, overridden=frozenset([*names, *signals]))
    return config, Given(source, tree, tuple(overridden))


def _phases_refused(tree: dict[str, Any], file: Path | None) -> ConfigError:
    """The error for `phases`, with the commands that train the phases of a file.

    Args:
        file: to name by `--config`; None: `train` finds it.
    """
    phases, train = tree["phases"], tree.get("train")
    output = Path(str((train.get("output") if isinstance(train, dict) else None) or TrainConfig().output))
    lines: list[str] = []
    for number, phase in enumerate(phases if isinstance(phases, list) else ()):
        if not isinstance(phase, dict) or not isinstance(phase.get("name"), str):
            lines.clear()
            break
        words = ["sana-pipe", "train", *([] if file is None else ["--config", str(file)])]
        words += ["--from", str(output / phases[number - 1]["name"])] if number else []
        words += ["--snapshot", str(phase["snapshot"])] if phase.get("snapshot") else []
        changed = phase["set"] if isinstance(phase.get("set"), dict) else {}
        given = {f"train.{key}": phase[key] for key in ("steps", "epochs") if phase.get(key) is not None}
        for option, value in {"train.output": str(output / phase["name"]), **given, **changed}.items():
            words += ["--set", f"{option}={on_one_line(value)}"]
        lines.append(shlex.join([*words, "--resume", "auto"]))
    template = ["sana-pipe train --from RUN --set train.output=DIR --set OPTION=VALUE --resume auto"] if phases else []
    return ConfigError(
        f"{file or LOCAL_NAME}: `phases` is no option: each round is a `train` of its own, which begins from the last",
        fix="\n  ".join(["take `phases` out of the file, then", *(lines or template)]) if phases else "take it out",
    )


def validated(tree: dict[str, Any], source: Path, overridden: dict[str, str]) -> Config:
    """The configuration of a tree.

    Args:
        source: names it in errors. overridden: option -> the text of its `--set`.

    Raises:
        ConfigError: as `load`.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, tree, source, overridden) from None


def _data_given(tree: dict[str, Any], is_chosen: bool) -> DataGiven:
    section, signals = tree.get("data") or {}, value_at(tree, "encode.signals")
    named = [*(section if isinstance(section, dict) else ()), *(["signals"] if isinstance(signals, list) else [])]
    with suppress(ValidationError):  # `--set` may fix it
        file = DataConfig.model_validate(section)
        return DataGiven(file, tuple(signals or ()), frozenset(named if is_chosen else ()))
    return DataGiven()


def _named(keys: list[str], value: Any) -> Iterator[str]:
    """The options of `data` that `--set` gives by `data.KEYS=VALUE`, as in `DataGiven.overridden`."""
    field = field_at(DataConfig, keys)[1] if keys else None
    if isinstance(value, dict) and value and (not keys or (field is not None and section_of(field) is not None)):
        for key, inner in value.items():
            yield from _named([*keys, key], inner)
    else:
        yield from [".".join(keys)] if keys else DataConfig.model_fields


def read_tree(source: Path) -> dict[str, Any]:
    """The sections of a configuration file as they stand there; anything else is a ConfigError."""
    try:
        tree = from_yaml(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise not_permitted(source) or ConfigError(f"{source}: cannot be read: {error}") from None
    except NO_YAML as error:
        raise not_yaml(source, error) from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: must be a mapping of sections", found=type(tree).__name__)
    return tree


def written(config: Config) -> dict[str, Any]:
    """The full tree with defaults, for files that others read: URLs are without user, password and query."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(below) for key, below in value.items()}
        if isinstance(value, list):
            return [clean(below) for below in value]
        return strip_credentials(value) if isinstance(value, str) and not re.search(r"\s", value) else value

    return clean(config.model_dump(mode="json"))


_OF_A_MACHINE = ("cache", "mirror", "patience_s", "metrics", "encode.workers", "encode.device")
"""Options that may differ between the processes of `encode`: places and devices of a machine."""


def shared(config: Config) -> dict[str, Any]:
    """The options that all processes of one `encode` must have alike, by name; and the product's version. Those of
    `train` are compared by its own processes."""
    alike = {
        name: value
        for name, value in flat(written(config))
        if reads("encode", name) and not any(within(name, section) for section in _OF_A_MACHINE)
    }
    return {**alike, "the version of sana-pipe": __version__}


def dump(config: Config) -> str:
    """`written` as YAML, for the run directory."""
    return as_yaml(written(config), sort_keys=False)


WITH_SPACES = ("caption_prefix",)
"""Options whose text may begin or end with spaces."""


def _parse_override(text: str) -> tuple[list[str], Any, str]:
    """Keys, value and the text of one `--set`."""
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text!r} is not of the form a.b=c", fix="--set train.optim.lr=2e-5")
    try:
        meaning = from_yaml(value)
    except NO_YAML as error:
        raise not_yaml(f"--set {text!r}", error) from None
    if keys[-1] in WITH_SPACES and meaning == value.strip():  # YAML drops the spaces of a text without quotes
        meaning = value
    return keys, meaning, text


def _assign(tree: dict[str, Any], keys: list[str], value: Any, text: str) -> None:
    if keys == ["model", "weights"] and isinstance(value, str):
        runs_in = value_at(tree, "model.weights.runs_in", MISSING)
        value = {**StartWeights.from_word(value), **({} if runs_in is MISSING else {"runs_in": runs_in})}
    if keys == ["train", "parallel"] and value == "auto":
        keys = [*keys, "sizes"]
    try:
        put(tree, ".".join(keys), value)
    except ValueError as error:
        raise ConfigError(f"--set {text!r}: {error}") from None


def option_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every option and section of the file with its field."""
    return fields_below(Config)


def _all_paths() -> list[str]:
    return [name for name, _ in option_fields()]


_LISTED = 12
"""A message lists the options of a section with at most this many."""


def _similar(name: str, valid: list[str]) -> list[str]:
    """List at most three: the same name in other sections, else names that are spelt alike."""
    last = name.rpartition(".")[2]
    same = [other for other in valid if other.rpartition(".")[2] == last and "NAME" not in other]
    return same[:3] or difflib.get_close_matches(name, valid, n=3, cutoff=0.75)


def _hint(location: tuple[int | str, ...]) -> str:
    """The nearest valid name: similar in this section, the same name elsewhere, else the names of a small section."""
    last, valid = str(location[-1]), field_at(Config, location)[2]
    section = [str(part) for part in location[:-1]]
    similar = [".".join([*section, match]) for match in difflib.get_close_matches(last, valid, n=1, cutoff=0.5)]
    typo = similar if difflib.get_close_matches(last, valid, n=1, cutoff=0.8) else []
    elsewhere = [path for path in _all_paths() if last in (path, path.rpartition(".")[2])]
    candidates = [*typo, *elsewhere, *similar]
    if candidates:
        return f"; did you mean {candidates[0]!r}?"
    if len(valid) > _LISTED:
        return f"; `sana-pipe config {'.'.join(section)}".rstrip() + "` lists the options"
    return f"; valid here: {', '.join(valid)}" if valid else ""


def _explain(error: ValidationError, tree: dict[str, Any], source: Path, overridden: dict[str, str]) -> ConfigError:
    """overridden: option -> the text of its `--set`."""
    problems = []
    for item in error.errors():
        above = item["loc"][:-1] if item["type"] == "extra_forbidden" else item["loc"]  # an unknown key may hold a [
        tags = [p for p in above if isinstance(p, str) and "[" in p]  # pydantic's names for a union's members
        given = item["loc"][: item["loc"].index(tags[0])] if tags else item["loc"]
        if tags and tags[0].startswith("list[") != isinstance(value_at(tree, given), list):
            continue  # the error of the union's other member
        location = (*(p for p in above if p not in tags), *item["loc"][len(above) :])
        name = ".".join(str(part) for part in location) or "(whole file)"
        unknown = item["type"] == "extra_forbidden"
        below = any(within(key, name) for key in overridden)  # `--set` gave an option of the section at fault
        origin = f"{source} with --set" if below else str(source)
        if any(within(name, key) for key in overridden) or (below and unknown):
            origin = "--set"
        if unknown:
            problems.append(f"{origin}: unknown key {name!r}{_hint(location)}")
        elif item["type"] == "missing" and isinstance(location[-1], str):
            problems.append(f"{origin}: {name!r} is required and not given")
        else:
            problems.append(f"{origin}: {name!r}: {_problem(item, location, overridden.get(name))}")
    return ConfigError("\n".join(dict.fromkeys(problems)))


def _problem(item: Any, location: tuple[int | str, ...], override: str | None) -> str:
    """Say what an option takes, and what was found. Our validators (`value_error`) say it themselves.

    Args:
        override: the text of the `--set` that gave the value.
    """
    found, message = item["input"], item["msg"].removeprefix("Value error, ")
    option, field, _ = field_at(Config, location)
    if item["type"] != "value_error" and field is not None:
        is_option = option == ".".join(map(str, location))
        message = f"must be {values_of(field)}" if is_option else f"{message}; {option} is {values_of(field)}"
    message = re.sub(r"Input should be a valid dictionary or instance of \w+", "must be {OPTION: VALUE, ...}", message)
    if isinstance(found, int | float) and re.search("text|string", message):
        quoted = "put it in quotes" if override is None else setting(option, override.partition("=")[2].strip())
        return f"{message} (found {found!r}, which is no text: {quoted})"
    return message + ("" if isinstance(found, dict) else f" (found {textwrap.shorten(repr(found), 200)})")
