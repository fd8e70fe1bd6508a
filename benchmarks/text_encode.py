"""What a caption costs the text encoder: `TextEncoder` against diffusers' `SanaPipeline.encode_prompt`.

    python -m benchmarks.text_encode [--quick] [--captions DIR]

Both sides encode the same captions in the same batches with the same random Gemma-2 (1024 wide, 4 layers) and the same
tokenizer, whose instruction is 220-240 tokens long, about as with Gemma itself. Measured is CPU time of the process on
one thread, tokenization included, both sides in turn; a speedup is the median over rounds of the ratio within a round.
The comparison that `TextEncoder` makes with the reference at its start is made before the clock runs; its price is a
line of its own, since it is paid once a run.

How far it carries: `positions` is the ratio of positions that the two sides run, and bounds the gain in the matrices of
the layers. What goes beyond it is attention, which the reference computes over all pairs of its 500 positions. A wider
model (Gemma-2-2b is 2304 wide, with fewer and wider heads) spends more of its time in matrices, so expect its gain
between the two columns.

The last line is one JSON object: `speedup_80` and `speedup_280` (captions of 80 and 280 tokens, bf16), `speedup_mixed`
(real captions, half of them short, half long, bf16), the first two in fp32, and `max_rel_error`: the largest relative
error of a token in fp32, where no rounding hides it; `max_rel_error_bf16` is that of bf16 rows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from sana_pipe.base.hub import no_progress_bars
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.encoders.config import TextConfig
from sana_pipe.data.encoders.text import TextEncoder, tokenized
from sana_pipe.data.sources.caption_rules import INSTRUCTIONS, normalise
from sana_pipe.tools.demo import small_models

WIDTH, LAYERS, HEADS = 1024, 4, 16
INSTRUCTION = INSTRUCTIONS["diffusers"]
CPU = torch.device("cpu")
DTYPES: dict[Literal["bf16", "fp32"], torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

_SHORT = (
    "a red bicycle against a brick wall",
    "portrait of an old fisherman",
    "golden ratio",
    "two dogs run on the beach",
    "a cup of coffee on a wooden table at sunrise",
    "snow",
    "an astronaut riding a horse on the moon, digital painting",
    "the skyline of a city at night with its lights in the river",
    "three green apples beside a blue glass vase",
    "a lighthouse in a storm",
    "watercolour of a mountain village",
    "a robot that waters flowers in a greenhouse",
)
_SENTENCES = (
    "An eye-level outdoor photograph shows a narrow street between old stone houses with wooden shutters.",
    "The light comes from the left and draws long soft shadows over the wet pavement and the parked bicycles.",
    "In the middle ground a woman in a yellow raincoat holds an umbrella and looks at the window of a bakery.",
    'Behind her hang several signs, one of which says "open" in large red letters that have begun to fade.',
    "On the right stands a row of clay pots with herbs, lavender and a small lemon tree that leans to the wall.",
    "The far end of the street lies in fog, so that the church tower above the roofs is only a pale outline.",
    "A grey cat with white paws sits on the lowest step of a staircase and watches two pigeons near a puddle.",
    "The walls are rough, cracked in places, and coloured in shades of ochre, rose, cream and light blue.",
    "Above the door of the second house an iron lantern throws a warm circle on the painted number twelve.",
    "Thin clouds cover most of the sky, apart from one bright gap near the upper edge of the picture.",
)


def built_in() -> tuple[list[str], list[str]]:
    """Captions of the lengths that real ones have, where no folder of real ones is given."""
    draw = random.Random(0)
    long = [" ".join(draw.sample(_SENTENCES, draw.randint(5, len(_SENTENCES)))) for _ in range(40)]
    return list(_SHORT), long


def read_captions(folder: Path | None) -> tuple[list[str], list[str], str]:
    """Short captions, long captions, and where they are from."""
    if folder is None:
        beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "captions"
        folder = beside if (beside / "short.txt").is_file() and (beside / "long.txt").is_file() else None
    if folder is None:
        return *built_in(), "built-in captions"
    short, long = (
        [line for line in (folder / name).read_text(encoding="utf-8").splitlines() if line.strip()]
        for name in ("short.txt", "long.txt")
    )
    return short, long, f"{folder.name}/short.txt and long.txt"


def tokenizer_for(captions: Sequence[str]) -> Any:
    """A tokenizer whose vocabulary is chosen so that the instruction has 220-240 tokens."""
    texts = [*(normalise(caption, "diffusers") for caption in captions), *INSTRUCTION.split("\n")]
    few, many = 256, 16384
    while few < many:
        tokenizer = small_models.new_tokenizer(texts, (few + many) // 2)
        length = len(tokenizer.encode(INSTRUCTION))
        if 220 <= length <= 240:
            return tokenizer
        few, many = ((few + many) // 2 + 1, many) if length > 240 else (few, (few + many) // 2)
    raise SystemExit("no vocabulary gives the instruction 220-240 tokens with these captions")


SHAPE = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": WIDTH // HEADS,
    "query_pre_attn_scalar": WIDTH // HEADS,
}


def build(folder: Path, tokenizer: Any, shape: Mapping[str, int] = SHAPE, dtype: torch.dtype = torch.float32) -> None:
    """Save a random Gemma-2 and the tokenizer. shape: of Gemma2Config, where it is not Gemma-2-2b's."""
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        **{"vocab_size": len(tokenizer), **shape},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(0)
    with no_progress_bars():
        Gemma2Model(config).to(dtype).save_pretrained(folder / "text_encoder")
    tokenizer.save_pretrained(folder / "tokenizer")


def token_counts(encoder: TextEncoder, captions: Sequence[str]) -> list[int]:
    """Tokens of instruction + caption, uncut."""
    return [len(ids) for ids in tokenized(encoder.tokenizer, [encoder.instruction + caption for caption in captions])]


def of_length(encoder: TextEncoder, words: Sequence[str], tokens: int, count: int) -> list[str]:
    """Captions of exactly `tokens` tokens after the instruction's, made of words that are one token each."""
    draw = random.Random(tokens)
    bare = token_counts(encoder, [""])[0] - 1
    made: list[str] = []
    while len(made) < count:
        caption = " ".join(draw.choices(words, k=tokens))
        if token_counts(encoder, [caption])[0] - bare == tokens:
            made.append(caption)
    return made


def single_words(encoder: TextEncoder, captions: Sequence[str]) -> list[str]:
    words = sorted({word for caption in captions for word in normalise(caption, "diffusers").split()})
    bare = token_counts(encoder, [""])[0] - 1
    lengths = token_counts(encoder, [f"{word} {word}" for word in words])
    return [word for word, length in zip(words, lengths, strict=True) if length - bare == 2]


@torch.no_grad()
def reference_rows(pipe: Any, batches: Sequence[Sequence[str]], device: torch.device = CPU) -> list[torch.Tensor]:
    """What diffusers gives, padding removed."""
    made: list[torch.Tensor] = []
    for captions in batches:
        rows, mask, _, _ = pipe.encode_prompt(
            list(captions),
            do_classifier_free_guidance=False,
            device=device,
            complex_human_instruction=INSTRUCTION.split("\n"),
        )
        made.extend(one[kept.bool()] for one, kept in zip(rows, mask, strict=True))
    return made


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    result = call()
    return time.process_time() - begin, result


@torch.inference_mode()
def largest_error(encoder: TextEncoder, captions: Sequence[str], wanted: Sequence[torch.Tensor]) -> float:
    """Of a token, before rows are rounded for the cache."""
    rows = encoder.run(encoder.token_ids(captions)[0])
    return max(
        float(((a.float() - b.float()).norm(dim=1) / b.float().norm(dim=1)).max())
        for a, b in zip(rows, wanted, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer captions, one round of each: within a minute")
    parser.add_argument("--captions", type=Path, metavar="DIR", help="folder of short.txt and long.txt, one a line")
    options = parser.parse_args()
    count, rounds = (4, 1) if options.quick else (16, 3)
    torch.set_num_threads(1)
    from diffusers import SanaPipeline
    from transformers import AutoTokenizer, Gemma2Model

    short, long, origin = read_captions(options.captions)
    draw = random.Random(0)
    mixed = [normalise(c, "diffusers") for c in (*draw.sample(short, count), *draw.sample(long, count))]
    lines: list[str] = []
    result: dict[str, float] = {}
    errors = dict.fromkeys(DTYPES, 0.0)
    bare = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        build(folder, tokenizer_for([*short, *long]))
        for name, dtype in DTYPES.items():
            encoder = TextEncoder.load(TextConfig(id=str(folder), dtype=name), "cpu")
            with no_progress_bars():
                model = Gemma2Model.from_pretrained(folder / "text_encoder", dtype=dtype)
            pipe = SanaPipeline(AutoTokenizer.from_pretrained(folder / "tokenizer"), model, None, None, None)
            words = single_words(encoder, [*short, *long])
            bare = token_counts(encoder, [""])[0] - 1
            cases = {str(n): of_length(encoder, words, n, count) for n in (80, 280)}
            if name == "bf16":
                cases["mixed"] = mixed
            elif options.quick:
                del cases["280"]
            check, _ = cpu_seconds(partial(encoder.encode, cases[max(cases)]))
            for case, captions in cases.items():
                batches = [captions[i : i + count] for i in range(0, len(captions), count)]
                encoder.encode(captions)
                times = []
                rows: list[torch.Tensor] = []
                for _ in range(rounds):
                    theirs, rows = cpu_seconds(partial(reference_rows, pipe, batches))
                    ours, _ = cpu_seconds(partial(encoder.encode, captions))
                    times.append((theirs / ours, theirs, ours))
                errors[name] = max(errors[name], largest_error(encoder, captions, rows))
                ratio, theirs, ours = (statistics.median(column) for column in zip(*times, strict=True))
                tokens = statistics.mean(token_counts(encoder, captions)) - bare
                result[f"speedup_{case}" + ("" if name == "bf16" else "_fp32")] = round(ratio, 2)
                lines.append(
                    f"{name} {case:>7} {tokens:8.1f} {len(captions):9d} {(bare + 299) / tokens:10.2f}x"
                    f" {1e3 * theirs / len(captions):13.1f} {1e3 * ours / len(captions):9.1f} {ratio:8.2f}x"
                )
            lines.append(f"{name} the comparison at the start, once a run: {check:.1f} s of CPU time")
    print(f"Gemma-2, {WIDTH} wide, {LAYERS} layers, {HEADS} heads; the instruction has {bare + 1} tokens; batches of")
    print(f"{count}; mixed: {origin}, half of each; CPU ms a caption, one thread, median of {rounds}")
    print("dtype   case   tokens  captions   positions  reference ms   ours ms   speedup")
    print("\n".join(lines))
    print("largest relative error of a token: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    result["max_rel_error"], result["max_rel_error_bf16"] = errors["fp32"], errors["bf16"]
    print(json.dumps(result))


if __name__ == "__main__":
    run_and_exit(main)
