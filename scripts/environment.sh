# Sourced by quickstart.sh and test.sh: create a virtual environment with stoker installed, if needed, and activate it.
# STOKER_VENV: folder of the environment (default .venv). PYTHON: interpreter (default python3).
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${STOKER_VENV:-.venv}"
python="${PYTHON:-python3}"
"$python" - <<'PY' || exit 2
import sys
if sys.version_info < (3, 11):
    sys.exit(f"stoker needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Set PYTHON to a newer one.")
PY
extra="${1:-}"
stamp="$venv/.stoker-installed-${extra:-base}"
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
  [ -e "$venv/bin/python" ] || "$python" -m venv "$venv"
  echo "Installing stoker into $venv (a few minutes the first time) ..."
  # torch first and by itself, so that an index with CPU builds takes effect and no other package pulls in CUDA wheels
  "$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt torch==2.13.0
  "$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt \
    --editable ".${extra:+[$extra]}"
  touch "$stamp" "$venv/.stoker-installed-base"  # what an extra needs is more than the base
fi
export PATH="$PWD/$venv/bin:$PATH"
