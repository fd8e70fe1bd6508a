"""What an error must name, whatever the words around it."""

from __future__ import annotations

import re


def naming(*words: object) -> str:
    """A pattern for `pytest.raises(match=)`: the message contains each of these words, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(str(word))})" for word in words)
