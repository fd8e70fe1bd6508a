"""The shared instruction: same rows as the reference, and no run goes on when they are not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

import sana_pipe.stages.encode
from sana_pipe.base.errors import UserError
from sana_pipe.config import Config, ConfigError, load
from sana_pipe.data.cache import index
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoders import shared_prefix
from sana_pipe.data.encoders import text as module
from sana_pipe.data.encoders.config import TextConfig
from sana_pipe.data.encoders.text import TextEncoder, describe_text
from sana_pipe.data.sources import caption_rules as rules
from sana_pipe.data.work import progress
from sana_pipe.data.work.progress import Meter, Progress
from tests.support.constants import set_constants, unit_sizes
from tests.support.parameters import first_quick

CAPTIONS = [
    "a red circle on a white table",
    "",
    "A sign that says \"OPEN\" -- and it's 'new'",
    "日本の猫、桜の下で眠る",
    "  émile's café  ",
    "line one\nline two",
    "two small dogs run through green grass by the sea at night " * 60,  # cut
    "snow on the mountains behind a lake, and a yellow bicycle leaning against a brick wall at night",
]
Mode = Literal["auto", "exact"]


def encoder(folder: Path, mode: Mode = "auto", dtype: Literal["fp32", "bf16"] = "fp32", **options: Any) -> TextEncoder:
    return TextEncoder.load(TextConfig(id=str(folder), dtype=dtype, mode=mode, **options), "cpu")


@torch.inference_mode()
def rows(one: TextEncoder, captions: list[str]) -> list[torch.Tensor]:
    """Before they are rounded."""
    return one.run(one.token_ids(captions)[0])


def largest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    assert len(a) == len(b)
    return max(module.relative_error(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------- equal rows


@pytest.mark.parametrize("prompting", ["diffusers", "nvlabs"])
def test_rows_of_both_prompting(tiny_repo: Path, prompting: str) -> None:
    """The instruction is longer than the sliding window of every other layer, and the long caption is cut."""
    captions = [rules.normalise(caption, prompting) for caption in CAPTIONS]
    fast, plain = encoder(tiny_repo, prompting=prompting), encoder(tiny_repo, "exact", prompting=prompting)
    assert len(fast.shared_ids) > fast.model.config.sliding_window  # type: ignore[union-attr, operator]
    assert largest(rows(fast, captions), rows(plain, captions)) < 1e-5
    assert fast.unshared == 0


def test_the_window_and_the_softcap_count(tiny_repo: Path) -> None:
    """Both are at work in what is compared: without them the rows are others."""
    plain = encoder(tiny_repo, "exact")
    model: Any = plain.model
    for layer in model.layers:
        layer.self_attn.q_proj.weight.mul_(4)
        layer.self_attn.attn_logit_softcapping = 2.0
    want = rows(plain, CAPTIONS)
    fast = encoder(tiny_repo)
    fast.model.load_state_dict(model.state_dict())
    layers: Any = fast.model.layers
    for layer in layers:
        layer.self_attn.attn_logit_softcapping = 2.0
    assert largest(rows(fast, CAPTIONS), want) < 1e-5
    for layer in layers:
        layer.self_attn.attn_logit_softcapping = 50.0
    assert largest(rows(fast, CAPTIONS), want) > 1e-2
    fast = encoder(tiny_repo)
    fast.model.config.sliding_window = 4096  # type: ignore[union-attr, assignment]
    assert largest(rows(fast, CAPTIONS), rows(encoder(tiny_repo, "exact"), CAPTIONS)) > 1e-2


def test_bf16_stays_within_the_tolerance(tiny_repo: Path) -> None:
    fast, plain = encoder(tiny_repo, dtype="bf16"), encoder(tiny_repo, "exact", dtype="bf16")
    assert largest(rows(fast, CAPTIONS), rows(plain, CAPTIONS)) <= module.tolerance("bf16", 3)


def test_use_does_not_change_the_recording(tiny_repo: Path) -> None:
    one = encoder(tiny_repo, dtype="bf16")
    first = one.encode(CAPTIONS)
    one.encode(CAPTIONS[::-1][:3])
    assert all(np.array_equal(a, b) for a, b in zip(first, one.encode(CAPTIONS), strict=True))
    assert one.model.config._attn_implementation == "eager"  # type: ignore[union-attr]


def test_a_caption_that_merges_into_the_instruction_is_run_in_full(tiny_repo: Path) -> None:
    """An instruction that ends inside a word: the caption changes its last tokens, which are then not shared."""
    options: dict[str, Any] = {"instruction": "portrait of a wo", "max_length": 40}
    captions = ["man with short hair", "", " red circle", "man"]
    fast, plain = encoder(tiny_repo, **options), encoder(tiny_repo, "exact", **options)
    ids = fast.token_ids(captions)[0]
    apart = [row[: len(fast.shared_ids)] != fast.shared_ids for row in ids]
    assert any(apart) and not all(apart)
    assert largest(rows(fast, captions), rows(plain, captions)) < 1e-5
    assert fast.unshared == sum(apart)


def test_without_an_instruction(tiny_repo: Path) -> None:
    fast, plain = (encoder(tiny_repo, mode, instruction="", max_length=12) for mode in ("auto", "exact"))
    assert largest(rows(fast, CAPTIONS), rows(plain, CAPTIONS)) < 1e-5
    assert largest(rows(fast, ["", ""]), rows(plain, ["", ""])) < 1e-5  # nothing but <bos>
    assert fast.unshared == 0


def test_few_positions_are_padding(tiny_repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_TOKENS", 400)
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 300, 200)]
    batches = list(module.batches_of_similar_length(range(200), lengths))
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    sizes = [(len(batch) * max(lengths[i] for i in batch), sum(lengths[i] for i in batch)) for batch in batches]
    assert all(padded <= 400 for padded, _ in sizes)
    assert sum(padded for padded, _ in sizes) < 1.05 * sum(real for _, real in sizes)
    assert list(module.batches_of_similar_length([3, 1], [9, 5, 5, 1000])) == [[1], [3]]  # longer than the bound: alone


# ---------------------------------------------------------------- the comparison


def spoil_a_key(one: TextEncoder) -> None:
    """A twentieth more of one position's keys in one layer of the recording."""
    assert one.prefix is not None
    with torch.inference_mode():
        one.prefix.cache.layers[1].keys[:, :, -3] *= 1.05


def test_a_small_mistake_ends_the_run(tiny_repo: Path) -> None:
    one = encoder(tiny_repo)
    rows(one, CAPTIONS[:1])
    spoil_a_key(one)
    with pytest.raises(UserError) as caught:
        one.encode(CAPTIONS)
    message = str(caught.value)
    assert "--set text.mode=exact" in message and "1.0e-04" in message and "largest error" in message
    assert one.tokens == 0


@pytest.mark.parametrize("dtype", first_quick("fp32", "bf16"))
@pytest.mark.parametrize("mistake", ["token", "mask", "causality"])
def test_a_great_mistake_ends_the_run_in_either_dtype(
    tiny_repo: Path, dtype: Literal["fp32", "bf16"], mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = encoder(tiny_repo, dtype=dtype)
    masks, make = shared_prefix.Prefix.masks, shared_prefix.Prefix
    if mistake == "token":
        right = one.shared_ids
        wrong = [*right[:-1], right[-2]]
        monkeypatch.setattr(shared_prefix, "Prefix", lambda model, ids: make(model, wrong))
    elif mistake == "mask":  # new tokens see each other and nothing before them

        def forgetful(self: Any, queries: torch.Tensor, keys: int) -> dict[str, torch.Tensor]:
            made = masks(self, queries, keys)
            for mask in made.values():
                mask[..., : int(queries[0])] = torch.finfo(mask.dtype).min
            return made

        monkeypatch.setattr(shared_prefix.Prefix, "masks", forgetful)
    else:  # every token sees every other

        def open_to_all(self: Any, queries: torch.Tensor, keys: int) -> dict[str, torch.Tensor]:
            made = masks(self, queries, keys)
            return {kind: torch.zeros_like(mask) for kind, mask in made.items()}

        monkeypatch.setattr(shared_prefix.Prefix, "masks", open_to_all)
    with pytest.raises(UserError, match=r"text\.mode=exact"):
        one.encode(CAPTIONS)


def kernels_by_shape(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Matrix products of fewer rows than `rows` add up in sixteen bf16 sums, as kernels that split the sum do."""
    linear = torch.nn.functional.linear

    def split(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.ndim != 3 or x.shape[1] >= rows or x.dtype != torch.bfloat16:
            return linear(x, weight, bias)
        parts = zip(x.chunk(16, -1), weight.chunk(16, -1), strict=True)
        total = sum((linear(a, b) for a, b in parts), torch.zeros((), dtype=x.dtype))
        return total if bias is None else total + bias

    monkeypatch.setattr(torch.nn.functional, "linear", split)


@pytest.mark.slow
def test_bf16_kernels_that_differ_by_the_shape_of_a_batch_are_no_mistake(
    tiny_repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows after the instruction get another kernel than the reference's long ones, padded or not. As many layers
    as the real model has, nearly: the difference grows with them."""
    one = encoder(tiny_repo, dtype="bf16")
    layers, config = one.model.layers, one.model.config
    copies = [copy.deepcopy(layer, {id(config): config}) for _ in range(8) for layer in layers]  # type: ignore[union-attr]
    for number, layer in enumerate(copies):
        layer.self_attn.layer_idx = number
    one.model.layers = torch.nn.ModuleList(copies)
    config.num_hidden_layers, config.layer_types = 24, config.layer_types * 8  # type: ignore[union-attr, operator]
    kernels_by_shape(monkeypatch, len(one.shared_ids))
    one.encode(CAPTIONS)
    assert one.largest_error is not None
    assert 0.01 < one.largest_error < module.tolerance("bf16", 24), "the difference is real"


def test_the_tolerance_of_bf16_is_below_every_mistake_for_the_real_model() -> None:
    assert 0.03 < module.tolerance("bf16", 26) < 0.15


def test_longer_captions_are_compared_again(tiny_repo: Path) -> None:
    """The first batch of a run holds its shortest captions; a mistake may show in long ones only."""
    one = encoder(tiny_repo)
    one.encode(["snow", "a"])
    assert one.largest_error is not None and one.largest_error < module.tolerance("fp32", 3)
    spoil_a_key(one)
    one.encode(["a snow"])  # not longer: trusted
    with pytest.raises(UserError, match=r"text\.mode=exact"):
        one.encode([CAPTIONS[-1]])


def test_exact_compares_nothing(tiny_repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("exact must not touch the shared path")

    monkeypatch.setattr(shared_prefix, "Prefix", refuse)
    monkeypatch.setattr(TextEncoder, "compare", refuse)
    one = encoder(tiny_repo, "exact")
    assert len(one.encode(CAPTIONS)) == len(CAPTIONS)


def test_bf16_may_differ_as_much_as_the_reference_from_itself(tiny_repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose kernels depend on the shape of a batch: noise of 2 % is normal there, so 5 % is no mistake; on a
    device without noise it is one, and beyond 10 % it always is."""

    def tried(noise: float, wrong: float) -> None:
        one = encoder(tiny_repo, dtype="bf16")
        inner, calls = one.run_in_full, []

        def noisy(rows: Any, members: Any, padded: bool) -> list[torch.Tensor]:
            calls.append(padded)
            return [value * (1 if padded else 1 + noise) for value in inner(rows, members, padded)]

        original = one.run
        monkeypatch.setattr(one, "run_in_full", noisy)
        monkeypatch.setattr(one, "run", lambda ids: [value * (1 + wrong) for value in original(ids)])
        one.encode(CAPTIONS[:1])
        assert calls

    tried(noise=0.02, wrong=0.05)
    with pytest.raises(UserError, match=r"text\.mode=exact"):
        tried(noise=0.0, wrong=0.05)
    with pytest.raises(UserError, match=r"text\.mode=exact"):
        tried(noise=0.3, wrong=0.15)


# ---------------------------------------------------------------- around it


def test_the_mode_is_no_part_of_the_encoding(tiny_repo: Path) -> None:
    auto, exact = (describe_text(TextConfig(id=str(tiny_repo), mode=mode)) for mode in ("auto", "exact"))  # type: ignore[arg-type]
    assert auto == exact


def test_the_mode_is_checked_and_kept_as_provenance(
    tmp_path: Path, photos: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, unit_sizes(1024, 5))
    with pytest.raises(ConfigError, match=r"text\.mode"):
        load("tiny", ["text.mode=fast"])
    config = make_config(tmp_path, "text.mode=exact")
    sana_pipe.stages.encode.run(config, data=str(photos))
    assert modes(config) == {"exact"}
    one = sana_pipe.stages.encode.run(make_config(tmp_path), data=str(photos))
    assert one["captions"] == 0  # the same encoding: nothing to do


def modes(config: Config) -> set[str]:
    cache = Cache(config.cache)
    (encoding,) = {path.stem for path in Path(config.cache).glob("encodings/text-*.json")}
    made = [one for plan in cache.plans(encoding) for one in index.commits(cache.files, encoding, plan.number)]
    return {commit.provenance["text_mode"] for commit in made}


def test_the_line_shows_tokens_per_second() -> None:
    meter = Meter()
    bar = Progress("captions", 10, meter)
    bar.done = 5
    bar.rejected = 1
    meter.tokens += 700
    assert re.fullmatch(
        r"captions: 5/10, 1 rejected, \w+ left, [\d.]+ captions/s, encoder 0% busy, \d+ tokens/s", bar.line()
    )
    assert "tokens" not in Progress("images", 10, Meter()).line()


def test_busy_is_the_share_of_the_time_that_the_encoder_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Progress("images", 10, Meter(wall_s=4.0, busy_s=3.0))
    assert bar.busy == 0.75
    clock = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    own = Meter()
    bar = Progress("images", 10, own)
    with own.computing():
        clock[0] += 3
    clock[0] += 1
    assert bar.busy == bar.figures()["encoder_busy"] == 0.75
