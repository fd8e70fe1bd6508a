"""The instruction's exact text, the two normalisations, and the choice among captions."""

from __future__ import annotations

import hashlib
import importlib
import inspect

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sana_pipe.data.encoders.config import TextConfig
from sana_pipe.data.sources import caption_rules


@pytest.mark.parametrize(("prompting", "prefix"), [("diffusers", "48290080bb4f"), ("nvlabs", "62b9ab89eebb")])
def test_instruction_text(prompting: str, prefix: str) -> None:
    text = caption_rules.INSTRUCTIONS[prompting]
    assert len(text) == 1057
    assert text.endswith("User Prompt: ")
    assert hashlib.sha256(text.encode()).hexdigest().startswith(prefix)


def test_instruction_is_that_of_the_pipeline() -> None:
    sana = importlib.import_module("diffusers.pipelines.sana.pipeline_sana")
    lines = inspect.signature(sana.SanaPipeline.__call__).parameters["complex_human_instruction"].default
    assert caption_rules.INSTRUCTIONS["diffusers"] == "\n".join(lines)


def test_configured_instruction() -> None:
    assert caption_rules.instruction(TextConfig(id="x")) == caption_rules.INSTRUCTIONS["diffusers"]
    assert caption_rules.instruction(TextConfig(id="x", prompting="nvlabs")) == caption_rules.INSTRUCTIONS["nvlabs"]
    assert caption_rules.instruction(TextConfig(id="x", instruction="")) == ""
    assert caption_rules.instruction(TextConfig(id="x", instruction="Draw: ")) == "Draw: "


def test_normalise() -> None:
    assert caption_rules.normalise("  A Cat\n on ÉTÉ \t", "diffusers") == "a cat\n on été"
    assert caption_rules.normalise("  A Cat\n", "nvlabs") == "  A Cat\n"
    with pytest.raises(ValueError, match="unknown normalisation"):
        caption_rules.normalise("x", "other")


@pytest.mark.parametrize("prompting", ["diffusers", "nvlabs"])
def test_many_captions_are_normalised_as_each(prompting: str) -> None:
    characters = [f" {chr(code)}A{chr(code)}B{chr(code)}\n" for code in range(0x3100) if not 0xD800 <= code < 0xE000]
    some = ["", " ", "  A Cat\n", "\u0130stanbul", "\u039f\u0394\u039f\u03a3", "\u2002A\u2002", *characters]
    for kind in (pa.string(), pa.large_string()):
        column = pa.array(["left out", *some], kind)[1:]
        expected = [caption_rules.normalise(caption, prompting) for caption in some]
        assert caption_rules.normalise_all(column, prompting).to_pylist() == expected


def test_choice_is_proportional() -> None:
    picks = [caption_rules.choose([1.0, 0.0, 3.0], draw / 10_000) for draw in range(10_000)]
    assert [picks.count(index) for index in range(3)] == [2500, 0, 7500]


@given(
    st.lists(st.floats(0, allow_nan=False, allow_infinity=False), min_size=1, max_size=6).filter(any),
    st.floats(0, 1, exclude_max=True),
)
@example([1.0, *[1e-16] * 10, 0.0], 1 - 2**-53)  # a running sum that rounding keeps below the true one
def test_choice_never_takes_a_weight_of_zero(weights: list[float], draw: float) -> None:
    assert weights[caption_rules.choose(weights, draw)] > 0


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_mean_nothing(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        caption_rules.choose(weights, 0.5)


@pytest.mark.parametrize("draw", [-0.1, 1.0, float("nan")])
def test_draws_outside_the_interval(draw: float) -> None:
    with pytest.raises(ValueError, match="draw"):
        caption_rules.choose([1.0], draw)
