#!/usr/bin/env bash
# Make the embedded model's plan: predictors trained on the first 3.2 million characters of a corpus
# file, and its default level `careful` (0.5 % of perplexity) found on 30 passages of another one.
# Usage: recipes/embedded_plan.sh CORPUS_FOLDER PLAN_FOLDER
set -euo pipefail
folder="$(mktemp --directory)"
trap 'rm -rf "$folder"' EXIT
python3 - "$1" "$folder" <<'PY'
import lzma, sys
def beginning(number, characters):
    with lzma.open(f"{sys.argv[1]}/train-{number}.txt.xz", "rt", encoding="utf-8") as source:
        return source.read(characters)
def keep(name, text):
    with open(f"{sys.argv[2]}/{name}.txt", "w", encoding="utf-8") as target:
        target.write(text)
end = "\n<|endoftext|>\n"
keep("train", beginning(0, 3_200_000))
other = beginning(1, 6_000_000)
passages = [other[start : start + 2200] for start in range(0, 6_000_000, 200_000)]
keep("level", end.join(passage.replace("<|endoftext|>", end) for passage in passages))
PY
dejavu prepare relu-30m --out "$2" --text "$folder/train.txt" --tokens 300000 --no-heads
dejavu plan level relu-30m "$2" --name careful --max-loss 0.5% --default \
    --text "$folder/level.txt" --out "$2"
