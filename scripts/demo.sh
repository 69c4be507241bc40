#!/usr/bin/env bash
# The main job, on any machine: the same GPT from the same weights, trained on four CPU ranks under
# stock Megatron's 1F1B and then under V-Half, and compared. Needs no GPU; safe to run again.
#
# Usage: ./scripts/demo.sh
#
# Environment (all optional):
#   SCHEDULE      what is compared with stock 1F1B; default: v-half (or v-zb, zb-h1, 1f1b,
#                 interleaved)
#   STEPS         training steps of each run; default: 60
#   MEGATRON_LM   a Megatron-LM checkout whose own pretrain_gpt.py is to run, instead of this
#                 project's short script on the installed megatron-core
#   PYTHON        the interpreter to build the environment with
set -euo pipefail

# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

SCHEDULE=${SCHEDULE:-v-half}
STEPS=${STEPS:-60}
RANKS=4
MICROBATCHES=8
OUT=$REPO/demo_output

prepare_environment
cd "$REPO"
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"

if [[ -n ${MEGATRON_LM:-} ]]; then
    export MEGATRON_LM
fi

say "data: bytes of the Python standard library's sources"
LIBRARY=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
python scripts/prepare_text_dataset.py --input "$LIBRARY" --glob '*.py' --max-mb 20 \
    --output "$OUT/data/stdlib"

# shellcheck disable=SC2054  # the comma belongs to Megatron's --split
COMMON=(
    --num-layers 8 --hidden-size 128 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
    --untie-embeddings-and-output-weights
    --data-path "$OUT/data/stdlib" --split 98,1,1
    --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 1
    --micro-batch-size 4 --global-batch-size $((4 * MICROBATCHES))
    --lr 3e-3 --min-lr 3e-3 --lr-decay-style constant --weight-decay 0.01
    --attention-dropout 0 --hidden-dropout 0 --clip-grad 0
    --eval-iters 1 --eval-interval 1000 --log-interval 1
    --ckpt-format torch_dist --seed 1234
)

# train NAME RANKS [flags]: one run under the launcher, its log in $OUT/NAME.log.
train() {
    local name=$1 ranks=$2
    shift 2
    timeout 1500 python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        -m megatron_ext.launch --device cpu --loss-log "$OUT/$name.jsonl" \
        pretrain_gpt "${COMMON[@]}" "$@" 2>&1 |
        python -m scripts.demo_report progress --name "$name" --log "$OUT/$name.log"
}

say "initial weights: one stock step with learning rate 0"
rm -rf "$OUT"/{weights,stock,ours,trace} "$OUT"/*.jsonl "$OUT"/*.log
train weights 1 --train-iters 1 --lr 0 --min-lr 0 --weight-decay 0 \
    --save "$OUT/weights" --save-interval 1 --no-save-optim --no-save-rng

START=(
    --load "$OUT/weights" --finetune --no-load-optim --no-load-rng
    --pipeline-model-parallel-size "$RANKS" --train-iters "$STEPS"
    --save-interval "$STEPS" --no-save-optim --no-save-rng
)
say "stock Megatron: 1F1B, $RANKS ranks, $STEPS steps of $MICROBATCHES microbatches"
train stock "$RANKS" "${START[@]}" --save "$OUT/stock"

OURS=(--pp-schedule "$SCHEDULE" --pp-trace "$OUT/trace")
if [[ $SCHEDULE == interleaved ]]; then
    OURS+=(--num-virtual-stages-per-pipeline-rank 2)
fi
say "the same under --pp-schedule $SCHEDULE"
train ours "$RANKS" "${START[@]}" --save "$OUT/ours" "${OURS[@]}"

say "result"
python -m megatron_ext show --schedule "$SCHEDULE" --pp "$RANKS" --microbatches "$MICROBATCHES" \
    --measured "$OUT/trace" --output "$OUT/timeline.svg" >/dev/null
python -m scripts.demo_report compare --output "$OUT" --schedule "$SCHEDULE" --pp "$RANKS" \
    --microbatches "$MICROBATCHES" --steps "$STEPS"
