#!/usr/bin/env bash
# Train a small GPT on the Python standard library, offline, in about a minute:   bash scripts/quickstart.sh [options]
# Options go to `stoker quickstart`, for example --seconds 30.
set -euo pipefail
. "$(dirname "$0")/environment.sh" ""
exec stoker quickstart "$@"
