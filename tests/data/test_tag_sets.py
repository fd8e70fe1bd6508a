"""Variants of captions that are tag lists: what they are, everywhere the same, each encoded once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.sources.caption_columns import CaptionCandidate, CaptionRule
from sana_pipe.data.sources.config import DataConfig, TagsConfig
from sana_pipe.data.sources.tag_sets import MAX_WORDS, tags_of, variants

TAGS = [f"tag {number}" for number in range(10)]
CAPTION = ",".join(TAGS)
FOUR = TagsConfig(shuffle=4, drop=0.1, keep=1)


def test_variants_are_other_orders_with_the_first_tags_in_place() -> None:
    made = variants(CAPTION, "s", "a.png", TagsConfig(shuffle=4, keep=2))
    assert len(set(made)) == 4
    for text in made:
        tags = text.split(", ")
        assert tags[:2] == TAGS[:2] and tags != TAGS and sorted(tags) == TAGS


def test_variants_depend_on_source_picture_caption_and_number_alone() -> None:
    made = variants(CAPTION, "s", "a.png", FOUR)
    assert made == variants(CAPTION, "s", "a.png", FOUR)
    assert made[:2] == variants(CAPTION, "s", "a.png", FOUR.model_copy(update={"shuffle": 2}))
    others = [
        *variants(CAPTION, "t", "a.png", FOUR),
        *variants(CAPTION, "s", "b.png", FOUR),
        *variants(CAPTION + ", x", "s", "a.png", FOUR),
    ]
    assert len({*made, *others}) == 16
    code = (
        "from sana_pipe.data.sources.config import TagsConfig; from sana_pipe.data.sources.tag_sets import variants; "
        f"print(variants({CAPTION!r}, 's', 'a.png', TagsConfig(shuffle=4, drop=0.1, keep=1)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == str(made)
    assert made[0] == "tag 0, " + ", ".join(f"tag {number}" for number in (6, 5, 1, 8, 4, 3, 2, 9, 7)), "anywhere"


def test_tags_are_dropped_at_the_rate_and_every_place_alike() -> None:
    config = TagsConfig(shuffle=1, drop=0.25, keep=1)
    made = [tags_of(text) for key in range(2000) for text in variants(CAPTION, "s", str(key), config)]
    assert all(tags[0] == TAGS[0] for tags in made)
    assert 1 - np.mean([len(tags) - 1 for tags in made]) / 9 == pytest.approx(0.25, abs=0.01)
    seconds = np.unique([tags[1] for tags in made], return_counts=True)[1]
    assert len(seconds) == 9 and seconds == pytest.approx(np.full(9, 2000 / 9), rel=0.25)


def test_equal_variants_count_once_and_none_is_empty() -> None:
    assert variants("a, b", "s", "k", TagsConfig(shuffle=20)) == ["b, a"]
    assert variants("a, b", "s", "k", TagsConfig(shuffle=20, keep=1)) == []
    assert variants("a, b", "s", "k", TagsConfig(shuffle=20, keep=2)) == []
    assert set(variants("a, b", "s", "k", TagsConfig(shuffle=200, drop=0.999))) <= {"a", "b", "b, a"}
    assert set(variants("a, b, c", "s", "k", TagsConfig(shuffle=200, drop=0.999, keep=1))) <= {
        "a",
        "a, b",
        "a, c",
        "a, c, b",
    }


def test_sentences_are_no_tags() -> None:
    long = " ".join(["word"] * (MAX_WORDS + 1))
    for text in ("", "one", "one,", "A cat, asleep, on a mat.", f"a cat, {long}"):
        assert tags_of(text) == [] == variants(text, "s", "k", FOUR)
    assert tags_of(f"a , b,, {long[:-5]}") == ["a", "b", long[:-5]]


@pytest.mark.parametrize("order", [1, -1])
def test_texts_that_the_trigger_word_makes_equal_have_the_larger_weight(order: int) -> None:
    candidates = [CaptionCandidate("[trigger] on grass", 3.0), CaptionCandidate("{trigger} on grass", 1.0)][::order]
    captions, never = CaptionRule(DataConfig(caption_prefix="sks, ")).weigh(candidates, "a.png", "s")
    assert captions == (("sks on grass", 3.0),) and never == 0


def test_a_list_and_its_variants_share_its_weight() -> None:
    rule = CaptionRule(DataConfig(tags=FOUR, caption_prefix="sks, "))
    plain = CaptionRule(DataConfig(caption_prefix="sks, "))
    assert len({rule.identity(), plain.identity(), CaptionRule(DataConfig(tags=TagsConfig())).identity()}) == 3
    captions, never = rule.weigh([CaptionCandidate(CAPTION, 3.0), CaptionCandidate("A cat.", 1.0)], "a.png", "s")
    assert never == 0 and captions[-1] == ("sks, A cat.", 1.0)
    assert [text for text, _ in captions[:5]] == [
        f"sks, {text}" for text in (CAPTION, *variants(CAPTION, "s", "a.png", FOUR))
    ]
    assert [weight for _, weight in captions[:5]] == [3.0 / 5] * 5


def test_each_variant_is_encoded_once_and_the_original_not_again(
    tmp_path: Path, make_config: Callable[..., Config]
) -> None:
    (tmp_path / "pictures").mkdir()
    for seed, caption in enumerate((CAPTION, "A sentence, with a comma.")):
        pixels = np.random.default_rng(seed).integers(0, 255, (70, 90, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{seed}.png")
        (tmp_path / "pictures" / f"{seed}.txt").write_text(caption)
    data = str(tmp_path / "pictures")
    plain = make_config(tmp_path, "bucket.batch=2")
    assert sana_pipe.stages.encode.run(plain, data=data)["new"] == {"images": 2, "captions": 3}, "with the null record"
    config = make_config(tmp_path, "bucket.batch=2", "data.tags={shuffle: 4, drop: 0.1, keep: 1}")
    assert sana_pipe.stages.encode.run(config, data=data)["new"] == {"images": 0, "captions": 4}
    for again in (config, plain):  # a later run remembers how the source is read
        assert sana_pipe.stages.encode.run(again, data=data)["new"] == {"images": 0, "captions": 0}
    sana_pipe.stages.bucket.run(config)
    snapshot = Cache(config.cache).open_snapshot()
    assert sorted(len(snapshot.sample(sample).captions) for sample in range(2)) == [1, 5]
    more = make_config(tmp_path, "data.tags={shuffle: 6, drop: 0.1, keep: 1}")
    assert sana_pipe.stages.encode.run(more, data=data)["new"] == {"images": 0, "captions": 2}, (
        "the first four are the same"
    )
