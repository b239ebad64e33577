"""The files that mkdocs needs beside docs/ (`make docs`): README and other pages as pages of the site, notebooks as
text, and links that fit. A link to a file that has no page keeps its text only.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Files from elsewhere in the repository, and their pages.
NAMES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "recipes/README.md": "list-of-recipes.md",
    "benchmarks/README.md": "benchmarks.md",
    "pi_lora/builtin/tiny/README.md": "builtin.md",
    "docs/quickstart.ipynb": "quickstart.md",
}
PAGES = {ROOT / name: page for name, page in NAMES.items()}
PAGES |= {file: f"table-{file.stem}.md" for file in sorted((ROOT / "benchmarks" / "results").glob("*.md"))}
LINK = re.compile(r"(!?\[(?P<text>[^\]]*)\])\((?P<target>[^)\s#]+)(?P<heading>#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        if old := files.get_file_from_path(os.path.relpath(source, DOCS)):
            files.remove(old)
        text = source.read_text(encoding="utf-8")
        if source.suffix == ".ipynb":
            text = notebook_as_markdown(text)
        # The card of a model begins with metadata of the hub.
        text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
        files.append(File.generated(config, page, content=links_fitted(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fit the links of the pages that are in docs/."""
    if page.file.generated_by:
        return markdown
    return links_fitted(markdown, DOCS / page.file.src_path)


def links_fitted(text: str, source: Path) -> str:
    """Return Markdown whose links, relative to `source`, lead to pages of the site, all of which lie in one folder."""

    def fitted(link: re.Match[str]) -> str:
        if re.match(r"\w+:", link["target"]):
            return link[0]
        target = Path(os.path.normpath(source.parent / link["target"]))
        page = PAGES.get(target)
        if not page and target.is_relative_to(DOCS):
            page = target.relative_to(DOCS).as_posix()
        if not page:
            return link["text"]
        heading = link["heading"] or ""
        return f"{link[1]}({page}{heading})"

    return LINK.sub(fitted, text)


def notebook_as_markdown(text: str) -> str:
    """Return the cells of a notebook, and beneath code what it printed and drew."""
    parts = []
    for cell in json.loads(text)["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts.append(f"```python\n{code}\n```")
        else:
            parts.append(code)
        outputs = cell.get("outputs", [])
        printed = "".join(line for output in outputs for line in output.get("text", ()))
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
        for output in outputs:
            if "data" in output:
                parts.append(f"![](data:image/png;base64,{output['data']['image/png'].strip()})")
    return "\n\n".join(parts) + "\n"
