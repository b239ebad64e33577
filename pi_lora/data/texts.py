"""One document of a user's: a text file, a PDF, or what comes from standard input."""

import importlib.util
import sys
from pathlib import Path

from pi_lora.errors import DataError, PiLoraError

STDIN = "-"
PDF = ".pdf"


def read_document(name: str) -> str:
    """The text of a file, or with `-` of standard input.

    Raises:
        DataError: it is not there, holds no text, or is neither UTF-8 nor a PDF.
        PiLoraError: it is a PDF, and pypdf is not installed.
    """
    if name == STDIN:
        text = _decoded(sys.stdin.buffer.read(), "standard input")
    elif name.lower().endswith(PDF):
        text = _pdf(Path(name).expanduser())
    else:
        text = _decoded(_bytes(Path(name).expanduser()), name)
    if not text.strip():
        more = "; scanned pages hold pictures, recognize their text first" if name.lower().endswith(PDF) else ""
        raise DataError(f"{name}: holds no text{more}")
    return text


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); name a .txt, .md or .pdf file, or - ") from None


def _decoded(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{name}: is not UTF-8 text; convert it, or name a .pdf") from None
    if "\0" in text:
        raise DataError(f"{name}: is a binary file; name a .txt, .md or .pdf file")
    return text


def _pdf(file: Path) -> str:
    """The text of all pages, a blank line between them."""
    if importlib.util.find_spec("pypdf") is None:
        raise PiLoraError(f"{file}: PDF needs the package pypdf; pip install 'pi-lora[pdf]'")
    import pypdf
    from pypdf.errors import PyPdfError

    _bytes(file)
    try:
        return "\n\n".join(page.extract_text() for page in pypdf.PdfReader(file).pages)
    except (PyPdfError, ValueError, KeyError, TypeError) as error:  # what damaged files raise
        raise DataError(f"{file}: is no whole PDF ({error}); fetch it again, or give its text") from None
