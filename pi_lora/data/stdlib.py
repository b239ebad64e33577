"""`builtin:stdlib`: the sources of Python's standard library, a real corpus that is present wherever Python is."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests and vendored packages are not in every installation; code page tables and the compiled help are hardly text.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
HELD_OUT_SHARE = 0.1
SPLITS = ("train", "held-out")


def is_held_out(relative_path: str) -> bool:
    """Whether a file belongs to the held-out split; decided by its name alone, so the same under every Python."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


def stdlib_documents(split: str) -> Iterator[tuple[str, str]]:
    """Yield `(name, text)` of every standard-library file in `split`, in a fixed order.

    Raises:
        ValueError: `split` is not one of `SPLITS`.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) and is_held_out(name) == (split == "held-out"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield name, text
