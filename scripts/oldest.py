"""Print pip's constraints for the oldest versions that pyproject.toml allows: what `make test-oldest` installs.

python scripts/oldest.py [NAME==VERSION ...]   # others for some of them
"""

import itertools
import re
import tomllib
from pathlib import Path

from arguments import parser_of

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
    parser = parser_of(__doc__)
    parser.add_argument("versions", nargs="*", metavar="NAME==VERSION")
    others = dict(constraint.split("==") for constraint in parser.parse_args().versions)
    constraints = oldest() | others
    for name, version in constraints.items():
        print(f"{name}=={version}")
