"""Captions to rows, at the cost of the captions alone, by a text encoder of any kind (`text_kind`).

What all captions begin with is run once where the kind allows it (Sana puts an instruction of 208 tokens before each),
captions of similar length share a batch, and there is hardly any padding. `TextEncoder` compares its rows with the
reference's computation.
Price: describing the model reads all of its weights (5 GB for Gemma-2-2b) to digest them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from sana_pipe.base.hub import ModelError, choose, load, read_json, resolve, weight_files
from sana_pipe.data.encoders.config import TextConfig
from sana_pipe.data.encoders.frozen import DTYPES, NonFiniteOutputError, bf16_bits, digest, finite_bits
from sana_pipe.data.encoders.text_kind import TEMPLATE_FILE, TextKind, kind_at, kind_of

BATCH_TOKENS = 8192
"""Maximum positions of a forward pass, padding included: fills a GPU and fits next to Gemma."""

_NOISE_FACTOR, _MAX_TOLERANCE = 3.0, 0.1
_COMPARED = 4

_DIGESTED = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
TOKENIZER_FILES = (*_DIGESTED, TEMPLATE_FILE)
_TOKENIZER_PATTERNS = (*TOKENIZER_FILES, "added_tokens.json", "config.json")
_VOLATILE = (
    *("padding", "truncation", "chat_template", "name_or_path", "tokenizer_file", "processor_class"),
    *("is_local", "local_files_only"),
)


# ---------------------------------------------------------------- encodings, from files alone


def tolerance(dtype: str, layers: int) -> float:
    """Largest allowed relative error of a token under `auto` against the reference; see `TextEncoder`."""
    return 1e-4 if dtype == "fp32" else 4 * 2**-8 * math.sqrt(layers)


def describe_text(config: TextConfig) -> dict[str, Any]:
    """Describe what decides the rows of a caption, from files, without building the module. weights: 32 hex digits, the
    same with and without a language model's head; tokenizer: 32 hex digits over its files.

    Raises:
        ModelError: no such model or tokenizer, another class of model, weights that cannot be read.
        ConfigError: settings that this kind of encoder does not have.
    """
    kind = _kind(config)
    tokenizer = _tokenizer_folder(config)
    return {
        "weights": digest(weight_files(kind.folder), kind.tensor, kind.architecture()),
        "tokenizer": _tokenizer_digest(tokenizer),
        "dtype": config.dtype,
        "attention": kind.attention,
        "instruction": kind.instruction(config),
        "normalisation": kind.normalisations[config.prompting],
        "max_length": kind.rows(config),
        "selection": kind.selection,
        "width": kind.width,
        "encoder_kind": kind.name,
        "template": kind.template(tokenizer),
    }


def text_width(folder: Path) -> int:
    """Values per row of the text encoder in a folder. Raises ModelError for another class of model."""
    return kind_at(folder).width


def _kind(config: TextConfig) -> TextKind:
    """The configured encoder, fetched."""
    kind = kind_at(resolve(config))
    kind.check(config)
    return kind


def _tokenizer_folder(config: TextConfig) -> Path:
    return resolve(config.tokenizer, _TOKENIZER_PATTERNS)


def check_tokenizer(place: object, files: Collection[str]) -> None:
    """Refuse files, by their names, that are no tokenizer's."""
    if "tokenizer.json" not in files and "tokenizer.model" not in files:
        raise ModelError(
            f"{place} holds no tokenizer",
            expected="tokenizer.json or tokenizer.model",
            found=", ".join(sorted(files)) or "no files",
            fix="set text.id to a folder that has them, or a folder `tokenizer` with them",
        )


def _tokenizer_digest(folder: Path) -> str:
    """xxh3-128 over the content of the tokenizer's files, without spacing, key order and `_VOLATILE` keys (origin,
    padding of the last call, and the chat template, which is a field of the encoding where it counts)."""
    check_tokenizer(folder, [path.name for path in folder.iterdir()])
    present = [folder / name for name in (*_DIGESTED, "added_tokens.json") if (folder / name).is_file()]
    state = xxhash.xxh3_128()
    for path in present:
        if path.suffix == ".json":
            content = read_json(path)
            body = repr(_ordered({key: value for key, value in content.items() if key not in _VOLATILE})).encode()
        else:
            body = path.read_bytes()
        state.update(f"{path.name}\0{len(body)}\0".encode())
        state.update(body)
    return state.hexdigest()


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _ordered(value[key])) for key in sorted(value)]
    return [_ordered(item) for item in value] if isinstance(value, list) else value


def batches_of_similar_length(members: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Batches of similar length: the longest member is at most a quarter plus 8 tokens longer than the shortest, and a
    batch has at most `BATCH_TOKENS` positions."""
    batch: list[int] = []
    for i in sorted(members, key=lambda i: (lengths[i], i)):
        longest = lengths[i]
        if batch and (longest > 1.25 * lengths[batch[0]] + 8 or (len(batch) + 1) * longest > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


# ---------------------------------------------------------------- captions


class TextEncoder:
    """Hidden states of a text encoder's tokens, selected as its kind does.

    Gemma-2's rule (NVlabs/Sana `train_scripts/train.py`, diffusers `SanaPipeline.encode_prompt`): instruction + caption
    is cut and padded on the right to `len(instruction tokens) + max_length - 2`; position 0 (<bos>) and the last
    `max_length - 1` positions are kept, without padding. The 2 stands for <bos> and the instruction's trailing space,
    which merges with the caption's first word. Kinds without an instruction keep the first `max_length` positions.

    `mode: exact` computes every caption so, padded. `mode: auto` runs without the padding and, of a kind that shares
    it, the instruction once, without its last token, and in full the captions that do not begin with exactly these
    tokens. Some captions of the first batch, and of each with captions twice as long as any before, are compared with
    the reference; beyond the tolerance nothing is stored and the run ends. The mode is not part of the encoding: values
    differ as between batch sizes and types of GPU.

    The tolerance is on the largest relative error of a token, |a - b| / |b|. fp32: 1e-4 (measured 3e-6). bf16: 4 steps
    of bf16, times the square root of the number of layers, since roundings add up like a random walk: 0.08 for
    Gemma-2-2b (measured 0.02). If the reference without padding differs from itself by more, three times that, at most
    0.1. Mistakes are larger: a wrong token in the instruction gives 0.15, a mask that forgets it 1.

    Attributes:
        width: values per row. max_length: maximum number of rows.
        truncated, tokens, unshared: so far, captions that were cut, caption tokens, captions run in full under `auto`.
        largest_error: of the comparisons so far; None before the first.
        max_ids: tokens of instruction and caption that the rule keeps.
        first_kept: the first position after <bos> that it selects.
        shared_ids: the instruction's tokens before it. prefix: their recording, made by the first caption.
    """

    def __init__(self, kind: TextKind, model: torch.nn.Module, tokenizer: Any, config: TextConfig, template: str = ""):
        self.kind, self.model, self.tokenizer, self.template = kind, model, tokenizer, template
        self.dtype, self.mode = config.dtype, config.mode
        self.instruction, self.max_length, self.width = kind.instruction(config), kind.rows(config), kind.width
        self.device = next(model.parameters()).device
        self.truncated = self.tokens = self.unshared = 0
        self.largest_error: float | None = None
        start = tokenizer.encode(self.instruction) if kind.shares_prefix else []
        self.max_ids, self.first_kept = _window(len(start) if self.instruction else 0, self.max_length)
        self.shared_ids = start[: self.first_kept]
        self.prefix: Any = None
        self._compared_to = -1

    @classmethod
    def load(cls, config: TextConfig, device: str | torch.device) -> TextEncoder:
        """Read the model (with or without a language model's head) and its tokenizer."""
        kind = _kind(config)
        folder, place = kind.folder, _tokenizer_folder(config)
        tokenizer, template = load_tokenizer(place, kind), kind.template(place)
        of_model, options = kind.model_class()
        model, report = load(
            of_model,
            folder,
            "text encoder",
            dtype=DTYPES[config.dtype],
            attn_implementation=kind.attention,
            variant=choose(folder).variant,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
        missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report.get("mismatched_keys", ()))
        if missing:  # transformers only warns and fills in random values
            raise ModelError(
                f"the weights in {folder} lack tensors that the text encoder needs",
                found=f"{len(missing)} missing, the first: {missing[0]}",
                fix="fetch the folder again",
            )
        model = kind.prepared(model).to(torch.device(device)).eval().requires_grad_(False)
        return cls(kind, model, tokenizer, config, template)

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> list[np.ndarray]:
        """The rows of captions, in batches of similar length.

        Args:
            captions: already normalised.

        Returns:
            For each caption uint16 (n, width), n <= max_length: bits of its bf16 rows, without padding.

        Raises:
            NonFiniteError: with the batch rows.
            ModelError: the rows differ from the reference (`mode: auto`).
        """
        if not captions:
            return []
        rows, cut = self.token_ids(captions)
        values = self.run(rows)
        if self.mode == "auto":
            self.compare(captions, rows, values)
        counts = [len(states) for states in values]
        rounded = torch.cat(values).to(torch.bfloat16)
        starts = np.cumsum([0, *counts[:-1]])
        finite = np.logical_and.reduceat(torch.isfinite(rounded).all(dim=1).cpu().numpy(), starts)
        if not finite.all():
            raise NonFiniteOutputError("text encoder", np.flatnonzero(~finite).tolist(), self.dtype)
        self.truncated += cut
        self.tokens += sum(counts) - len(counts)
        bits = bf16_bits(rounded)
        return [bits[start : start + count] for start, count in zip(starts, counts, strict=True)]

    @torch.inference_mode()
    def null(self) -> tuple[np.ndarray, int]:
        """The empty caption as classifier-free guidance uses it, without the instruction.

        Returns:
            uint16 (n, width): bits of its bf16 rows, of Gemma-2 padded to `max_length` (Sana's trainer reads the
            padding when it drops a caption), and the number of rows that are no padding.
        """
        (ids,) = tokenized(self.tokenizer, self.kind.texts(self.tokenizer, [""], self.template))
        ids = ids[: self.max_length]
        hidden = self._hidden([ids], self.max_length if self.kind.pads_null else len(ids))
        return finite_bits(hidden, "text encoder", self.dtype)[0], len(ids)

    def token_ids(self, captions: Sequence[str]) -> tuple[list[list[int]], int]:
        """Tokens of instruction + caption, cut to the rule's length, and the number of captions that were cut."""
        texts = self.kind.texts(self.tokenizer, captions, self.template)
        rows = tokenized(self.tokenizer, [self.instruction + text for text in texts])
        return [ids[: self.max_ids] for ids in rows], sum(len(ids) > self.max_ids for ids in rows)

    def run(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """(n, width) for each row of tokens: the selected hidden states, on the device, unrounded."""
        # An instruction of 10 tokens (<bos> and the trailing space among them) and max_length 5: 10 + 5 - 2 = 13 tokens
        # at most, of which the rule selects position 0 and the last four, 9 to 12. Position 9 is the trailing space's,
        # where the caption's first word begins. So tokens 0 to 8 are the same for all captions and none but 0 is
        # selected: they run once (`Prefix`), and a caption of 3 tokens runs 3 positions, 9 to 11, in place of 13.
        # Its rows are <bos> of the prefix and these 3. A caption whose first word merges with more than the space
        # changes a token before 9: it does not begin with the shared ids and runs in full.
        if self.mode == "exact":
            return self.run_in_full(rows, range(len(rows)), padded=True)
        shared = len(self.shared_ids)
        with_prefix = [i for i, ids in enumerate(rows) if shared and ids[:shared] == self.shared_ids]
        values: dict[int, torch.Tensor] = {}
        if with_prefix:
            if self.prefix is None:
                self.prefix = self.kind.prefix(self.model, self.shared_ids)
            ends = [ids[shared:] for ids in rows]
            for batch in batches_of_similar_length(with_prefix, [len(ids) for ids in ends]):
                if not ends[batch[-1]]:  # the prefix alone: possible without an instruction
                    values.update((i, self.prefix.bos) for i in batch)
                    continue
                hidden = self.prefix([ends[i] for i in batch])
                for i, states in zip(batch, hidden, strict=True):
                    values[i] = torch.cat([self.prefix.bos, states[: len(ends[i])]])
        others = [i for i in range(len(rows)) if i not in values]
        self.unshared += len(others) * self.kind.shares_prefix
        values.update(zip(others, self.run_in_full(rows, others, padded=False), strict=True))
        return [values[i] for i in range(len(rows))]

    def run_in_full(self, rows: Sequence[Sequence[int]], members: Sequence[int], padded: bool) -> list[torch.Tensor]:
        """The rows of `members` without a shared prefix; `padded`: to the full length, like the reference."""
        values: dict[int, torch.Tensor] = {}
        for batch in batches_of_similar_length(members, [self.max_ids if padded else len(ids) for ids in rows]):
            longest = max(len(rows[i]) for i in batch)
            hidden = self._hidden([rows[i] for i in batch], self.max_ids if padded else longest)
            for i, states in zip(batch, hidden, strict=True):
                values[i] = torch.cat([states[:1], states[self.first_kept : len(rows[i])]])
        return [values[i] for i in members]

    def _hidden(self, rows: Sequence[Sequence[int]], length: int) -> torch.Tensor:
        """Hidden states (rows, length, width) as the reference computes them: padded, with transformers' mask."""
        ids = torch.full((len(rows), length), self.tokenizer.pad_token_id, dtype=torch.long)
        mask = torch.zeros((len(rows), length), dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, dtype=torch.long)
            mask[i, : len(row)] = 1
        return self.kind.hidden(self.model, ids.to(self.device), mask.to(self.device))

    def compare(self, captions: Sequence[str], rows: Sequence[Sequence[int]], values: Sequence[torch.Tensor]) -> None:
        """Compare a few rows of this batch with the reference, if they are the first or twice as long as before."""
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
        longest = len(values[order[-1]])
        if longest <= 2 * self._compared_to:
            return
        picks = sorted({order[k * (len(order) - 1) // (_COMPARED - 1)] for k in range(_COMPARED)})
        reference = self.run_in_full(rows, picks, padded=True)
        errors = [relative_error(values[i], want) for i, want in zip(picks, reference, strict=True)]
        limit = tolerance(self.dtype, self.kind.architecture()["num_hidden_layers"])
        if self.dtype != "fp32":
            again = self.run_in_full(rows, [order[-1]], padded=False)[0]
            noise = relative_error(again, reference[picks.index(order[-1])])
            limit = max(limit, min(_NOISE_FACTOR * noise, _MAX_TOLERANCE))
        worst = max(errors)
        if not worst <= limit:
            caption = captions[picks[errors.index(worst)]]
            raise ModelError(
                "the text encoder gives other rows for batches without padding than the reference does",
                expected=f"a relative error of at most {limit:.1e} for every token ({self.dtype})",
                found=f"largest error {worst:.1e}, in the caption {caption[:80]!r}",
                fix="--set text.mode=exact (slower: every caption is encoded as the reference does it)",
            )
        self.largest_error = max(worst, self.largest_error or 0.0)
        self._compared_to = longest


def count_rows(config: TextConfig, captions: Sequence[str]) -> list[int]:
    """Number of rows of each (normalised) caption, from the tokenizer alone."""
    kind, place = kind_of(config), _tokenizer_folder(config)
    tokenizer, instruction = load_tokenizer(place, kind), kind.instruction(config)
    room, first = _window(len(tokenizer.encode(instruction)) if instruction else 0, kind.rows(config))
    texts = kind.texts(tokenizer, captions, kind.template(place))
    rows = tokenized(tokenizer, [instruction + text for text in texts])
    return [1 + max(0, min(len(ids), room) - first) for ids in rows]


def tokenized(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Uncut, with <bos>, and without a warning of lengths beyond the model's."""
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=True, padding=False, truncation=False, verbose=False)["input_ids"]


def _window(instruction: int, max_length: int) -> tuple[int, int]:
    """Maximum tokens under the selection rule, and the first position after <bos> that it keeps. instruction: its
    tokens, <bos> included; 0 without one."""
    room = instruction + max_length - 2 if instruction else max_length
    return room, room - max_length + 1


def relative_error(rows: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest |rows - reference| / |reference| of a caption's tokens; infinite if only one of the two is finite, 0
    if neither is: such a caption is rejected under either mode."""
    if rows.shape != reference.shape:
        return float("inf")
    rows, reference = rows.double(), reference.double()
    finite = bool(torch.isfinite(rows).all()), bool(torch.isfinite(reference).all())
    if not all(finite):
        return float("inf") if any(finite) else 0.0
    return float(((rows - reference).norm(dim=1) / reference.norm(dim=1).clamp_min(1e-30)).max())


def load_tokenizer(folder: Path, kind: TextKind) -> Any:
    """A tokenizer of transformers that pads on the right and begins texts as the encoder needs; another is refused."""
    from transformers import AutoTokenizer

    _tokenizer_digest(folder)  # a ModelError if files are missing or broken
    tokenizer = load(AutoTokenizer, folder, "tokenizer")
    tokenizer.padding_side = "right"
    (ids,) = tokenized(tokenizer, _tried(tokenizer, kind, folder))
    if kind.needs_bos and (tokenizer.bos_token_id is None or ids != [tokenizer.bos_token_id]):
        raise ModelError(
            f"the tokenizer in {folder} does not add <bos> alone to every text, as Sana's selection rule needs",
            expected=f"token {tokenizer.bos_token_id} for an empty text",
            found=str(ids),
            fix="set add_bos_token to true in its tokenizer_config.json, or take the model's own tokenizer",
        )
    if not ids:
        raise ModelError(
            f"the tokenizer in {folder} makes no token of an empty caption, so {kind.called} gives no row of it",
            expected="at least one token, such as <bos>",
            found="none",
            fix="set add_bos_token to true in its tokenizer_config.json, or take the model's own tokenizer",
        )
    if tokenizer.pad_token_id is None:
        raise ModelError(f"the tokenizer in {folder} has no padding token", fix="take the model's own tokenizer")
    return tokenizer


def _tried(tokenizer: Any, kind: TextKind, folder: Path) -> list[str]:
    """Return what the tokenizer is given of the empty caption. A chat template that leaves captions out is refused."""
    template, captions = kind.template(folder), ("a red cube", "snow")
    try:
        empty, *texts = kind.texts(tokenizer, ["", *captions], template)
    except Exception as error:  # whatever the template's program raises
        empty, texts, said = "", [], f"{type(error).__name__}: {error}"
    else:
        said = " and ".join(map(repr, texts))
    if len(texts) == len(captions) and all(caption in text for caption, text in zip(captions, texts, strict=True)):
        return [empty]
    raise ModelError(
        f"the chat template of the tokenizer in {folder} does not work for {kind.called}",
        expected=f"a text with the caption in it, of {' and '.join(map(repr, captions))}",
        found=said[:300],
        fix="copy the tokenizer's folder from the repository of the model that is trained",
    )
