"""`python -m tests.cuda [--card NAME] [ARGUMENTS OF PYTHON]`: set up the pretended card, and run Python on it.

Without arguments it only sets up. `FAKE_OTHER_MIB=900 python -m tests.cuda --card 4090 -m benchmarks.gpu --rows lora`.
"""

from __future__ import annotations

import os
import sys

from tests.cuda.building import CannotSetUp, set_up

if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["--card"]:
        os.environ["FAKE_GPU"], words = words[1], words[2:]
    try:
        made = set_up()
    except CannotSetUp as error:
        print(f"The pretended card cannot be set up: {error}", file=sys.stderr)
        sys.exit(2)
    if words:
        os.environ |= made.environ()
        os.execv(sys.executable, [sys.executable, *words])
    print(f"The pretended card is set up: {made.libraries}")
