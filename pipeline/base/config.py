"""The form of every section of the configuration: strict, typed, each option documented at its field.

A section stands in the `config.py` of the room that owns it, a light module, so that `--help` stays fast;
`sana_pipe.config` composes them. Here is what several rooms share: types of values, `Weights`, `setting`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sana_pipe.base.errors import alternatives, expanded
from sana_pipe.base.yaml_text import on_one_line

Location = Annotated[str, AfterValidator(expanded)]
"""A path or a URL. `~` and `$NAME` are replaced here: no shell does it in a file, or behind `--set cache=`."""
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Channel = Annotated[int, Field(ge=0, le=255)]
Sides = Annotated[
    tuple[Positive, Positive], BeforeValidator(lambda value: tuple(value) if type(value) is list else value)
]
"""[height, width]; YAML has lists alone."""


def _check_local(path: str) -> str:
    if "://" in path:
        raise ValueError("must be a path on a disk, such as a mount of the store, not a URL")
    return path


LocalPath = Annotated[str, AfterValidator(expanded), AfterValidator(_check_local), "text"]


def _check_microbatch(size: Any) -> Any:
    if size != "auto" and (type(size) is not int or size < 1):
        raise ValueError("must be an integer above 0, or auto")
    return size


if TYPE_CHECKING:
    Microbatch = int  # once `planning.auto.decide` has decided
    Steps = int  # once the stage has counted those of `train.epochs`
else:
    Steps = Positive | None
    Microbatch = Annotated[Any, AfterValidator(_check_microbatch), "integer above 0 | auto"]


AUTO: Any = "auto"


class Section(BaseModel):
    """A mapping of a configuration file. Unknown keys are errors, values are not converted, nothing changes later."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _by_word(cls, data: Any) -> Any:
        return cls.from_word(data) if isinstance(data, str) else data

    @classmethod
    def from_word(cls, word: str) -> Any:
        """Return what a word in place of the section stands for (`storage: int8`); most sections have no such form."""
        return word

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        if (conflict := next(self._conflicts(), None)) is not None:
            raise ValueError(conflict)
        return self

    def _conflicts(self) -> Iterator[str]:
        """Values that do not go together, each with what to set."""
        yield from ()


class Weights(Section):
    """Pretrained weights."""

    folder: ClassVar[str] = ""
    """The model's folder in a pipeline's repository or folder."""
    id: Location
    """A model on the hub, or a folder that `save_pretrained` wrote: the model's, or that of a pipeline which has it."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null: the main branch."""

    @property
    def weight_variant(self) -> str | None:
        """The variant of the weight files that the section names, if it can name one."""
        return None


def setting(option: str, *values: Any) -> str:
    """`--set OPTION=VALUE` as it is typed in a shell, of values that are alternatives each."""
    return alternatives("--set", (f"{option}={on_one_line(value)}" for value in values))
