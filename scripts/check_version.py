"""Check that CHANGELOG.md has a dated section for the version of pyproject.toml, and that a tag names this version.

python scripts/check_version.py [TAG]
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def problem(version: str, changelog: str, tag: str | None) -> str | None:
    if tag is not None and tag != f"v{version}":
        return f"{tag}: the version in pyproject.toml is {version}; tag it v{version}"
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.MULTILINE):
        return f"CHANGELOG.md: no section for {version}; name what is unreleased `## {version} - YYYY-MM-DD`"
    return None


def main() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    tag = sys.argv[1] if len(sys.argv) > 1 else None
    sys.exit(problem(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), tag))


if __name__ == "__main__":
    main()
