"""`pi-lora`, which is `python -m pi_lora`: Ctrl-C is answered in one line from the first moment on."""

import gc
import os
import signal
import sys
import types

# What libraries read when they are imported: no progress bars and notes in a file or pipe.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
}
INTERRUPTED = b"interrupted; nothing was written\n"


def leave_at_once(number: int, frame: types.FrameType | None) -> None:
    """End while libraries are imported, where a KeyboardInterrupt would come out as any error, or not at all."""
    # On a terminal a spinner may be turning: erase its line and show the cursor again.
    os.write(2, (b"\r\x1b[K\x1b[?25h" if os.isatty(2) else b"") + INTERRUPTED)
    os._exit(130)


def open_closed_streams() -> None:
    """Start again with the null device in place of streams that the caller closed (`>&-`): the next file would get the
    descriptor otherwise, and all that is printed.
    """
    were_closed = False
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)  # noqa: FBT003
        were_closed = True
    os.close(descriptor)
    if were_closed:
        os.execv(sys.executable, sys.orig_argv)


def main() -> None:
    """Run the command line."""
    open_closed_streams()
    if sys.flags.optimize > 1:
        os.write(2, b"python -OO, PYTHONOPTIMIZE=2: transformers needs docstrings; run Python without it\n")
        sys.exit(2)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)
    if not os.isatty(2):
        os.environ.update(QUIET)
    gc.disable()  # until libraries are loaded: see pi_lora.terminal.working
    try:
        from pi_lora.cli import main

        main()
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        os._exit(130)


if __name__ == "__main__":
    main()
