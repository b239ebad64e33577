"""The benchmarks of the paper's table 5, and their examples in local files, in the schemas that the data sets came in.

What is read becomes rows in the schema of lm-eval's own task, so that its prompts and its scoring apply unchanged.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_lora.errors import DataError

Row = dict[str, Any]
LETTERS = "ABCD"
KINDS = {str: "a text", bool: "true or false", list: "a list"}


@dataclass(frozen=True)
class Schema:
    """A data set's own files: what it is called, the fields of each object, and what becomes of them for lm-eval."""

    title: str
    fields: Mapping[str, type]
    adapted: Callable[[Row, str], Row]
    # In the order in which a folder is searched: the split that is measured has its name from the data set's authors.
    files: tuple[str, ...] = ("dev.jsonl", "valid.jsonl", "validation.jsonl", "test.jsonl")


def read_examples(task: str, path: Path) -> list[Row]:
    """The examples of `task` in a file, or in a folder that holds the data set's own, as lm-eval's task reads them.

    Raises:
        DataError: there is none, or one of another schema; file, line and field are named.
    """
    schema = SCHEMAS[task]
    if task.startswith("race"):
        rows = [row for file in _race_files(path) for row in _race_articles(schema, file)]
        rows = articles(rows)
    else:
        file = _file_in(schema, path)
        rows = [schema.adapted(row, where) for where, row in _objects(file, schema)]
        if task == "piqa":
            rows = _with_labels(rows, file)
    if not rows:
        raise DataError(f"{path}: holds no examples; name a file of {schema.title} that does")
    return rows


def articles(questions: Iterable[Mapping[str, Any]]) -> list[Row]:
    """RACE's questions as lm-eval wants them: an example an article, which asks its last question after the others.

    >>> rows = [{"article": "A", "question": q, "options": list("wxyz"), "answer": "B"} for q in ("1?", "2?")]
    >>> [(row["article"], row["problems"].count("question")) for row in articles(rows)]
    [('A', 2)]
    """
    problems: dict[str, list[Row]] = {}
    for row in questions:
        problem = {key: row[key] for key in ("question", "answer", "options")}
        problems.setdefault(row["article"], []).append(problem)
    # lm-eval's data set keeps the problems of an article as the text of a Python literal.
    return [{"article": article, "problems": repr(asked)} for article, asked in problems.items()]


def _file_in(schema: Schema, path: Path) -> Path:
    if path.is_file():
        return path
    found = [path / name for name in schema.files if (path / name).is_file()]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder; name one that holds {schema.title}")
    if not found:
        raise DataError(f"{path}: holds none of {', '.join(schema.files)}; name the file of {schema.title} itself")
    return found[0]


def _objects(file: Path, schema: Schema) -> Iterator[tuple[str, Row]]:
    """Each line's place and object, with the fields of `schema`."""
    for where, row in _json_values(file):
        yield where, _checked(row, schema.fields, where, schema)


def _json_values(file: Path) -> Iterator[tuple[str, Any]]:
    """Each line's place and value; a `.txt` is one value."""
    text = _text(file)
    pieces = [(str(file), text)] if file.suffix == ".txt" else []
    # Not splitlines(): JSON strings may hold U+2028 and its like as they are.
    pieces = pieces or [(f"{file}:{number}", line) for number, line in enumerate(text.split("\n"), 1)]
    for where, piece in pieces:
        if piece.strip():
            try:
                yield where, json.loads(piece)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: is broken JSON ({error.msg}); mend it, or fetch the file again") from None


def _checked(row: Any, fields: Mapping[str, type], where: str, schema: Schema) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: is no JSON object; {schema.title} has objects with {', '.join(fields)}")
    for name, kind in fields.items():
        if name not in row:
            raise DataError(f"{where}: has no field {name}; {schema.title} has {', '.join(fields)}")
        if not isinstance(row[name], kind):
            found = json.dumps(row[name])[:40]
            raise DataError(f"{where}: {name} is {found}; {schema.title} has {KINDS[kind]} there")
    return row


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{file}: is not UTF-8 text; convert it, or name another file") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); check its name and permissions") from None


def _boolq(row: Row, where: str) -> Row:
    return {"passage": row["passage"], "question": row["question"], "label": int(row["answer"])}


def _piqa(row: Row, where: str) -> Row:
    return {key: row[key] for key in ("goal", "sol1", "sol2")}


def _winogrande(row: Row, where: str) -> Row:
    if "_" not in row["sentence"]:
        raise DataError(f"{where}: sentence has no _ where an option would stand; WinoGrande has one in each")
    if row["answer"] not in ("1", "2"):
        raise DataError(f'{where}: answer is {json.dumps(row["answer"])}; WinoGrande has "1" or "2" there')
    return {key: row[key] for key in ("sentence", "option1", "option2", "answer")}


def _race(row: Row, where: str) -> Row:
    if len(row["options"]) != len(LETTERS) or not all(isinstance(option, str) for option in row["options"]):
        raise DataError(f"{where}: options are {json.dumps(row['options'])[:40]}; RACE has four texts there")
    if row["answer"] not in tuple(LETTERS):
        raise DataError(f"{where}: answer is {json.dumps(row['answer'])}; RACE has A, B, C or D there")
    return {key: row[key] for key in ("article", "question", "options", "answer")}


QUESTION: Mapping[str, type] = {"article": str, "question": str, "options": list, "answer": str}
ARTICLE: Mapping[str, type] = {"article": str, "questions": list, "options": list, "answers": list}
SCHEMAS = {
    "boolq": Schema("BoolQ", {"question": str, "passage": str, "answer": bool}, _boolq),
    "piqa": Schema("PIQA", {"goal": str, "sol1": str, "sol2": str}, _piqa),
    "race_middle": Schema("RACE-M", QUESTION, _race),
    "race_high": Schema("RACE-H", QUESTION, _race),
    "winogrande": Schema("WinoGrande", {"sentence": str, "option1": str, "option2": str, "answer": str}, _winogrande),
}


def _with_labels(rows: list[Row], file: Path) -> list[Row]:
    """PIQA keeps its answers apart: `valid.jsonl` has them in `valid-labels.lst`, a line each."""
    labels = file.with_name(f"{file.stem}-labels.lst")
    if not labels.is_file():
        raise DataError(f"{labels}: no such file; PIQA has its answers there, beside {file.name}")
    found = _text(labels).split()
    for number, label in enumerate(found, 1):
        if label not in ("0", "1"):
            raise DataError(f"{labels}:{number}: is {label[:40]}; PIQA has 0 or 1 there")
    if len(found) != len(rows):
        raise DataError(f"{labels}: has {len(found)} labels for {len(rows)} lines of {file.name}; fetch both again")
    return [{**row, "label": int(label)} for row, label in zip(rows, found, strict=True)]


def _race_files(path: Path) -> list[Path]:
    """A file of rows, or the data set's own folder: an article a `.txt`."""
    if path.is_dir() and (found := sorted(path.glob("*.txt"))):
        return found
    return [_file_in(SCHEMAS["race_high"], path)]


def _race_articles(schema: Schema, file: Path) -> Iterator[Row]:
    """Questions, each with its article; a row may hold one question, or an article with all of its own."""
    for where, row in _json_values(file):
        if not isinstance(row, dict) or "questions" not in row:
            yield schema.adapted(_checked(row, schema.fields, where, schema), where)
            continue
        _checked(row, ARTICLE, where, schema)
        asked = {"question": row["questions"], "options": row["options"], "answer": row["answers"]}
        if len({len(values) for values in asked.values()}) != 1:
            raise DataError(f"{where}: has not as many options and answers as questions; fetch the file again")
        for values in zip(*asked.values(), strict=True):
            question = {"article": row["article"], **dict(zip(asked, values, strict=True))}
            yield schema.adapted(_checked(question, schema.fields, where, schema), where)
