"""Released repositories as their users meet them: the exact names of files, indexes, variants and configuration keys,
with small random weights inside; and a hub on loopback that serves them.

Sources, all public (names and keys alone were taken):
* Precisions of each model: NVlabs/Sana, `asset/docs/model_zoo.md` ("fp16/fp32", "bf16/fp32", "bf16").
* `Sana_1600M_1024px_diffusers` at ac0da2ff55fbe434795be0dce883042e4d49e2fc: the whole list of files, and that the
  transformer's are F32, the text encoder's BF16 and the VAE's F32, in the memory contract of a Candle port of Sana,
  which refuses any other inventory. A single file and an index of the same variant lie side by side. Its list for
  Sana-Sprint has one set of each part, as SANA-1.5 has (14.8 GB in all for 4.8B: bf16 cannot be more than one set).
* `Sana_1600M_1024px_BF16_diffusers` (seen at e18f82ddb8233fa4d979c2613f41a3ca4c5fc730): the download lists of public
  scripts: fp32 shards, a bf16 and an int4 file, `model.safetensors.index.bf16.json`, a "bf16" VAE of fp32's size.
* `Sana_600M_512px_diffusers` (seen at 83d7a190bfd1fd070570a793d2dab5c7a3231b9d): fp16 names as in the list of
  `Sana_600M_1024px_diffusers` in a public download script; the file without a variant by the model zoo's "fp16/fp32".
* `SANA1.5_1.6B_1024px_diffusers` at caa51e5ea874be07d3a9c7c2d0fd800570b18440 and `SANA1.5_4.8B_1024px_diffusers` at
  9468102c3cebb657f8c4b5f1e5a71e989a15f10d: revisions pinned by public projects.
* model_index.json: diffusers 0.32.0.dev0, `GemmaTokenizerFast` (log in sgl-project/sglang #24705).
* Keys of transformer/config.json and the 5 GB shards: NVlabs/Sana, `tools/convert_sana_to_diffusers.py`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import urllib.parse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sana_pipe.train.models.sana_config import SanaConfig

SMALL = SanaConfig(
    in_channels=16,
    out_channels=16,
    num_attention_heads=4,
    attention_head_dim=8,
    num_layers=2,
    num_cross_attention_heads=2,
    cross_attention_head_dim=16,
    cross_attention_dim=32,
    caption_channels=128,
    sample_size=8,
)
"""Takes the latents and rows of the tests' small VAE and text encoder."""


@dataclass(frozen=True)
class Set:
    """One set of weights. `other`: other values than the sets next to it (a file that nobody should read)."""

    variant: str | None = None
    dtype: torch.dtype = torch.float32
    shards: int = 1
    other: bool = False


BF16, FP16 = torch.bfloat16, torch.float16
ONE_SET: dict[str, tuple[Set, ...]] = {
    "transformer": (Set(dtype=BF16),),
    "text_encoder": (Set(dtype=BF16, shards=2),),
    "vae": (Set(),),
}
RELEASED: dict[str, dict[str, tuple[Set, ...]]] = {
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": {
        "transformer": (Set(shards=2), Set(other=True), Set("fp16", FP16)),
        "text_encoder": (Set(dtype=BF16, shards=2), Set("fp16", FP16, shards=2)),
        "vae": (Set(), Set("fp16", FP16)),
    },
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": {
        "transformer": (Set(shards=2), Set("bf16", BF16), Set("int4", torch.float8_e4m3fn)),
        "text_encoder": (Set(dtype=BF16, shards=2), Set("bf16", BF16, shards=2)),
        "vae": (Set(), Set("bf16")),
    },
    "Efficient-Large-Model/Sana_600M_512px_diffusers": {
        "transformer": (Set(), Set("fp16", FP16)),
        "text_encoder": (Set(dtype=BF16, shards=2), Set("fp16", FP16, shards=2)),
        "vae": (Set(), Set("fp16", FP16)),
    },
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": ONE_SET,
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": {**ONE_SET, "transformer": (Set(dtype=BF16, shards=2),)},
}
STEM = {"transformer": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}


def build(root: Path, name: str, models: Path, config: SanaConfig = SMALL, seed: int = 0) -> Path:
    """Write the repository `name` into `root`.

    Args:
        models: a folder with the small `vae/`, `text_encoder/`, `tokenizer/` and `scheduler/` (fixture `tiny_repo`).
        config: of the transformer, whose weights are drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {key: torch.randn(shape, generator=generator) * 0.1 for key, shape in sorted(config.shapes().items())}
    for part, sets in RELEASED[name].items():
        folder = root / part
        folder.mkdir(parents=True)
        if part == "transformer":
            text = json.dumps({**config.to_dict(), "_diffusers_version": "0.32.0.dev0"})
            (folder / "config.json").write_text(text)
            tensors = weights
        else:
            shutil.copyfile(models / part / "config.json", folder / "config.json")
            tensors = load_file(next((models / part).glob("*.safetensors")))
        for one in sets:
            write_set(folder, STEM[part], tensors, one)
    shutil.copytree(models / "tokenizer", root / "tokenizer")
    shutil.copytree(models / "scheduler", root / "scheduler")
    parts = {
        "scheduler": ["diffusers", "DPMSolverMultistepScheduler"],
        "text_encoder": ["transformers", "Gemma2Model"],
        "tokenizer": ["transformers", "GemmaTokenizerFast"],
        "transformer": ["diffusers", "SanaTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderDC"],
    }
    index = {"_class_name": "SanaPipeline", "_diffusers_version": "0.32.0.dev0", **parts}
    (root / "model_index.json").write_text(json.dumps(index, indent=2))
    for extra in ("README.md", "LICENSE", ".gitattributes"):
        (root / extra).write_text("not read\n")
    return root


def write_set(
    folder: Path, stem: str, tensors: dict[str, torch.Tensor], one: Set, *, index: str = "", shard: str = ""
) -> list[Path]:
    """Write a set of weights; returns its weight files.

    Args:
        index: name of the index, where it is not the released one.
        shard: pattern of the shards' names (`{i}`, `{n}`), where it is not the released one.
    """
    middle = f".{one.variant}" if one.variant else ""
    stored = {key: (value + one.other).to(one.dtype) for key, value in tensors.items()}
    if one.shards == 1:
        path = folder / f"{stem}{middle}.safetensors"
        save_file(stored, path, metadata={"format": "pt"})
        return [path]
    place: dict[str, str] = {}
    for number in range(one.shards):
        name = (shard or f"{stem}{middle}-{{i:05d}}-of-{{n:05d}}.safetensors").format(i=number + 1, n=one.shards)
        part = {key: stored[key] for key in sorted(stored)[number :: one.shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        place.update(dict.fromkeys(part, name))
    total = sum(value.nbytes for value in stored.values())
    (folder / (index or f"{stem}.safetensors.index{middle}.json")).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": place})
    )
    return [folder / name for name in sorted(set(place.values()))]


def cached(cache: Path, name: str, revision: str, folder: Path, only: Iterable[str] = ("*",)) -> Path:
    """Put a repository into a hub cache (HF_HUB_CACHE) as it lies there after a download; returns the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    for path in sorted(p for pattern in only for p in folder.rglob(pattern) if p.is_file()):
        target = snapshot / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    return snapshot


@dataclass
class Hub:
    """What a hub on loopback serves.

    Attributes:
        folders: repository -> folder; `revision` -> all have this one commit.
        gated: repositories whose files need `token`.
        cut: files (by their end) whose transfer ends in the middle, so many times.
        fetched: the files that were sent, in order.
    """

    folders: dict[str, Path]
    revision: str = "0123456789abcdef0123456789abcdef01234567"
    gated: frozenset[str] = frozenset()
    token: str = "hf_right"
    cut: dict[str, int] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on loopback: as much of the hub's protocol as `huggingface_hub` speaks to list and fetch models."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            if "Content_Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
            api, path = path.startswith("api/models/"), path.removeprefix("api/models/")
            owner, name, *rest = path.split("/")
            folder = hub.folders.get(f"{owner}/{name}")
            if folder is None:
                return self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            revision = rest[1] if len(rest) > 1 else "main"
            if revision not in ("main", hub.revision):
                return self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
            if api:
                return self.listing(f"{owner}/{name}", folder, tree=rest[:1] == ["tree"])
            file = "/".join(rest[2:])
            if f"{owner}/{name}" in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.answer(401, X_Error_Code="GatedRepo", X_Error_Message="Access to model is restricted")
            if not (folder / file).is_file():
                return self.answer(
                    404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=hub.revision
                )
            return self.send(file, (folder / file).read_bytes())

        def listing(self, repository: str, folder: Path, *, tree: bool) -> None:
            there = sorted(p for p in folder.rglob("*") if p.is_file())
            named = [(p.relative_to(folder).as_posix(), p.stat().st_size) for p in there]
            if tree:
                body: Any = [{"type": "file", "path": p, "size": size, "oid": _etag(p)} for p, size in named]
            else:
                siblings = [{"rfilename": p, "size": size, "blobId": _etag(p)} for p, size in named]
                body = {
                    "id": repository,
                    "modelId": repository,
                    "sha": hub.revision,
                    "private": False,
                    "gated": "manual" if repository in hub.gated else False,
                    "disabled": False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "siblings": siblings,
                }
            self.answer(200, json.dumps(body).encode(), Content_Type="application/json")

        def send(self, file: str, data: bytes) -> None:
            first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
            headers = {
                "ETag": f'"{_etag(file)}"',
                "X_Repo_Commit": hub.revision,
                "Accept_Ranges": "bytes",
                "Content_Length": str(len(data) - first),
            }
            if first:
                headers["Content_Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            body = data[first:]
            if self.command != "HEAD":
                hub.fetched.append(file)
                for end in hub.cut:
                    if file.endswith(end) and hub.cut[end]:
                        hub.cut[end] -= 1
                        body, self.close_connection = body[: len(body) // 2], True
            self.answer(206 if first else 200, body, **headers)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(file: str) -> str:
    return hashlib.sha1(file.encode()).hexdigest()
