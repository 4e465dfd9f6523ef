#!/usr/bin/env bash
# The tests:   bash scripts/test.sh [--full|--gpu] [pytest arguments]
#   (nothing)  the fast tier, a few minutes on two cores
#   --full     the full counts too (minutes to tens of minutes); results belong in docs/verification.md
#   --gpu      only the tests marked `gpu`, with Triton compiling instead of interpreting
set -euo pipefail
. "$(dirname "$0")/environment.sh" dev
marks="not full and not gpu"
case "${1:-}" in
  --full) shift; marks="full" ;;
  --gpu) shift; marks="gpu"; export TRITON_INTERPRET=0 ;;
esac
mkdir -p .types && ln -sfn .. .types/stoker
# one thread per worker: two test processes with two OpenMP threads each on two cores run at a third of the speed
export OMP_NUM_THREADS=1
workers=$([ "$marks" = gpu ] && echo 0 || echo "${STOKER_TEST_WORKERS:-auto}")
exec python -m pytest -n "$workers" -m "$marks" "$@"
