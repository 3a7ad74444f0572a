#!/usr/bin/env bash
# Makes .venv: this checkout, installed editable, over a shared environment that holds SGLang and the other dependencies.
#
# SGLang and torch take 11 GB and some minutes to install. They depend on pyproject.toml alone, so they live outside the
# checkout, in $LORA_TREE_VENVS/<python>-<hash of pyproject.toml>, and every checkout with the same file shares them.
#   usage: scripts/make_venv.sh        settings: PYTHON, LORA_TREE_VENVS (default ~/.cache/sglang-lora-tree)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "make_venv: Python 3.11 or 3.12 is needed; name one with PYTHON=/path/to/python" >&2
    exit 1
fi

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
hash=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest()[:16])' pyproject.toml)
shared="${LORA_TREE_VENVS:-$HOME/.cache/sglang-lora-tree}/py$version-$hash"
site="lib/python$version/site-packages"

mkdir -p "$(dirname "$shared")"
exec 9>"$shared.lock"
flock 9 # two checkouts never build the same environment at once
if [ ! -e "$shared/.complete" ]; then
    echo "make_venv: installing SGLang and the other dependencies into $shared (about 11 GB, some minutes)"
    rm -rf "$shared"
    "$python" -m venv "$shared"
    "$shared/bin/python" -m pip install -q --upgrade pip "setuptools>=77" wheel
    "$shared/bin/python" - pyproject.toml >"$shared/requirements.txt" <<'PY'
import sys
import tomllib

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["test"]))
PY
    "$shared/bin/python" -m pip install -q -r "$shared/requirements.txt"
    touch "$shared/.complete"
fi

stamp=".venv/.made-from"
if [ "$(cat "$stamp" 2>/dev/null)" != "$shared" ]; then
    rm -rf .venv
    "$python" -m venv --without-pip .venv
    echo "$shared/$site" >".venv/$site/shared_dependencies.pth"
    .venv/bin/python -m pip install -qq --no-deps --no-build-isolation --editable .
    echo "$shared" >"$stamp"
fi
