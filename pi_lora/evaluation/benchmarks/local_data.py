"""Local files of the paper's five benchmarks (table 5), in the formats of their authors, as rows for lm-eval."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pi_lora.errors import DataError

Row = dict[str, Any]
TITLES = {"boolq": "BoolQ", "piqa": "PIQA", "race_middle": "RACE-M", "race_high": "RACE-H", "winogrande": "WinoGrande"}
# In the order in which a folder is searched: the split that is measured has its name from the data set's authors.
FILES = ("dev.jsonl", "valid.jsonl", "validation.jsonl", "test.jsonl")


class _Example(BaseModel):
    """A JSON object in a data set's own format."""

    model_config = ConfigDict(strict=True)

    def rows(self) -> list[Row]:
        """Return it as lm-eval's task reads it."""
        return [self.model_dump()]


class _BoolQ(_Example):
    question: str
    passage: str
    answer: bool

    def rows(self) -> list[Row]:
        return [{"passage": self.passage, "question": self.question, "label": int(self.answer)}]


class _Piqa(_Example):
    goal: str
    sol1: str
    sol2: str


class _WinoGrande(_Example):
    sentence: str = Field(pattern="_")
    option1: str
    option2: str
    answer: Literal["1", "2"]


class _Race(_Example):
    """An article with all of its questions, or with one: `question`, `options` and `answer`."""

    article: str
    questions: list[str]
    options: list[Annotated[list[str], Field(min_length=4, max_length=4)]]
    answers: list[Literal["A", "B", "C", "D"]]

    @model_validator(mode="before")
    @classmethod
    def _one_question(cls, row: Any) -> Any:
        if not isinstance(row, dict) or "question" not in row:
            return row
        plural = {"question": "questions", "options": "options", "answer": "answers"}
        return {"article": row.get("article")} | {plural[key]: [row[key]] for key in plural if key in row}

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if not len(self.questions) == len(self.options) == len(self.answers):
            raise ValueError("has not as many options and answers as questions")
        return self

    def rows(self) -> list[Row]:
        asked = zip(self.questions, self.options, self.answers, strict=True)
        return [{"article": self.article, "question": q, "options": o, "answer": a} for q, o, a in asked]


FORMATS: dict[str, type[_Example]] = {
    "boolq": _BoolQ,
    "piqa": _Piqa,
    "race_middle": _Race,
    "race_high": _Race,
    "winogrande": _WinoGrande,
}


def read_examples(task: str, path: Path) -> list[Row]:
    """Return the examples of one of the five in a file, or in a folder with the data set's own, for lm-eval's task.

    Raises:
        DataError: there are none, or one has another format; file, line and field are named.
    """
    files = sorted(path.glob("*.txt")) if FORMATS[task] is _Race and path.is_dir() else []
    files = files or [_file_in(path, TITLES[task])]
    rows = [row for file in files for row in _rows(task, file)]
    if not rows:
        raise DataError(f"{path}: holds no examples; name a file of {TITLES[task]} that does")
    if task == "piqa":
        return _with_labels(rows, files[0])
    return articles(rows) if FORMATS[task] is _Race else rows


def articles(questions: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Put RACE's questions together as lm-eval's task reads them: a row per article, problems as a Python literal.

    >>> rows = [{"article": "A", "question": q, "options": list("wxyz"), "answer": "B"} for q in ("1?", "2?")]
    >>> [(row["article"], row["problems"].count("question")) for row in articles(rows)]
    [('A', 2)]
    """
    problems: dict[str, list[Row]] = {}
    for row in questions:
        problems.setdefault(row["article"], []).append({key: row[key] for key in ("question", "answer", "options")})
    return [{"article": article, "problems": repr(asked)} for article, asked in problems.items()]


def _file_in(path: Path, title: str) -> Path:
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; name one that holds {title}")
    files = [path] if path.is_file() else [path / name for name in FILES if (path / name).is_file()]
    if not files:
        raise DataError(f"{path}: holds none of {', '.join(FILES)}; name the file of {title} itself")
    return files[0]


def _rows(task: str, file: Path) -> Iterator[Row]:
    """The rows of each object: a `.txt` is one, of other files each line is one."""
    # Not splitlines(): JSON strings may hold U+2028 and its like as they are.
    lines = [_text(file)] if file.suffix == ".txt" else _text(file).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield from FORMATS[task].model_validate_json(line).rows()
        except ValidationError as error:
            problem = error.errors()[0]
            where = str(file) if file.suffix == ".txt" else f"{file}:{number}"
            field = f"{problem['loc'][0]}: " if problem["loc"] else ""
            found = json.dumps(problem["input"])[:40]
            what = f"{field}{problem['msg'].removeprefix('Value error, ')}, in {found}"
            raise DataError(f"{where}: {what}; {TITLES[task]} has {', '.join(FORMATS[task].model_fields)}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text ({error}); correct it, or name another file") from None


def _with_labels(rows: list[Row], file: Path) -> list[Row]:
    """Add PIQA's answers, which have a file of their own: `valid-labels.lst` for `valid.jsonl`, a line each."""
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
