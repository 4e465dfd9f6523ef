#!/usr/bin/env bash
# Train a small GPT on the Python standard library, offline, in about a minute:   bash scripts/quickstart.sh [options]
# Options go to `stoker quickstart`, for example --seconds 30.
set -euo pipefail
installed="$(command -v stoker || true)"
. "$(dirname "$0")/environment.sh" ""
stoker quickstart "$@"
[ -n "$installed" ] || echo "first:  cd $(printf %q "$PWD") && . $(printf %q "$venv/bin/activate")"
