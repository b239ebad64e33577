"""Check that CHANGELOG.md has a dated section for the version of pyproject.toml, and that a tag names this version.

python scripts/check_version.py [TAG]
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    section = rf"^## {re.escape(version)} - \d{{4}}-\d{{2}}-\d{{2}}$"
    if sys.argv[1:] not in ([], [f"v{version}"]):
        sys.exit(f"{sys.argv[1]}: the version in pyproject.toml is {version}; tag it v{version}")
    if not re.search(section, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        sys.exit(f"CHANGELOG.md: no section for {version}; name what is unreleased `## {version} - YYYY-MM-DD`")


if __name__ == "__main__":
    main()
