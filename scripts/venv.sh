# Sourced by demo, test and check. `ready_venv EXTRAS` leaves the interpreter of a virtual environment in $python, with
# the project installed (editable) in it; EXTRAS is "" or like "[test]". Installs only when pyproject.toml has changed.
#
# QUIRE_VENV    folder of the environment (default: .venv in the project)
# QUIRE_PYTHON  interpreter to make it with (default: the first of python3, python3.13, ... that is new enough)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${QUIRE_VENV:-$root/.venv}
python=$venv/bin/python

find_python() {
  local name
  for name in ${QUIRE_PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return 0
    fi
  done
  echo "Quire needs Python 3.11 or newer, and found: $(python3 --version 2>&1 || echo 'no python3')." >&2
  echo "Install one (for example from python.org or your package manager), or name it: QUIRE_PYTHON=/path/to/python3.12 $0" >&2
  return 1
}

make_venv() {
  local base
  base=$(find_python) || exit 1
  if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "$base cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)." >&2
    exit 1
  fi
  echo "Making a virtual environment in $venv with $("$base" --version) ..." >&2
  "$base" -m venv --clear "$venv"
}

with_pip() {  # makes the environment if it is not there, with pip alone
  if ! "$python" -c 'import pip' 2>/dev/null; then
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
      echo "$venv exists and is not a virtual environment: remove it, or set QUIRE_VENV to another folder." >&2
      exit 1
    fi
    make_venv
  fi
}

ready_venv() {
  local extras=$1 wanted stamp options=()
  wanted="$root $(cksum < "$root/pyproject.toml")"
  for stamp in "$venv/.quire$extras" "$venv/.quire[test]"; do
    if [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return 0; fi
  done
  with_pip
  echo "Installing Quire and what it needs (the first time PyTorch is downloaded) ..." >&2
  if [ "$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
    echo "No GPU here? PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu picks the much smaller CPU build." >&2
  fi
  if [ ! -t 2 ]; then
    echo "This takes minutes on a slow network; on a terminal it shows how far it is." >&2
    options+=(--quiet)
  fi
  # pip compiles all modules, which takes 30 s. Python compiles once those that tests import.
  if [ "$extras" = "[test]" ]; then options+=(--no-compile); fi
  "$python" -m pip install ${options[@]+"${options[@]}"} --disable-pip-version-check --editable "$root$extras" >&2
  echo "$wanted" > "$venv/.quire$extras"
}
