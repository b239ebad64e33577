"""Local files of the paper's five benchmarks (table 5), in the formats of their authors, as rows for lm-eval."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from pi_lora.errors import DataError
from pi_lora.types import Json

TITLES = {"boolq": "BoolQ", "piqa": "PIQA", "race_middle": "RACE-M", "race_high": "RACE-H", "winogrande": "WinoGrande"}
# In the order in which a folder is searched: the split that is measured has its name from the data set's authors.
FILES = ("dev.jsonl", "valid.jsonl", "validation.jsonl", "test.jsonl")


class _Example(BaseModel):
    """A JSON object in a data set's own format."""

    model_config = ConfigDict(strict=True)

    def rows(self) -> list[Json]:
        """Return it as lm-eval's task reads it."""
        return [self.model_dump(by_alias=True)]


class _BoolQ(_Example):
    question: str
    passage: str
    answer: Annotated[bool, PlainSerializer(int), Field(serialization_alias="label")]


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
        if isinstance(row, dict) and "question" in row:
            for one, many in (("question", "questions"), ("options", "options"), ("answer", "answers")):
                row = {**row, many: [row[one]]} if one in row else row
        return row

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if not len(self.questions) == len(self.options) == len(self.answers):
            raise ValueError("has not as many options and answers as questions")
        return self

    def rows(self) -> list[Json]:
        asked = zip(self.questions, self.options, self.answers, strict=True)
        return [{"article": self.article, "question": q, "options": o, "answer": a} for q, o, a in asked]


FORMATS: dict[str, type[_Example]] = dict(zip(TITLES, (_BoolQ, _Piqa, _Race, _Race, _WinoGrande), strict=True))


def read_examples(task: str, path: Path) -> list[Json]:
    """Return the examples in a file or a folder of the data set's own format, for lm-eval's task; raise DataError with
    file, line and field if there are none, or one has another format.
    """
    race = FORMATS[task] is _Race
    files = [path] if path.is_file() else (sorted(path.glob("*.txt")) if race else [])
    files = files or [path / name for name in FILES if (path / name).is_file()][:1]
    if not files:
        what = f"holds none of {', '.join(FILES)}" if path.is_dir() else "no such file or folder"
        raise DataError(f"{path}: {what}; name one that holds {TITLES[task]}")
    rows = [row for file in files for row in _rows(task, file)]
    if not rows:
        raise DataError(f"{path}: holds no examples; name a file of {TITLES[task]} that does")
    if task == "piqa":
        return [{**row, "label": label} for row, label in zip(rows, _labels(files[0], len(rows)), strict=True)]
    return articles(rows) if race else rows


def articles(questions: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Put RACE's questions together as lm-eval's task reads them: a row per article, problems as a Python literal.

    >>> rows = [{"article": "A", "question": q, "options": list("wxyz"), "answer": "B"} for q in ("1?", "2?")]
    >>> [(row["article"], row["problems"].count("question")) for row in articles(rows)]
    [('A', 2)]
    """
    problems: dict[str, list[Json]] = {}
    for row in questions:
        problems.setdefault(row["article"], []).append({key: row[key] for key in ("question", "answer", "options")})
    return [{"article": article, "problems": repr(asked)} for article, asked in problems.items()]


def _rows(task: str, file: Path) -> list[Json]:
    """Return the rows of each object: a `.txt` is one, of other files each line is one."""
    kind, whole = FORMATS[task], file.suffix == ".txt"
    rows = []
    # Not splitlines(): JSON strings may hold U+2028 and its like as they are.
    for number, line in enumerate([_text(file)] if whole else _text(file).split("\n"), 1):
        try:
            rows += kind.model_validate_json(line).rows() if line.strip() else []
        except ValidationError as error:
            problem = error.errors()[0]
            where = f"{file}" if whole else f"{file}:{number}"
            field = f"{problem['loc'][0]}: " if problem["loc"] else ""
            what = f"{field}{problem['msg'].removeprefix('Value error, ')}, in {json.dumps(problem['input'])[:40]}"
            raise DataError(f"{where}: {what}; {TITLES[task]} has {', '.join(kind.model_fields)}") from None
    return rows


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text ({error}); correct it, or name another file") from None


def _labels(file: Path, number: int) -> list[int]:
    """Return PIQA's answers, which have a file of their own: `valid-labels.lst` for `valid.jsonl`, a line each."""
    labels = file.with_name(f"{file.stem}-labels.lst")
    if not labels.is_file():
        raise DataError(f"{labels}: no such file; PIQA has its answers there, beside {file.name}")
    found = _text(labels).split()
    for line, label in enumerate(found, 1):
        if label not in ("0", "1"):
            raise DataError(f"{labels}:{line}: is {label[:40]}; PIQA has 0 or 1 there")
    if len(found) != number:
        raise DataError(f"{labels}: has {len(found)} labels for {number} lines of {file.name}; fetch both again")
    return [int(label) for label in found]
