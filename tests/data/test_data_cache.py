import itertools
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from datasets import Features

from pi_lora.data.cache import ABOUT, INTEGERS, ROWS_AT_ONCE, Row, cached, read_rows, write_rows
from pi_lora.errors import DataError
from pi_lora.recipe.places import cache_folder

COLUMNS = Features({"input_ids": INTEGERS, "position_ids": INTEGERS})
NUMBER = 2 * ROWS_AT_ONCE + 1
OTHER_COLUMNS = Features({"input_ids": INTEGERS})
MAKER = """
import sys, time
from pathlib import Path
from datasets import Features
from pi_lora.data.cache import INTEGERS, cached

def rows():
    Path(sys.argv[1], "making").touch()
    while not Path(sys.argv[1], "waited").exists():
        time.sleep(0.01)
    yield from ({"input_ids": [index] * 4} for index in range(10))

found, _ = cached({"of": "all"}, Features({"input_ids": INTEGERS}), rows)
print(found["input_ids"][9].tolist())
"""


def rows() -> Iterator[Row]:
    return ({"input_ids": [index, 65535, 0, index], "position_ids": [0, 1, 2, 2**31 - 1]} for index in range(NUMBER))


def never() -> Iterator[Row]:
    pytest.fail("made again")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_sequences_are_made_once_and_read_back(folder: Path) -> None:
    made, _ = cached({"of": "this"}, COLUMNS, rows)
    again, _ = cached({"of": "this"}, COLUMNS, never)
    for found in (made, again):
        assert found.features == COLUMNS
        assert [row["input_ids"].tolist() for row in found] == [[index, 65535, 0, index] for index in range(NUMBER)]
        assert found[3]["position_ids"].tolist() == [0, 1, 2, 2**31 - 1]
        assert found[3]["position_ids"].dtype == np.int64
    [entry] = (path for path in (folder / "sequences").iterdir() if path.is_dir())
    assert json.loads((entry / ABOUT).read_text())["made_from"] == {"of": "this"}


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda shard: shard.unlink(),
    "empty": lambda shard: shard.write_bytes(b""),
    "cut in the data": lambda shard: shard.write_bytes(shard.read_bytes()[:-100]),
    "cut after the schema": lambda shard: shard.write_bytes(shard.read_bytes()[:400]),
    "overwritten": lambda shard: shard.write_bytes(b"x" * shard.stat().st_size),
    "without its folder": lambda shard: shutil.rmtree(shard.parent),
    "short of a row": lambda shard: write_rows(shard, COLUMNS, itertools.islice(rows(), NUMBER - 1)),
    "of other columns": lambda shard: write_rows(shard, OTHER_COLUMNS, rows()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_again(folder: Path, damage: str) -> None:
    cached({"of": "this"}, COLUMNS, rows)
    [shard] = folder.rglob("*.arrow")
    DAMAGE[damage](shard)
    assert read_rows(shard.parent, COLUMNS) is None
    found, _ = cached({"of": "this"}, COLUMNS, rows)
    assert found["input_ids"][9].tolist() == [9, 65535, 0, 9]
    cached({"of": "this"}, COLUMNS, never)


def test_what_breaks_off_leaves_nothing(folder: Path) -> None:
    def breaking() -> Iterator[Row]:
        yield from list(rows())[:5]
        raise DataError("books: hold too little")

    with pytest.raises(DataError, match="too little"):
        cached({"of": "this"}, COLUMNS, breaking)
    assert not [path for path in (folder / "sequences").iterdir() if path.is_dir()]
    assert len(cached({"of": "this"}, COLUMNS, rows)[0]) == NUMBER


def test_what_a_killed_process_left_is_no_hindrance(folder: Path) -> None:
    cached({"of": "this"}, COLUMNS, rows)
    [entry] = (path for path in (folder / "sequences").iterdir() if path.is_dir())
    entry.rename(entry.with_suffix(".partial"))
    assert len(cached({"of": "this"}, COLUMNS, rows)[0]) == NUMBER
    assert not list(folder.rglob("*.partial"))


def test_processes_at_once_make_it_once(python: str, folder: Path, tmp_path: Path) -> None:
    maker = subprocess.Popen([python, "-c", MAKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "making").exists():
        assert maker.poll() is None
        time.sleep(0.01)
    # The other process goes on when this one has begun to wait.
    threading.Timer(0.2, (tmp_path / "waited").touch).start()
    found, _ = cached({"of": "all"}, OTHER_COLUMNS, never)
    assert found["input_ids"][9].tolist() == [9, 9, 9, 9]
    assert maker.communicate(timeout=120)[0] == "[9, 9, 9, 9]\n"
    assert maker.returncode == 0


def test_a_complete_cache_may_be_read_only(folder: Path) -> None:
    """Shared or mounted; a folder in place of the lock stands for what cannot be written, also by root."""
    cached({"of": "this"}, COLUMNS, rows)
    [lock] = (folder / "sequences").glob("*.lock")
    lock.unlink()
    lock.mkdir()
    assert len(cached({"of": "this"}, COLUMNS, never)[0]) == NUMBER


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PI_LORA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "pi-lora"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "pi-lora"
    monkeypatch.setenv("PI_LORA_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"
