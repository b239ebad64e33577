#!/usr/bin/env bash
# What `make release` does: build wheel and sdist into dist/, check them, and go the first minute of the demo with the
# wheel in a new environment outside the checkout.
#   scripts/release.sh [PYTHON]
set -euo pipefail
python=${1:-python3}
cd "$(dirname "$0")/.."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1

rm -rf dist
"$python" -m venv "$place/tools"
"$place/tools/bin/pip" install --quiet --constraint constraints.txt build twine check-wheel-contents
"$place/tools/bin/python" -m build # the wheel is made from the sdist
"$place/tools/bin/twine" check --strict dist/*
"$place/tools/bin/check-wheel-contents" dist/*.whl

"$python" -m venv "$place/fresh"
"$place/fresh/bin/pip" install --quiet --constraint constraints.txt "$(echo dist/*.whl)[report]"
scripts/first_minute.sh "$place/fresh/bin/pi-lora" "$place/first"

# The wheel is named after the version of pyproject.toml.
version=$(basename dist/*.whl | cut -d- -f2)
grep -Eq "^## $version - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md || {
  echo "CHANGELOG.md: no section for $version; rename \`## Unreleased\` to \`## $version - YYYY-MM-DD\`" >&2
  exit 1
}
