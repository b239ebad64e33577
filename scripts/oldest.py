"""Print pip's constraints for the oldest versions that pyproject.toml allows: what `make test-oldest` installs.

python scripts/oldest.py [NAME==VERSION ...]   # others for some of them
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def oldest() -> dict[str, str]:
    """Return the lower bound of everything that the package or one of its extras names."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    groups = project["dependencies"], *project["optional-dependencies"].values()
    named = (re.match(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)", requirement) for group in groups for requirement in group)
    return {found[1]: found[2] for found in named if found}


if __name__ == "__main__":
    others = dict(each.split("==") for each in sys.argv[1:])
    print("\n".join(f"{name}=={version}" for name, version in (oldest() | others).items()))
