"""`pi-lora check-server`."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pi_lora.cli.app import EXTEND, LIBRARIES, app, out, progress_bar, working
from pi_lora.cli.options import GROUP, JsonFile, Loading
from pi_lora.errors import PiLoraError
from pi_lora.writing import check_can_write, read_json, write_json


@app.command(name="check-server", group=EXTEND, sort_key=5)
def check_server(
    url: Annotated[str | None, Parameter(name="URL", help="The server, as http://localhost:8000.")] = None,
    model: Annotated[str | None, Parameter(name="MODEL", help="Hub id, folder, run or builtin:tiny.")] = None,
    /,
    *,
    text: Annotated[Path | None, Parameter(help="A text longer than the window; made-up sentences by default.")] = None,
    reference: Annotated[Path | None, Parameter(help="The answers of a model, instead of MODEL.")] = None,
    write_reference: Annotated[str | None, Parameter(help="Compute the answers of this model to --reference.")] = None,
    served: Annotated[str | None, Parameter(help="The server's name of the model, if it has several.")] = None,
    tolerance: Annotated[float, Parameter(help="Mean difference of log probabilities, in nats.")] = 0.1,
    json: JsonFile = None,
    loading: Annotated[Loading, GROUP] = Loading(),
) -> None:
    """Check whether a running server computes a model beyond its original window; exit with 1 if it does not."""
    if not (write_reference and reference and not url) and not (url and (model is None) != (reference is None)):
        raise PiLoraError(
            "check-server: takes URL MODEL, URL --reference FILE, or --write-reference MODEL --reference FILE"
        )
    check_can_write(json, reference if write_reference else None)
    with working(LIBRARIES):
        from pi_lora.serving.check import check_server, verdicts_table
        from pi_lora.serving.reference import Reader, Reference
        from pi_lora.serving.reference import write_reference as write_reference_file
        from pi_lora.serving.server import Server
    words = text.read_text(encoding="utf-8") if text else ""
    with progress_bar("checking") as progress:
        if reference and write_reference:
            write_reference_file(Reader(loading.find(write_reference)[0], words, loading.dtype, progress), reference)
            out.lines(f"{reference}: written; pi-lora check-server URL --reference {reference} needs no weights")
            return
        server = Server(url or "", served)
        if reference:
            known = read_json(reference, Reference, "write it again with --write-reference")
            verdicts = check_server(
                server, known, lambda prompt, reading: prompt.answers.get(reading), tolerance, progress
            )
        else:
            reader = Reader(loading.find(model or "")[0], words, loading.dtype, progress)
            known = reader.reference
            verdicts = check_server(server, known, reader.answer, tolerance, progress)
    right = all(verdict.verdict == "right" for verdict in verdicts)
    out.print(verdicts_table(f"{server.url}: {known.model}", verdicts))
    if json:
        rows = [verdict.model_dump() for verdict in verdicts]
        write_json(json, {"url": server.url, "model": known.model, "right": right, "prompts": rows})
    sys.exit(not right)
