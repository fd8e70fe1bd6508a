"""GPUs by name: memory, peaks and links.

`memory_gib` is what CUDA reports as total on such a card (with ECC where it is the default). Peaks are dense, 16 bit
with fp32 accumulation and fp32 without TF32. `link_gbs` is what one GPU can send to the others of its node, in each
direction: NVLink or Infinity Fabric, or the half of PCIe's rate that peers reach through the host.
Sources: NVIDIA's data sheets and architecture whitepapers (GA102, AD102, Blackwell RTX and RTX PRO, HGX and NVL72),
AMD's data sheet of the Instinct MI300X. The shares of a peak that a step reaches are in `planning/cost.py`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import torch

from sana_pipe.base.errors import UserError

GIB = 2**30
_SIZE = re.compile(r"\W(\d{1,3}) ?gi?b$")
"""The size at the end of a name, as in `3060 12gb`."""
CPU = "cpu"


@dataclass(frozen=True)
class Card:
    """part: of the name that torch gives. memory_gib: GiB. bf16_tflops, fp32_tflops: 10^12 operations/s. memory_gbs,
    link_gbs: 10^9 bytes/s. bf16: False where the compute capability is below 8.0; then `bf16_tflops` is
    the peak of fp16."""

    name: str
    part: str
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gbs: float
    link_gbs: float
    bf16: bool = True

    @property
    def memory(self) -> int:
        """Bytes."""
        return round(self.memory_gib * GIB)

    @property
    def is_gpu(self) -> bool:
        """False for `CPU`, of which no data sheet gives speeds."""
        return self.name != CPU

    def supports(self, precision: str) -> bool:
        """False for a value of `train.precision` that the card has no units for."""
        return self.bf16 or not precision.startswith("bf16")

    def tflops(self, precision: str) -> float:
        """The peak in a value of `train.precision`."""
        return self.fp32_tflops if precision == "fp32" else self.bf16_tflops


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("2080-ti", "RTX 2080 Ti", 10.7, 53.8, 13.4, 616, 6, bf16=False),
        Card("3060-ti", "RTX 3060 Ti", 7.7, 32.4, 16.2, 448, 12),
        Card("3060", "RTX 3060", 11.7, 25.5, 12.7, 360, 12),
        Card("3070", "RTX 3070", 7.7, 40.6, 20.3, 448, 12),
        Card("3070-ti", "RTX 3070 Ti", 7.7, 43.5, 21.7, 608, 12),
        Card("3080", "RTX 3080", 9.7, 59.5, 29.8, 760, 12),
        Card("3080-12", "RTX 3080", 11.7, 61.3, 30.6, 912, 12),
        Card("3080-ti", "RTX 3080 Ti", 11.7, 68.2, 34.1, 912, 12),
        Card("3090", "RTX 3090", 23.7, 71.0, 35.6, 936, 12),
        Card("3090-ti", "RTX 3090 Ti", 23.7, 80.0, 40.0, 1008, 12),
        Card("4060-ti", "RTX 4060 Ti", 15.6, 44.1, 22.1, 288, 6),
        Card("4070", "RTX 4070", 11.6, 58.3, 29.1, 504, 12),
        Card("4070-super", "RTX 4070 SUPER", 11.6, 70.9, 35.5, 504, 12),
        Card("4070-ti", "RTX 4070 Ti", 11.6, 80.2, 40.1, 504, 12),
        Card("4070-ti-super", "RTX 4070 Ti SUPER", 15.6, 88.2, 44.1, 672, 12),
        Card("4080", "RTX 4080", 15.7, 97.5, 48.7, 717, 12),
        Card("4080-super", "RTX 4080 SUPER", 15.7, 104.4, 52.2, 736, 12),
        Card("4090", "RTX 4090", 23.6, 165.2, 82.6, 1008, 12),
        Card("5060-ti", "RTX 5060 Ti", 15.4, 47.4, 23.7, 448, 12),
        Card("5070", "RTX 5070", 11.4, 61.7, 30.9, 672, 25),
        Card("5070-ti", "RTX 5070 Ti", 15.4, 87.9, 43.9, 896, 25),
        Card("5080", "RTX 5080", 15.4, 112.6, 56.3, 960, 25),
        Card("5090", "RTX 5090", 31.4, 209.5, 104.8, 1792, 25),
        Card("p100", "P100", 15.9, 18.7, 9.3, 732, 6, bf16=False),
        Card("v100-16", "V100", 15.8, 125.0, 15.7, 900, 150, bf16=False),
        Card("v100-32", "V100", 31.7, 125.0, 15.7, 900, 150, bf16=False),
        Card("t4", "T4", 14.5, 65.0, 8.1, 320, 6, bf16=False),
        Card("a2", "A2", 14.5, 18.0, 4.5, 200, 6),
        Card("a2000", "RTX A2000 12GB", 11.6, 31.9, 8.0, 288, 12),
        Card("a4000", "RTX A4000", 15.6, 76.7, 19.2, 448, 12),
        Card("a4500", "RTX A4500", 19.7, 94.6, 23.7, 640, 12),
        Card("a5000", "RTX A5000", 23.7, 111.1, 27.8, 768, 12),
        Card("a6000", "RTX A6000", 47.4, 154.8, 38.7, 768, 12),
        Card("6000-ada", "RTX 6000 Ada", 47.5, 364.2, 91.1, 960, 12),
        Card("pro-6000", "RTX PRO 6000", 94.9, 503.8, 126.0, 1792, 25),
        Card("a10", "A10", 22.1, 125.0, 31.2, 600, 12),
        Card("a10g", "A10G", 22.0, 70.0, 35.0, 600, 12),
        Card("a30", "A30", 23.6, 165.0, 10.3, 933, 12),
        Card("a40", "A40", 44.5, 149.7, 37.4, 696, 12),
        Card("l4", "L4", 22.0, 121.0, 30.3, 300, 12),
        Card("l40", "L40", 44.4, 181.0, 90.5, 864, 12),
        Card("l40s", "L40S", 44.4, 362.0, 91.6, 864, 12),
        Card("a100-40", "A100", 39.4, 312.0, 19.5, 1555, 300),
        Card("a100-80", "A100", 79.2, 312.0, 19.5, 2039, 300),
        Card("a800", "A800", 79.2, 312.0, 19.5, 2039, 200),
        Card("h20", "H20", 95.1, 148.0, 44.0, 4000, 450),
        Card("h100", "H100", 79.1, 989.0, 67.0, 3350, 450),
        Card("h100-pcie", "H100 PCIe", 79.1, 756.0, 51.0, 2039, 25),
        Card("h100-nvl", "H100 NVL", 93.1, 835.0, 60.0, 3938, 300),
        Card("h200", "H200", 139.8, 989.0, 67.0, 4800, 450),
        Card("h200-nvl", "H200 NVL", 139.8, 835.0, 60.0, 4800, 450),
        Card("gh200", "GH200", 94.5, 989.0, 67.0, 4000, 450),
        Card("b200", "B200", 178.4, 2250.0, 75.0, 8000, 900),
        Card("gb200", "GB200", 184.3, 2500.0, 80.0, 8000, 900),
        Card("b300", "B300", 267.6, 2250.0, 75.0, 8000, 900),
        Card("mi300x", "MI300X", 191.5, 1307.4, 163.4, 5300, 448),
    )
}
"""The cards by name. Sources of those that no data sheet gives per GPU, with the sizes that PyTorch prints for them:

GeForce below the 3090, 4090 and 5090: fp32 and memory rate of NVIDIA's tables of specifications; the 16-bit peak is
twice fp32, the ratio that the whitepapers give for the largest card of each generation. 3080-12: with 12 GB.
4060-ti, 5060-ti: with 16 GB.
p100, v100, 2080-ti, t4: compute capability 6.0, 7.0, 7.5, 7.5. p100: with PCIe, 16 GB; it has no tensor
cores. v100: SXM2.
a10g (22.06 GiB): AWS's variant of the A10; its peaks as third parties quote them.
pro-6000 (94.97 GiB): the Workstation Edition, as third parties quote NVIDIA.
gh200 (94.50 or 94.88 GiB, by the driver): the version with 96 GB.
b300 (267.69 GiB): an eighth of HGX B300, which has 36 PFLOPS with sparsity and 600 TFLOPS of fp32.
gb200 (184.31 GiB): half of a superchip of GB200 NVL72, which has 5 PFLOPS dense and 16 TB/s.
"""


def like(memory: int) -> Card:
    """The card whose speed is assumed where only a memory size (bytes) is given: the slowest of those that are nearest
    to it, within 1 GiB, and have bf16."""
    cards = [card for card in CARDS.values() if card.bf16]
    nearest = min(abs(card.memory - memory) for card in cards)
    near = [card for card in cards if abs(card.memory - memory) <= nearest + GIB]
    return min(near, key=lambda card: card.bf16_tflops)


def card(name: str) -> Card:
    """A card by its name: `4070-ti`, `RTX 4070 Ti`, `4070ti`, `RTX 3060 12GB`, `A100 80GB`.

    Raises:
        UserError: an unknown name; lists the known ones.
    """
    size, key = _SIZE.search(name.strip().lower()), _short(name)
    if key == CPU:
        return processor()
    alike = [each for each in CARDS.values() if key in (_short(each.name), size and _short(each.part))]
    if size is not None:
        alike = [each for each in alike if abs(each.memory_gib / int(size[1]) - 1) < 0.1]
    if alike:
        return alike[0]
    raise UserError(
        f"--gpu {name}: no such card in the table",
        expected="one of " + ", ".join([*CARDS, CPU]),
        fix="or describe it: --gpus N --gpu-memory 24GiB",
    )


def _short(name: str) -> str:
    """The name without its maker, its series, its size and all that separates words."""
    return re.sub(r"nvidia|geforce|quadro|tesla|rtx|[^a-z0-9]", "", _SIZE.sub("", name.strip().lower()))


def processor() -> Card:
    """Describe this machine's CPU: its main memory; nominal speeds."""
    return Card(CPU, CPU, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 0.05, 0.05, 10, 1)


def of_device(device: torch.device) -> Card | None:
    """The card of a device of this process, with its memory; None: not in the table."""
    if device.type == "cpu":
        return processor()
    return of_name(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)


def of_name(name: str, memory: int) -> Card | None:
    """The card of a name as torch gives it, and of so many bytes; None: not in the table, as the cards of laptops,
    which are slower than those of the same name."""
    if re.search(r"\b(Laptop|Max-Q|D)\b", name):  # D: the slower one for China
        return None
    parts = [card.part for card in CARDS.values() if re.search(rf"\b{re.escape(card.part)}\b", name)]
    if not parts:
        return None
    named = [card for card in CARDS.values() if card.part == max(parts, key=len)]
    return replace(min(named, key=lambda card: abs(card.memory - memory)), memory_gib=memory / GIB)


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
