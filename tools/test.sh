#!/usr/bin/env bash
# Install what the tests need into .venv, then run every check: ruff, mypy, pytest (the notebooks are among its tests).
# With --all, tests of the real vLLM and lm-eval run in .venv-vllm, and pages are looked at in Chromium. Where one of these
# cannot be installed its tests are left out, and fail in CI.
#
#   bash tools/test.sh          the fast tests
#   bash tools/test.sh --all    also those marked slow, browser or vllm, as CI does (CI=true means --all)
#   bash tools/test.sh [--all] tests/test_x.py -k name ...    pytest's own arguments
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

select=()
if [[ "${1:-}" == --all ]]; then
  shift
  select=(-m "not vllm")
elif [[ "${CI:-}" == true ]]; then
  select=(-m "not vllm")
fi
arguments=("$@")

install_mxq dev
export PATH="$VENV/bin:$PATH" HF_HUB_OFFLINE=1
use_one_thread

failed=()
check() {
  local command
  printf -v command '%q ' "$@"
  say "$command"
  "$@" || failed+=("$command")
}

# Arguments may be about one of the two runs of pytest only: no test is a failure where there are none.
tests() {
  local code=0
  "$@" ${arguments[@]+"${arguments[@]}"} || code=$?
  [[ $code -eq 0 || ($code -eq 5 && ${#arguments[@]} -gt 0) ]]
}

if [[ ${#select[@]} -gt 0 ]] && ! install_browser; then
  say "Left out, since Chromium cannot be installed here: the tests marked browser"
  [[ "${CI:-}" != true ]] || failed+=("the installation of Chromium")
fi

cd "$ROOT"
check ruff check mxq tests tools notebooks
check ruff format --check mxq tests tools notebooks
check mypy
# A file stays in one process, for what its tests share. As many processes as processors, of which nproc counts no more
# than OMP_NUM_THREADS, at least two, since many tests wait; more than four want more memory than a laptop has.
processes=$(env -u OMP_NUM_THREADS nproc)
processes=$((processes < 2 ? 2 : processes > 4 ? 4 : processes))
check tests pytest --numprocesses "$processes" --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 10 \
  ${select[@]+"${select[@]}"}

if [[ ${#select[@]} -gt 0 ]]; then
  if install_vllm; then
    check tests "$VLLM_VENV/bin/python" -m pytest --numprocesses 0 -m vllm
  else
    say "Left out, since vLLM's build for processors cannot be installed here: the tests marked vllm"
    [[ "${CI:-}" != true ]] || failed+=("the installation of vLLM")
  fi
fi

if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
