"""The pretended card itself: what it says of itself, counts, refuses and notes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import cards
from tests.cuda.building import ROOT

pytestmark = pytest.mark.cuda

ALL = {
    "3060": (8, 6),
    "3090": (8, 6),
    "4090": (8, 9),
    "5090": (12, 0),
    "T4": (7, 5),
    "A40": (8, 6),
    "A100": (8, 0),
    "H100": (9, 0),
    "B200": (10, 0),
}

USE = """
import json, torch
from sana_pipe.base.gpus import of_device
from tests.cuda import cards
free, total = torch.cuda.mem_get_info()
cards.mark("transfers")
x = torch.ones(1 << 20, device="cuda")
x.copy_(torch.ones(1 << 20).pin_memory(), non_blocking=True)
cards.mark("a wait")
x.sum().item()
cards.mark("pageable")
x.copy_(torch.ones(1 << 20))
cards.mark("too much")
try:
    torch.empty(free, dtype=torch.uint8, device="cuda")
    torch.empty(free, dtype=torch.uint8, device="cuda")
    full = False
except torch.OutOfMemoryError:
    full = True
gpu = of_device(torch.device("cuda", 0))
print(json.dumps({"known": gpu.name, "total": total, "free": free, "full": full}))
"""


def test_a_card_has_its_size_and_its_log_tells_waits_copies_and_contexts() -> None:
    done = cards.python("-c", USE, card="4090", cards=2, more={"FAKE_OTHER_MIB": "900"}).succeed()
    said = json.loads(done.output.splitlines()[-1])
    assert "4090" in said["known"]
    assert said["full"], "more memory than the card has"
    assert said["total"] - said["free"] >= 900 << 20, "memory of others counts"
    transfers, waiting, pageable, _ = done.log.parts()
    assert not transfers.waits() and not transfers.pageable()
    assert waiting.waits()
    assert pageable.pageable()
    assert done.log.contexts() == {(0, 0)}


@pytest.mark.parametrize("name", ALL)
def test_each_card_has_the_capability_of_the_real_one(name: str) -> None:
    code = "import torch; print(torch.cuda.get_device_name(), *torch.cuda.get_device_capability(), sep='|')"
    *_, said = cards.python("-c", code, card=name).succeed().output.splitlines()
    title, major, minor = said.split("|")
    assert name in title and (int(major), int(minor)) == ALL[name]


GROUP = """
import os, sys, torch
import torch.distributed as dist
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
x = torch.ones(8, device=device)
calls = [dist.all_reduce, lambda x: dist.broadcast(x, 0)]
for call in calls if dist.get_rank() == 0 or sys.argv[1] == "same" else reversed(calls):
    call(x)
"""


@pytest.mark.parametrize("order", ["same", "other"])
def test_the_log_has_the_collectives_of_each_process(order: str, tmp_path: Path) -> None:
    (tmp_path / "group.py").write_text(GROUP)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = cards.python(*launch, tmp_path / "group.py", order, cards=2).succeed()
    (ops,) = done.log.operations().values()
    assert set(ops) == {0, 1}
    assert (ops[0] == ops[1]) == (order == "same")
    assert not done.log.hangs()


def test_what_hinders_the_set_up_is_said(tmp_path: Path) -> None:
    def refusal(**environ: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tests.cuda"], cwd=ROOT, env=os.environ | environ, capture_output=True, text=True
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr
        return done.stderr

    assert "gcc" in refusal(PATH=str(tmp_path))
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    assert "torch" in refusal(SANA_PIPE_CUDA=str(tmp_path), **nowhere)
