#!/usr/bin/env bash
# Smoke checks of every entry point, then the test suite. Flags go to pytest, e.g. -k lossless.
# Whatever they make lies in folders of their own, which go away.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
source scripts/scratch.sh
out=$scratch/out
mkdir "$out"

step "style and types"
ruff check .
ruff format --check .
mypy sharesd compile quant offload multigpu benchmark train serve

step "generate: five modes give one text"
for mode in naive classic share eagle glide; do
  python -m sharesd generate "Name three colours of the rainbow." --mode "$mode" --max-new-tokens 24 >"$out/$mode.txt"
done
python -m sharesd generate "Name three colours of the rainbow." --mode classic --draft small --max-new-tokens 24 >"$out/small.txt"
cat "$out/naive.txt"
for name in classic small share eagle glide; do cmp "$out/naive.txt" "$out/$name.txt"; done

step "draft trees and tables give it too"
python -m sharesd generate "Name three colours of the rainbow." --mode share --tree 2:4:8 --num-draft 8 --max-new-tokens 24 >"$out/tree.txt"
python -m sharesd generate "Name three colours of the rainbow." --mode hybrid --with share,suffix,recycle --max-new-tokens 24 >"$out/hybrid.txt"
python -m sharesd generate "Name three colours of the rainbow." --mode hybrid --with eagle,suffix --max-new-tokens 24 >"$out/mixed.txt"
cmp "$out/naive.txt" "$out/tree.txt"
cmp "$out/naive.txt" "$out/hybrid.txt"
cmp "$out/naive.txt" "$out/mixed.txt"

step "chat: two turns, a change of mode"
printf 'Hello! Who are you?\n/mode naive\nSay that again, shorter.\n/stats\n/exit\n' |
  python -m sharesd chat --mode share --max-new-tokens 24

step "benchmark: mtbench on two questions"
python -m benchmark mtbench --num-questions 2 --max-new-tokens 16 --out-dir "$out/mtbench"

step "serve: the same answers with drafts and without, four at once"
python -m benchmark serve --spawn hybrid --dataset questions --num-prompts 4 --output-len 16 --max-concurrency 4 \
  --out-dir "$out/serve" -- --max-batch 4 --max-context 1024

step "train: a head for a tiny model, interrupted and resumed"
bash train.sh --smoke

step "wrong input is one line and status 2"
for wrong in "sharesd generate hello --mode fast" "sharesd generate hello --target no/such/folder/here" \
  "benchmark mtbench --questions no-such-file.jsonl"; do
  status=0
  python -m $wrong >"$out/stdout" 2>"$out/stderr" || status=$?
  cat "$out/stderr"
  [ "$status" = 2 ] && [ "$(wc -l <"$out/stderr")" = 1 ] || { echo "python -m $wrong: status $status"; exit 1; }
done

step "tests"
command -v chromium >/dev/null || echo "chromium is not installed: tests/serve/test_page.py is skipped"
python scripts/run_tests.py "$@"
