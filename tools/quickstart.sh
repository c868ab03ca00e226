#!/usr/bin/env bash
# From a fresh checkout to the answer, on a CPU: install, convert the dense testbed model to MXFP4, verify the result,
# decode the same prompts with both, and print the comparison.
#
#   bash tools/quickstart.sh [DIRECTORY]      results go to DIRECTORY (default: out/quickstart in the checkout)
#
# Run again, it continues where it was stopped; to start over, give another directory or remove this one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

out="${1:-$ROOT/out/quickstart}"
converted="$out/dense-mxfp4"

run() {
  printf '$ %s\n' "$*" >&2
  "$@"
}

install_mxq report
export PATH="$VENV/bin:$PATH"
use_one_thread
mkdir -p "$out"

say "1/3 Convert testbed:dense to MXFP4"
if [[ -f "$converted/mxq_manifest.json" ]]; then
  echo "already in $converted" >&2
else
  run mxq quantize testbed:dense "$converted" --recipe mxfp4
fi

say "2/3 Verify it against its source"
run mxq verify "$converted" --against testbed:dense ||
  die "$converted does not pass" "if an earlier version made it: remove $out, then run this again"

say "3/3 Decode the same prompts with both: plain, MTP, DFlash (two to six minutes)"
run mxq eval --bf16 testbed:dense --mxfp4 "$converted" --spec mtp --spec dflash -k 3 -k 15 --limit 3 --out "$out/run"

cat >&2 <<END

Everything is in $out: the converted model, and the run with one record per request.
Next, with $VENV/bin in PATH (source $VENV/bin/activate):
  mxq eval --show $out/run      these tables again
  mxq compare $out/run          with intervals and a verdict, which takes 12 prompts or more
  mxq report $out/run -o $out/report.html      a page with verdict, tables and pictures
  mxq eval --help               more prompts, budgets and workloads, your own prompts, sampling
  mxq inspect $converted --worst 10
END
