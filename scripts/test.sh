#!/usr/bin/env bash
# Run the tests:   bash scripts/test.sh [--full|--gpu] [pytest arguments]
#   (default)  the fast tests, five to six minutes on two cores
#   --full     all cases and tests/full, at most an hour; record the results in docs/verification.md
#   --gpu      only tests marked `gpu`, with Triton compiling instead of interpreting: first in parallel, then those that
#              need the GPU for themselves, one by one
# STOKER_TEST_WORKERS: number of processes. STOKER_TEST_FAILURES: file to which each failure is written at once.
set -euo pipefail
. "$(dirname "$0")/environment.sh" dev
mkdir -p .types && ln -sfn .. .types/stoker
# one thread per worker: two workers with two OpenMP threads each on two cores run at a third of the speed
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
# worksteal: neighbouring tests, which share imports and fixtures of a module, run in one process
exec python -m pytest -n "${STOKER_TEST_WORKERS:-auto}" --dist worksteal "$@"
