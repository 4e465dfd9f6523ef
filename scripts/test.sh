#!/usr/bin/env bash
# The tests:   bash scripts/test.sh [--full|--gpu] [pytest arguments]
#   (nothing)  the fast tier, at most 2.5 minutes on two cores
#   --full     all cases and tests/full, at most an hour; results belong in docs/verification.md
#   --gpu      only the tests marked `gpu`, with Triton compiling instead of interpreting: first several at once, then
#              those that measure the device, one by one
# STOKER_TEST_WORKERS is the number of processes; STOKER_TEST_FAILURES a file that takes each failure at once.
set -euo pipefail
. "$(dirname "$0")/environment.sh" dev
mkdir -p .types && ln -sfn .. .types/stoker
# one thread per worker: two test processes with two OpenMP threads each on two cores run at a third of the speed
export OMP_NUM_THREADS=1
# pip installed without bytecode: every process of the tests would compile torch and transformers anew
unset PYTHONDONTWRITEBYTECODE
case "${1:-}" in
  --gpu)
    shift
    export TRITON_INTERPRET=0 STOKER_TEST_TIER=gpu
    failed=0
    python -m pytest -n "${STOKER_TEST_WORKERS:-8}" --dist worksteal -m "gpu and not alone" "$@" || failed=$?
    python -m pytest -n 0 -m "gpu and alone" "$@" || failed=$?
    exit "$failed"
    ;;
  --full) shift; export STOKER_TEST_TIER=full ;;
esac
exec python -m pytest -n "${STOKER_TEST_WORKERS:-auto}" "$@"
