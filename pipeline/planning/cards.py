"""GPUs by name: memory, peaks and links.

`memory_gib` is what CUDA reports as total on such a card (with ECC where it is the default), so a little less than the
label says. Peaks are dense, with fp32 accumulation. `link_gbs` is what one GPU can send to the others of its node, in
each direction: NVLink or Infinity Fabric, or the half of PCIe's rate that peers reach through the host.

Sources: NVIDIA's data sheets and architecture whitepapers (GA102, AD102, Blackwell RTX, A40, L40S, A100, H100, H200,
B200/HGX), AMD's data sheet of the Instinct MI300X. The 16-bit peaks are those of `pipeline.training.throughput`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.errors import UserError
from pipeline.training.throughput import peak_tflops

GIB = 2**30
CPU = "cpu"


@dataclass(frozen=True)
class Card:
    """memory_gib: GiB. bf16_tflops, fp32_tflops: 10^12 operations/s. memory_gbs, link_gbs: 10^9 bytes/s."""

    name: str
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gbs: float
    link_gbs: float

    @property
    def memory(self) -> int:
        """Bytes."""
        return round(self.memory_gib * GIB)

    @property
    def is_gpu(self) -> bool:
        """False for `CPU`, whose speed is in no data sheet."""
        return self.name != CPU


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("3090", 23.7, 71.0, 35.6, 936, 12),
        Card("4090", 23.6, 165.2, 82.6, 1008, 12),
        Card("5090", 31.4, 209.5, 104.8, 1792, 25),
        Card("a40", 44.5, 149.7, 37.4, 696, 12),
        Card("a100-40", 39.4, 312.0, 19.5, 1555, 300),
        Card("a100-80", 79.2, 312.0, 19.5, 2039, 300),
        Card("l40s", 44.4, 362.0, 91.6, 864, 12),
        Card("h100", 79.1, 989.0, 67.0, 3350, 450),
        Card("h200", 139.8, 989.0, 67.0, 4800, 450),
        Card("b200", 178.4, 2250.0, 75.0, 8000, 900),
        Card("mi300x", 191.5, 1307.4, 163.4, 5300, 448),
    )
}
UNNAMED = "a100-80"
"""The card whose speed is assumed where only a memory size is given."""


def card(name: str) -> Card:
    """A card by its name.

    Raises:
        UserError: an unknown name; lists the known ones.
    """
    key = name.lower().removeprefix("rtx").strip(" -_")
    if key == CPU:
        return processor()
    if key not in CARDS:
        raise UserError(
            f"--gpu {name}: no such card in the table",
            expected="one of " + ", ".join([*CARDS, CPU]),
            fix="or describe it: --gpus N --gpu-memory 24GiB",
        )
    return CARDS[key]


def processor() -> Card:
    """This machine's CPU: its main memory, or the limit of its control group; nominal speeds."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in limit_files(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")):
        with suppress(OSError, ValueError):
            sizes.append(int(file.read_text()))
    return Card(CPU, min(sizes) / GIB, 0.05, 0.05, 10, 1)


def limit_files(membership: Path, root: Path) -> Iterator[Path]:
    """Files that may limit this process's memory: of its control group and of all above it (cgroup v2), then of v1."""
    groups = [""]
    with suppress(OSError):
        groups += [line.partition("::")[2] for line in membership.read_text().splitlines() if line.startswith("0::")]
    for group in groups:
        below = root / group.strip("/")
        yield from (folder / "memory.max" for folder in (below, *below.parents) if folder.is_relative_to(root))
    yield root / "memory" / "memory.limit_in_bytes"


def of_device(device: torch.device) -> Card | None:
    """The card of a device of this process, with its variant's peaks and its memory; None: not in the table."""
    if device.type == "cpu":
        return processor()
    properties = torch.cuda.get_device_properties(device)
    return of_name(properties.name, properties.total_memory)


def of_name(name: str, memory: int) -> Card | None:
    """The card of a name as torch gives it, and of so many bytes."""
    named = [c for c in CARDS.values() if re.search(rf"\b{c.name.partition('-')[0]}\b", name.lower())]
    if not named:
        return None
    nearest = min(named, key=lambda c: abs(c.memory - memory))
    bf16, fp32 = (peak_tflops(name, precision) for precision in ("bf16", "fp32"))
    return replace(
        nearest,
        memory_gib=memory / GIB,
        bf16_tflops=bf16 or nearest.bf16_tflops,
        fp32_tflops=fp32 or nearest.fp32_tflops,
    )


def memory_of(text: str) -> int:
    """Bytes of `24GiB`, `24GB`, `24` (GiB) or `81559MiB`.

    Raises:
        UserError: another form.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB|G)?\s*", text, flags=re.IGNORECASE)
    units = {"gib": 2**30, "g": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}
    if match is None or float(match[1]) <= 0:
        raise UserError(f"--gpu-memory {text}: not an amount of memory", expected="such as 24GiB, 80GB or 81559MiB")
    return round(float(match[1]) * units[(match[2] or "GiB").lower()])
