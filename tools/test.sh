#!/usr/bin/env bash
# Install what the tests need into .venv, then run every check: ruff, mypy, pytest (the notebooks are among its tests).
#
#   bash tools/test.sh          the fast tests
#   bash tools/test.sh --all    also those marked slow, as CI does (CI=true means --all)
#   bash tools/test.sh [--all] tests/test_x.py -k name ...    pytest's own arguments
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

select=()
if [[ "${1:-}" == --all ]]; then
  shift
  select=(-m "")
elif [[ "${CI:-}" == true ]]; then
  select=(-m "")
fi

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

cd "$ROOT"
check ruff check mxq tests tools notebooks
check ruff format --check mxq tests tools notebooks
check mypy
# A file stays in one process, for what its tests share. More than four processes want more memory than a laptop has.
check pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder ${select[@]+"${select[@]}"} "$@"

if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
