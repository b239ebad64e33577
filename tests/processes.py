"""A Python that starts at once: real processes, forked from a server that has imported the heavy libraries.

`ImportedPython.executable` stands for `sys.executable` in a command line: a client of a few milliseconds, which has the
server fork a process with its arguments, folder, environment and pipes, passes on signals, and ends as that process
ends. A client that is killed takes its process with it. Only what an import prints or costs cannot be tested so.

The imports take 7 seconds of a core of an AMD EPYC, which `make test-all` would otherwise spend in every process that
it starts; `make test` starts none.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

# What a command that goes on for a while prints where stderr is no terminal.
PROGRESS = re.compile(
    r"^(.+: [\d,]+ of [\d,]+, \d.* left(, .*)?|preparing .+: [\d,]+|[\w ./:-]+ \.\.\.)\n", re.MULTILINE
)
# Passed on by the client; SIGKILL shows as a connection that breaks.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# What pi-lora sets for the processes that it launches, before libraries are imported.
SET_BY_PI_LORA = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
}
HEAVY = (
    "pi_lora.training.job pi_lora.preflight pi_lora.merging.merging pi_lora.planning.advice "
    "pi_lora.evaluation.suite "
    "accelerate.commands.launch torch.distributed.run transformers.models.llama.modeling_llama "
    "peft.tuners.lora torch._dynamo torch.distributed.fsdp"
).split()


def without_progress(errors: str) -> str:
    """Return what a command printed on stderr but its lines of progress, which depend on how fast it goes."""
    return PROGRESS.sub("", errors)


class ImportedPython:
    """The server, which ends with the `with`; `errors` holds what its imports had to say."""

    def __init__(self, folder: Path, path: list[str]) -> None:
        address, script, self.errors = str(folder / "socket"), folder / "python", folder / "errors"
        load = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import processes"
        self.settings = settings_of_imports(os.environ)
        call = f"processes.client({address!r}, {self.settings!r})"
        script.write_text(f"#!{sys.executable} -IS\n{load}; {call}\n")
        script.chmod(0o755)
        self.executable = str(script)
        # Arrow's allocator starts a thread otherwise, and a process of several threads is not safe to fork.
        environment = {
            **os.environ,
            **SET_BY_PI_LORA,
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
            "OMP_NUM_THREADS": "1",
        }
        with self.errors.open("wb") as errors:
            self.server = subprocess.Popen(
                [sys.executable, "-c", f"{load}; processes.serve({address!r}, {path!r})"],
                env=environment,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def __enter__(self) -> "ImportedPython":
        assert self.server.stdout
        assert self.server.stdout.readline() == b"ready\n", self.errors.read_text()
        return self

    def __exit__(self, *_: object) -> None:
        """End the server by the end of its standard input."""
        self.server.communicate()


def client(path: str, imported: dict[str, str]) -> NoReturn:
    """Be the process that the server forks, as far as the process that started this one can tell."""
    if settings_of_imports(os.environ) != imported:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    child, early = 0, []

    def pass_on(number: int, frame: types.FrameType | None) -> None:
        if child:
            send(child, number)
        else:
            early.append(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(request)
    answers = connection.makefile("rb")
    child = int(answers.readline())
    for early_number in early:
        send(child, early_number)
    status = int(answers.readline())
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def settings_of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """What libraries read when they are imported: where it differs, a process has to import them itself."""
    read = {**environment, **SET_BY_PI_LORA}
    return {key: value for key, value in read.items() if key.startswith(("HF_", "TRANSFORMERS_", "PYTHONW"))}


def serve(path: str, search: list[str]) -> None:
    """Import the heavy libraries, then fork a process for each client until standard input ends."""
    sys.path[:] = search
    gc.disable()
    for name in HEAVY:
        importlib.import_module(name)
    # What is imported is never garbage: no collection has to walk it, nor copy its pages in every process.
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a library has started a thread: forking is not safe"
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    clients: dict[socket.socket, int] = {}
    print("ready", flush=True)
    while True:
        waiting: list[int | socket.socket] = [0, woken, listener, *clients]
        ready, _, _ = select.select(waiting, [], [])
        if 0 in ready:
            for child in clients.values():
                send(child, signal.SIGKILL)
            os._exit(0)
        for connection, child in clients.items():
            # A client that was killed; what it stands for goes with it.
            if connection in ready:
                send(child, signal.SIGKILL)
        if woken in ready:
            os.read(woken, 4096)
        for connection, child in list(clients.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                del clients[connection]
                with contextlib.suppress(BrokenPipeError), connection:
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        if listener in ready:
            connection, _ = listener.accept()
            size, files, _, _ = socket.recv_fds(connection, 8, 3)
            with connection.makefile("rb") as reader:
                arguments, directory, environment = json.loads(reader.read(int.from_bytes(size, "big")))
            # An exception out of a signal's handler would be lost in what libraries do after a fork.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            if child := os.fork():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                for file in files:
                    os.close(file)
                clients[connection] = child
                connection.sendall(b"%d\n" % child)
            else:
                for each in (listener, connection, *clients):
                    each.close()
                os.close(woken)
                os.close(wake)
                end(status_of(arguments, directory, environment, files))


def become(arguments: list[str], folder: str, environment: dict[str, str], files: list[int]) -> None:
    """In the forked process: do what a new interpreter does with `arguments`."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    if arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    kind = arguments[0]
    sys.argv = arguments[1:] if kind == "-m" else arguments
    sys.path.insert(0, str(Path(kind).parent) if kind not in ("-m", "-c") else folder)
    if kind == "-m":
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], vars(sys.modules["__main__"]))
    else:
        runpy.run_path(kind, run_name="__main__")


def status_of(arguments: list[str], folder: str, environment: dict[str, str], files: list[int]) -> int:
    """Become `arguments` and return the status as an interpreter decides it: negative for the signal that ends it."""
    try:
        become(arguments, folder, environment, files)
    except SystemExit as said:
        if said.code is None or isinstance(said.code, int):
            return said.code or 0
        print(said.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(status: int) -> NoReturn:
    """End this process as an interpreter ends, but do not take apart what was imported, which takes half a second."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    gc.collect()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)
