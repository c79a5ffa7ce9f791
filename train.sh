#!/usr/bin/env bash
# From prompts to a head that decodes: the target answers, a head learns, and what it gains is measured. Run it again to go
# on after an interruption. TRAIN_FLAGS go to the training, whose other options have their defaults.
#   bash train.sh             prompts are said by the target itself
#   PROMPTS="a.json b.jsonl" bash train.sh
#   bash train.sh --smoke     a tiny model on the CPU, where weights can be compared bit by bit; well under a minute
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"

HEAD=${HEAD:-eagle3}                       # or eagle, parallel, glide
TARGET=${TARGET:-}                         # checkpoint folder, .gguf file or hub id; empty: the embedded model
OUT=${OUT:-results/train-$HEAD}            # answers, their hidden states, head and report
NUM_PROMPTS=${NUM_PROMPTS:-500}            # of each file, or said
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-384}      # per answer
TEMPERATURE=${TEMPERATURE:-0,0,0.7,1}      # answers take these in turn
EPOCHS=${EPOCHS:-10}
NUM_QUESTIONS=${NUM_QUESTIONS:-8}          # of the benchmark
read -ra train_flags <<<"${TRAIN_FLAGS:-}"
read -ra prompts <<<"${PROMPTS:-}"
target=(${TARGET:+--target "$TARGET"})

step() { printf '\n== %s\n' "$*"; }

pipeline() {
  if [ ${#prompts[@]} = 0 ]; then
    step "prompts: the target says what users ask"
    prompts=("$OUT/said.jsonl")
    mkdir -p "$OUT"
    python -m train prompts "${target[@]}" --num-prompts "$NUM_PROMPTS" --out "${prompts[0]}"
  fi
  step "data: the target answers"
  python -m train generate "${target[@]}" --prompts "${prompts[@]}" --num-prompts "$NUM_PROMPTS" \
    --max-new-tokens "$MAX_NEW_TOKENS" --temperature "$TEMPERATURE" --out-dir "$OUT/data"
  step "training: $HEAD"
  python -m train "$HEAD" "${target[@]}" --data "$OUT/data" --states "$OUT/states" --out-dir "$OUT/head" \
    --epochs "$EPOCHS" --resume "${train_flags[@]}"
  step "benchmark: plain decoding and the head"
  python -m benchmark mtbench "${target[@]}" --mode "naive,${HEAD%3}" --draft-head "$OUT/head/best" \
    --num-questions "$NUM_QUESTIONS" --out-dir "$OUT/benchmark-$(date +%Y%m%d-%H%M%S)"
}

steps_in() { cat "$1"/log.jsonl 2>/dev/null | grep -c loss || true; }

smoke() {
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  step "a tiny model and its answers"
  PYTHONPATH=. python - "$work" <<'PY'
import json, sys
from pathlib import Path

from tests.helpers.tiny_models import make_checkpoint

work = Path(sys.argv[1])
make_checkpoint(work / "model", layers=4)
records = ({"prompt": f"the cat and the mat, {i} times"} for i in range(24))
(work / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
PY
  python -m train generate --target "$work/model" --prompts "$work/prompts.jsonl" --max-new-tokens 48 \
    --temperature 0,1 --max-context 256 --device cpu --threads 1 --out-dir "$work/data"
  local train=(python -m train eagle --data "$work/data" --states "$work/states" --held-out 0.3 --max-length 96 --batch 2
    --lr 2e-3 --steps 60 --check-every 10 --device cpu --threads 1 --costs 0.1,1.3)

  step "training, undisturbed"
  "${train[@]}" --out-dir "$work/whole"
  step "training, killed and gone on with"
  local try process
  for try in 1 2 3 4 5 6 7 8; do # a busy machine may look too late
    rm -rf "$work/broken"
    "${train[@]}" --out-dir "$work/broken" &
    process=$!
    until [ "$(steps_in "$work/broken")" -ge 25 ]; do
      kill -0 "$process" 2>/dev/null || break
      sleep 0.02
    done
    kill -9 "$process" 2>/dev/null || true
    wait "$process" 2>/dev/null || true
    [ "$(steps_in "$work/broken")" -ge 60 ] || break
  done
  [ "$(steps_in "$work/broken")" -lt 60 ] || { echo "error: the training ended before it was killed, each time"; exit 1; }
  [ "$(steps_in "$work/broken")" -ge 25 ] || { echo "error: the training ended by itself"; exit 1; }
  "${train[@]}" --out-dir "$work/broken" --resume
  cmp "$work/whole/last/model.safetensors" "$work/broken/last/model.safetensors"
  cmp "$work/whole/best/model.safetensors" "$work/broken/best/model.safetensors"
  python - "$work/whole/log.jsonl" <<'PY'
import json, sys

losses = [line["loss"] for line in map(json.loads, open(sys.argv[1])) if "loss" in line]
first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
print(f"loss: {first:.3f} in the first ten steps, {last:.3f} in the last")
sys.exit(last > 0.8 * first)
PY

  step "the head decodes what plain decoding does"
  local generate=(python -m sharesd generate "why is the sky blue" --target "$work/model" --max-new-tokens 48 --max-context 256
    --device cpu --threads 1)
  "${generate[@]}" --mode naive >"$work/naive.txt"
  "${generate[@]}" --mode eagle --num-speculative-tokens 3 --draft-head "$work/broken/best" >"$work/eagle.txt"
  cat "$work/naive.txt"
  cmp "$work/naive.txt" "$work/eagle.txt"
}

if [ "${1:-}" = --smoke ]; then
  smoke
elif [ $# -gt 0 ]; then
  echo "error: train.sh takes --smoke or nothing, not $1; give settings in the environment (see its beginning)" >&2
  exit 2
else
  pipeline
fi
