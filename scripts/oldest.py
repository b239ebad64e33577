"""Print pip's constraints for the oldest versions that pyproject.toml allows: what `make test-oldest` installs.

python scripts/oldest.py [NAME==VERSION ...]   # others for some of them
"""

import itertools
import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
LOWER_BOUND = re.compile(r"(?P<name>[\w-]+)(?:\[\w+\])?>=(?P<version>[\w.]+)")


def oldest() -> dict[str, str]:
    """Return the lower bound of everything that the package or one of its extras names."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    bounds = {}
    for requirement in itertools.chain(project["dependencies"], *extras):
        match = LOWER_BOUND.match(requirement)
        if match:
            bounds[match["name"]] = match["version"]
    return bounds


if __name__ == "__main__":
    others = dict(constraint.split("==") for constraint in sys.argv[1:])
    constraints = oldest() | others
    for name, version in constraints.items():
        print(f"{name}=={version}")
