#!/usr/bin/env bash
# What to run first when a GPU is at hand, in the order of worth. Each part fits one call of ten minutes.
#
#   bench/gpu_check.sh                     all parts, one after the other
#   bench/gpu_check.sh kernels steps       some of them
#   bench/gpu_check.sh list                what each part is for, and an estimate of its time on an H200
#
# Results go to $OUT, else to .carry/gpu_check: a log of each part, and the JSON lines of the benches. The packages of peers and the
# chat rows come from `bench/carry.sh`. A part that fails does not stop the others; the last line names those that did.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-.carry/gpu_check}
ROWS=${ROWS:-.carry/chatlm/train_3k.parquet}
export PYTHONPATH=src:bench:.carry/site${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

PARTS=(kernels steps plans pretrain sft causal midrun full preference peers seeds)
about() {
  case $1 in
    kernels) echo "2 min   attention, loss and compiled blocks of every family against float64 and plain runs" ;;
    steps) echo "3 min   the step, CUDA graphs, and planning on the card, a process for each folder" ;;
    plans) echo "1 min   two plans: the layout, compile and cuda_graphs choices and their reasons; time without compilation" ;;
    pretrain) echo "6 min   T5 on real rows under 20 GiB: each lever in turn, and the best settings of HF" ;;
    sft) echo "4 min   the same with a frozen encoder" ;;
    causal) echo "6 min   GPT-2 small on uneven rows; HF with batches of 4 and 8 (16 ran out of memory)" ;;
    midrun) echo "4 min   memory taken and given back in mid-run, packed and compiled" ;;
    full) echo "4 min   rows of 256+256: the share of the best matrix product" ;;
    preference) echo "5 min   DPO against TRL" ;;
    peers) echo "8 min   SFT against TRL and Liger" ;;
    seeds) echo "9 min   loss curves, packed against padded, three seeds" ;;
  esac
}

train() { # CASE ENTRIES SECONDS [OPTION…]
  "$PYTHON" bench/train.py --data "$ROWS" --cases "$1" --only "$2" --total-seconds "$3" --warm-seconds 12 --cap 20GiB \
    --folder "$OUT/rows" --output "$OUT/train.jsonl" "${@:4}"
}

part() {
  case $1 in
    kernels) "$PYTHON" -m pytest -m gpu tests/packing -q ;;
    steps)
      local failed=0 folder
      for folder in tests/step tests/planning tests/memory tests/molecules; do
        "$PYTHON" -m pytest -m gpu "$folder" -q || failed=1
      done
      return $failed
      ;;
    plans)
      local task
      for task in pretrain sft; do
        "$PYTHON" -m brimful plan "$task" --model chatlm-base --global-batch 256 --memory-limit 20GiB --no-cache || return 1
      done
      ;;
    pretrain) train pretrain brimful,brimful-packed,brimful-padded,hf-tuned,hf-grouped-no-cudnn,hf-32 500 ;;
    sft) train sft brimful,brimful-packed,hf-tuned 400 ;;
    causal) train causal brimful,brimful-packed,hf-4,hf-8,hf-tuned-8 500 ;;
    midrun) "$PYTHON" bench/oom_midrun.py --recover --layout packed --json "$OUT/midrun.json" ;;
    full) train full brimful,hf-tuned-32 400 ;;
    preference) "$PYTHON" bench/dpo.py --output "$OUT/dpo.jsonl" ;;
    peers) "$PYTHON" bench/sft.py --total-seconds 540 --output "$OUT/sft.jsonl" ;;
    seeds) train pretrain brimful,brimful-padded 560 --seeds 0,1,2 --steps 100 ;;
  esac
}

if [ "${1:-}" = list ]; then
  for one in "${PARTS[@]}"; do printf '%-11s %s\n' "$one" "$(about "$one")"; done
  exit 0
fi
[ $# -gt 0 ] || set -- "${PARTS[@]}"
for one in "$@"; do
  [ -n "$(about "$one")" ] || { echo "gpu_check: no part $one. Try: bench/gpu_check.sh list" >&2; exit 2; }
done
mkdir -p "$OUT"
failed=()
for one in "$@"; do
  echo "== $one: $(about "$one")"
  started=$SECONDS
  part "$one" 2>&1 | tee "$OUT/$one.log"
  [ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("$one")
  echo "== $one took $((SECONDS - started)) s"
done
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
