"""The README's commands exist, its files are there, and its recipe is one."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from cyclopts import App

from pi_lora.cli import app
from pi_lora.recipe.files import find_recipe, load_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# An option at the beginning of a text in backticks.
OPTION = re.compile(r"`(--[a-z][\w-]*)[^`\n]*`")
# Options of sbatch, vLLM, SGLang and llama-cpp-python that the docs name.
OPTIONS_OF_OTHERS = {"--nodes", "--signal", "--max-model-len", "--lora-modules", "--context-length", "--logits_all"}
OPTIONS_OF_OTHERS |= {"--hf-overrides", "--json-model-override-args", "--override-kv"}
LINKED = [*PAGES, ROOT / "recipes" / "README.md", *sorted((ROOT / "pi_lora").rglob("README.md"))]


def commands() -> list[str]:
    lines = [line.strip().partition("#")[0].strip() for page in PAGES for line in page.read_text().splitlines()]
    return sorted({line.removeprefix(".venv/bin/") for line in lines if re.match(r"(\.venv/bin/)?pi-lora \w", line)})


@pytest.mark.parametrize("line", commands())
def test_every_command_in_the_docs_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each documented command, down to its options, is one that the command line takes; recipes resolve."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    # mine.yaml is the reader's own file.
    if bound.arguments.get("recipe", Path("mine.yaml")) != Path("mine.yaml"):
        load_recipe(find_recipe(bound.arguments["recipe"]), bound.arguments.get("overrides", ()))


def options_of(command: App) -> set[str]:
    """The options of a command and of the commands below it."""
    names = {name for name in command if name.startswith("--")}
    if command.default_command:
        names |= {name for argument in command.assemble_argument_collection() for name in argument.names}
    for name in command:
        if not name.startswith("-"):
            names |= options_of(command[name])
    return names


@cache
def all_options() -> set[str]:
    """The options of pi-lora, and those that benchmarks, scripts and the tests add to their parsers."""
    files = [file for folder in ("benchmarks", "scripts") for file in (ROOT / folder).glob("*.py")]
    files.append(ROOT / "tests" / "lanes.py")
    added = {option for file in files for option in re.findall(r'"(--[a-z][\w-]*)"', file.read_text())}
    return options_of(app) | added


def unknown_options(text: str) -> set[str]:
    """Options in backticks that neither pi-lora nor the listed programs have."""
    return set(OPTION.findall(text)) - all_options() - OPTIONS_OF_OTHERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_the_docs_exist(page: Path) -> None:
    assert unknown_options(page.read_text()) == set()


def test_a_made_up_option_is_unknown() -> None:
    assert unknown_options("`--stretch 16k` and `pi-lora eval all --again`, `--json FILE`") == {"--stretch"}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_the_docs_lead_to_files(page: Path) -> None:
    """Files and pictures that pages link are there, and so are the headings that a link names after `#`."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, heading = target.partition("#")
        if target.startswith("http"):
            continue
        assert (page.parent / name).exists(), target
        if heading:
            assert heading in anchors(page.parent / name if name else page), target


def anchors(page: Path) -> set[str]:
    """What headings are called in links: small letters, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_of_docs_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page.suffix == ".md" and page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
            ahead += [page.parent / link for link in links if not link.startswith("http")]
    assert set((ROOT / "docs").glob("*.md")) <= reached


@pytest.mark.parametrize("page", [*PAGES, *WORKFLOWS], ids=lambda page: page.name)
def test_make_targets_and_scripts_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"^(?:    |.*run: )make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    for script in re.findall(r"\b(?:scripts|benchmarks)/\w+\.(?:py|sh)", text):
        assert (ROOT / script).is_file(), script


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 110


def test_the_readmes_recipe_resolves(tmp_path: Path) -> None:
    yaml = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert yaml
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.group(1))
    load_recipe(path)


BLOCK = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- end of \1 -->", re.DOTALL)
FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")
# Code, options and file names, addresses, and the numbers of versions and of papers.
NOT_MEASURED = re.compile(
    r"```.*?```|^    [^\n]*$|`[^`]*`|\]\([^)]*\)|\b(?:Python(?: 3\.\d+ to)?|transformers|arXiv) \d+\.\d+",
    re.DOTALL | re.MULTILINE,
)
# Figures of others: of RULER's threshold, of AdamW and nucleus sampling.
OF_OTHERS = {"85.6", "0.95"}


def figures_of_tables() -> set[float]:
    """The figures of all tables that a command writes into the README, docs/, benchmarks/ and cards."""
    pages = [*PAGES, *(ROOT / "benchmarks").rglob("*.md")]
    tables = [table for page in pages for _, table in BLOCK.findall(page.read_text())]
    cards = (ROOT / "adapters").glob("*/README.md")
    tables += [line for card in cards for line in card.read_text().splitlines() if line.startswith("|")]
    return {float(figure) for table in tables for figure in re.findall(r"\d+\.\d+", table)}


def missing_figures(text: str, figures: set[float]) -> list[str]:
    """Figures with a point in a text that no table has, rounded as the text rounds."""
    found = FIGURE.findall(text)
    return [each for each in found if all(f"{figure:.{len(each.partition('.')[2])}f}" != each for figure in figures)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_of_the_docs_stand_in_tables_that_a_command_writes(page: Path) -> None:
    """But for the theory, whose figures tests/theory computes."""
    prose = NOT_MEASURED.sub("", BLOCK.sub("", page.read_text()).partition("## Theory")[0])
    assert set(missing_figures(prose, figures_of_tables())) <= OF_OTHERS


def test_a_figure_without_a_table_is_noticed() -> None:
    assert missing_figures("12345.678 passkeys", figures_of_tables()) == ["12345.678"]
