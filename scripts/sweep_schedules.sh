#!/usr/bin/env bash
# One model under stock's 1F1B and interleaved schedule and under ours, on one node, compared in a
# table: time of a step, memory, losses.
#
#   MEGATRON_LM=... scripts/sweep_schedules.sh [FLAGS]
#   DEVICE=cpu scripts/sweep_schedules.sh        four CPU ranks and a small model; in minutes
#
#   SCHEDULES   [zb-h1 v-min v-half v-zb interleaved-zb] names for --pp-schedule
#   CHUNKS      [1 2] virtual stages a rank of the stock runs; 1 is plain 1F1B
#   STEPS       [20] iterations of each run; the first quarter is left out of its time
#   SWEEP_DIR   [sweep-output] logs, losses, traces and the table
#
# All runs start from one checkpoint, made first, and see the same data. The other settings are those
# of pretrain_gpt_v_half.sh, whose model this is.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
STEPS=${STEPS:-20} SWEEP_DIR=${SWEEP_DIR:-$PWD/sweep-output}
read -r -a schedules <<<"${SCHEDULES:-zb-h1 v-min v-half v-zb interleaved-zb}"
read -r -a chunks <<<"${CHUNKS:-1 2}"
if [[ ${DEVICE:-cuda} == cpu ]]; then
    # What four processes do in seconds; it says nothing of a GPU's times.
    export GPUS_PER_NODE=${GPUS_PER_NODE:-4} HIDDEN_SIZE=${HIDDEN_SIZE:-64} NUM_HEADS=${NUM_HEADS:-4}
    export PP=${PP:-$GPUS_PER_NODE} SEQ_LENGTH=${SEQ_LENGTH:-32}
    export NUM_LAYERS=${NUM_LAYERS:-$((2 * PP))} GLOBAL_BATCH=${GLOBAL_BATCH:-$((2 * PP))}
fi
export TRAIN_ITERS=$STEPS CHECKPOINT_DIR=
PP=${PP:-8} GPUS_PER_NODE=${GPUS_PER_NODE:-8} GLOBAL_BATCH=${GLOBAL_BATCH:-32} TP=${TP:-1}
NUM_LAYERS=${NUM_LAYERS:-32}
mkdir -p "$SWEEP_DIR"
rm -rf "$SWEEP_DIR"/weights "$SWEEP_DIR"/*.jsonl "$SWEEP_DIR"/*.trace "$SWEEP_DIR"/runs.txt

# run NAME SCHEDULE [FLAGS]
run() {
    local name=$1 schedule=$2
    shift 2
    # The norm that clipping divides by is a sum over ranks, whose last bits depend on the layout.
    SCHEDULE=$schedule LOSS_LOG=$SWEEP_DIR/$name.jsonl "$HERE/pretrain_gpt_v_half.sh" \
        --log-interval 1 --clip-grad 0 --ckpt-format torch_dist "$@" >"$SWEEP_DIR/$name.log" 2>&1
}

# row NAME SCHEDULE [FLAGS]: a run of the table; one that fails is a row that says so.
row() {
    echo "$1: $STEPS steps"
    echo "$1" >>"$SWEEP_DIR/runs.txt"
    run "$@" --load "$SWEEP_DIR/weights" --finetune --no-load-optim --no-load-rng ||
        echo "$1 failed, its log is $SWEEP_DIR/$1.log"
}

echo "weights: one stock step with learning rate 0; all runs start from them"
run weights none --save "$SWEEP_DIR/weights" --save-interval 1 --train-iters 1 --lr 0 \
    --weight-decay 0 --no-save-optim --no-save-rng || {
    echo "the first run failed, its log is $SWEEP_DIR/weights.log" >&2
    exit 1
}
for count in "${chunks[@]}"; do
    if ((count == 1)); then
        row stock-1f1b none
    elif ((NUM_LAYERS % (PP * count) == 0)); then
        row "stock-interleaved-v$count" none --num-virtual-stages-per-pipeline-rank "$count"
    fi
done
for name in "${schedules[@]}"; do
    flags=(--pp-trace "$SWEEP_DIR/$name.trace")
    case $name in
    interleaved* | gis* | po) flags+=(--num-virtual-stages-per-pipeline-rank 2) ;;
    esac
    row "$name" "$name" "${flags[@]}"
done
PYTHONPATH=$HERE/..${PYTHONPATH:+:$PYTHONPATH} "${PYTHON:-python3}" -m scripts.sweep_report \
    "$SWEEP_DIR" --pp "$PP" --steps "$STEPS" \
    --microbatches "$((GLOBAL_BATCH * TP * PP / GPUS_PER_NODE))" --device "${DEVICE:-cuda}"
