"""Damage by number: the same seed gives the same damage, in any process and at any time.

hypothesis takes 5 to 15 ms for a tree of values; this takes 0.05, so that a million cases are minutes.
"""

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

# What others have written where something else belongs.
ODD_TEXT = (
    *("", ".", "/", "..", "~x", "a/b", "\\", "%s{}", "-1", "1e400", "nan", "null", "x" * 5000, "../" * 40),
    *("[red]x", "[/]", "<b>", "\x1b[2J", "\r\n", "\u2028", "\x85", "\u202e", "\0", "\ud800", "\ufeff", "e\u0301"),
    *("(a+)+b", ".*.*.*.*.*x", "[", "(?P<", "builtin:tiny", "builtin:", "file:///etc/passwd", "http://x/y", "a" * 97),
)
ODD_NUMBERS = (
    *(0, -1, 1, 2, 3, 7, 64, 1024, 2**31, 2**31 - 1, 2**63, 2**64, 10**12, 10**30, 10**400, -(10**400)),
    *(0.0, -0.5, 0.5, 0.999, 1e-300, 1e300, 5e-324, float("nan"), float("inf"), -float("inf")),
)
ODD = (None, True, False, *ODD_TEXT, *ODD_NUMBERS)
CHARACTERS = "abcXYZ019_-./: \t\n\"'{}[]&*!<>?|#%@,=~`$\\\0\x07\x7f\x85\xe9\u2028\u4e2d\U0001f98b\ud800"
BYTES = (b"\0", b"\xff\xfe", b"\n", b'"', b"{", b"]", b"\\ud800", b"1e999", b"-", b"9" * 5000, b"[" * 5000, b"NaN")


def text(case: random.Random, longest: int = 8) -> str:
    """A short text of characters that mean something to someone."""
    return "".join(case.choices(CHARACTERS, k=case.randrange(longest + 1)))


def value(case: random.Random, depth: int = 3) -> Any:
    """Anything that JSON holds."""
    kind = case.random()
    if kind < 0.7 or not depth:
        return case.choice(ODD)
    if kind < 0.76:
        return text(case)
    if kind < 0.82:
        return case.choice((case.randrange(-9, 200), case.uniform(-2, 2), case.getrandbits(40)))
    inner = [value(case, depth - 1) for _ in range(case.randrange(4))]
    return inner if kind < 0.91 else {case.choice((text(case), case.choice(ODD_TEXT))): each for each in inner}


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for key, each in inner for place in places(each, (*at, key)))]


def damaged(case: random.Random, trees: Sequence[Any], values: Sequence[Any] = ()) -> Any:
    """One of some valid trees in which one to three values are others, gone, or beside new ones; half of the others are
    of `values`, if there are any.
    """
    tree = [deepcopy(case.choice(trees))]
    for _ in range(case.choice((1, 1, 2, 3))):
        *path, last = case.choice(places(tree)[1:])
        inner: Any = tree
        for key in path:
            inner = inner[key]
        how = case.random()
        new = deepcopy(case.choice(values)) if values and case.random() < 0.5 else value(case)
        if how < 0.2 and path:
            del inner[last]
        elif how < 0.35 and isinstance(inner, dict):
            inner[case.choice((text(case), *inner))] = new
        else:
            inner[last] = new
    return tree[0]


def damaged_bytes(case: random.Random, content: bytes) -> bytes:
    """A file in which bits are flipped, or that is cut off, has holes, or something else in its midst."""
    for _ in range(case.choice((1, 1, 2, 5))):
        at = case.randrange(len(content) + 1)
        how = case.randrange(5)
        if how == 0 and at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << case.randrange(8)]) + content[at + 1 :]
        elif how == 1:
            content = content[:at]
        elif how == 2:
            content = content[:at] + bytes(case.randrange(1, 64)) + content[at + 64 :]
        elif how == 3:
            content = content[:at] + case.choice(BYTES) + content[at:]
        else:
            content = content[:at] + content[at + case.randrange(1, 64) :]
    return content


def as_json(case: random.Random, tree: Any) -> bytes:
    """A tree as a file of JSON, one in five times with damage of its bytes."""
    written = json.dumps(tree).encode()
    return damaged_bytes(case, written) if case.random() < 0.2 else written
