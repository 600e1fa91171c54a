#!/usr/bin/env bash
# Make the embedded model's plan: predictors trained on the first 3.2 million characters of a corpus
# file. Usage: recipes/embedded_plan.sh CORPUS_FOLDER PLAN_FOLDER
set -euo pipefail
text="$(mktemp --suffix .txt)"
trap 'rm -f "$text"' EXIT
python3 - "$1/train-0.txt.xz" "$text" <<'PY'
import lzma, sys
with lzma.open(sys.argv[1], "rt", encoding="utf-8") as source:
    open(sys.argv[2], "w", encoding="utf-8").write(source.read(3_200_000))
PY
dejavu prepare relu-30m --out "$2" --text "$text" --tokens 300000 --no-heads
