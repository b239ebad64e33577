"""The stand-in for `sys.executable` behaves as it does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

INTERPRETERS = ["real", "imported"]


@pytest.fixture(params=INTERPRETERS)
def interpreter(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("python")) if request.param == "imported" else sys.executable


@pytest.mark.parametrize(
    ("code", "status", "said", "errors"),
    [
        (
            "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['WORD'], input())",
            0,
            "['a b'] {} word text",
            "",
        ),
        ("import sys; sys.exit('bad')", 1, "", "bad"),
        ("raise ValueError('bad')", 1, "", "ValueError: bad"),
        ("import atexit; atexit.register(print, 'end')", 0, "end", ""),
    ],
)
def test_it_runs_code(interpreter: str, tmp_path: Path, code: str, status: int, said: str, errors: str) -> None:
    environment = {**os.environ, "WORD": "word"}
    command = [interpreter, "-c", code, "a b"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, input="text\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (status, said.format(tmp_path))
    assert done.stderr.strip().endswith(errors)
    assert bool(done.stderr) == bool(errors)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(interpreter: str, number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    command = [interpreter, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(timeout=20) == -number
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/cwd").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
