"""The tables of docs/recipes.md, as its end: `python -m tests.support.recipe_tables`."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.planning.recommend import MEMORY, PURPOSES, STEPS, VALUES
from pipeline.processes import run_and_exit
from pipeline.yaml_text import as_yaml


def markdown() -> str:
    """The tables, for docs/recipes.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for purpose in PURPOSES:
        yield from (f"### {purpose}", "", "| option | value | where | source |", "|---|---|---|---|")
        for value in (value for value in VALUES if value.purpose == purpose):
            where = f"below {value.below:,} pictures" if value.below else f"at {value.resolution} px"
            where = where if value.below or value.resolution else ""
            text = (
                as_yaml(value.value, default_flow_style=True, width=1000, sort_keys=False).removesuffix("...\n").strip()
            )
            yield f"| `{value.option}` | `{text}` | {where} | {value.source} |"
        steps = STEPS[purpose]
        bounds = (
            f"{steps.visits} visits of each picture, in {steps.least:,} to {steps.most:,} steps; at least one epoch"
        )
        yield from (f"| `train.steps` | {bounds} | | {steps.source} |", "")
    yield from (
        "### Memory",
        "",
        "| purpose | px | from, GiB of all cards | settings | source |",
        "|---|---|---|---|---|",
    )
    for row in MEMORY:
        settings = ", ".join(f"`{option}: {str(value).lower()}`" for option, value in row.settings.items())
        yield f"| {row.purpose} | {row.resolution} | {row.gib:g} | {settings} | {row.source} |"


if __name__ == "__main__":
    run_and_exit(lambda: print(markdown(), end=""))
