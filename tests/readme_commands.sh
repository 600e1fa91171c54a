#!/usr/bin/env bash
# Run the commands that README.md shows in its ```sh blocks, as written there, one after another in
# an empty folder. `make` and `pip install` lines are what CI has done before; lines that need
# a network or another model carry the comment "# needs ...".
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
export PATH="$root/.venv/bin:$PATH"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"
awk '/^```sh$/ {on = 1; next} /^```$/ {on = 0} on' "$root/README.md" |
  grep -Ev '^(make|pip|git|cd) |# needs |^#|^$' >commands
test -s commands
while read -r command; do
  echo "\$ $command"
  bash -euo pipefail -c "$command" </dev/null
done <commands
