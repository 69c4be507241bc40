# shellcheck shell=bash disable=SC2034  # what is set here, training.sh reads
# Read by the two sweeps beside what scripts/training.sh reads:
#
#   SCHEDULES        [zb-h1 v-min v-half v-zb interleaved-zb] names for --pp-schedule
#   CHUNKS           [1 2 4] virtual stages a rank to tune stock's interleaved 1F1B over; 1 is plain
#                    1F1B, and those that the layers do not divide by are left out
#   STEPS            [20] iterations of each run
#   SWEEP_DIR        [sweep-output] logs, losses, traces and the table; CHECKPOINT_DIR is in it
#
# All runs start from one checkpoint, made first, and see the same data: the table at the end says
# whether their losses are the same. Every run's first quarter of the steps is left out of its time.

HELP_FILES+=("${BASH_SOURCE[0]}")

# sweep_settings: a sweep's defaults, which go before the recipe's.
sweep_settings() {
    SCHEDULES=${SCHEDULES:-zb-h1 v-min v-half v-zb interleaved-zb}
    CHUNKS=${CHUNKS:-1 2 4} STEPS=${STEPS:-20} LOG_INTERVAL=1 DATA_PATH=${DATA_PATH:-mock}
    SWEEP_DIR=${SWEEP_DIR:-$PWD/sweep-output} TRACE_DIR=
    [[ $SWEEP_DIR == /* ]] || SWEEP_DIR=$PWD/$SWEEP_DIR
    CHECKPOINT_DIR=$SWEEP_DIR/weights TRAIN_ITERS=$STEPS SAVING=no
    if [[ ${DEVICE:-cuda} == cpu ]]; then
        # What four processes do in seconds; it says nothing of a GPU's times.
        GPUS_PER_NODE=${GPUS_PER_NODE:-4} MEGATRON_LM=${MEGATRON_LM:-installed}
        PP=${PP:-$GPUS_PER_NODE}
        whole PP
        NUM_LAYERS=${NUM_LAYERS:-$((2 * PP))} GLOBAL_BATCH=${GLOBAL_BATCH:-$((2 * PP))}
        HIDDEN_SIZE=${HIDDEN_SIZE:-64} NUM_HEADS=${NUM_HEADS:-4} SEQ_LENGTH=${SEQ_LENGTH:-32}
        VOCAB_SIZE=${VOCAB_SIZE:-128}
    fi
    recipe v_half
    SCHEDULE=none
    whole STEPS
    ((STEPS >= 4)) || die "STEPS must be 4 or more, so that the first can be left out, got $STEPS."
    words SCHEDULES
    SCHEDULE_LIST=("${WORDS[@]}")
    words CHUNKS
    CHUNK_LIST=("${WORDS[@]}")
    local each
    for each in "${CHUNK_LIST[@]}"; do
        [[ $each =~ ^[1-9][0-9]?$ ]] || die "CHUNKS has '$each', which is no number of 1 to 99."
    done
    for each in "${SCHEDULE_LIST[@]}"; do
        [[ $each =~ ^[a-z0-9-]+$ ]] || die "SCHEDULES has '$each', which is no name of a schedule."
    done
}

# sweep START [FLAGS]: all runs, each by the function START, which takes torchrun's script part. A run
# that fails is a row that says so.
sweep() {
    local start=$1 name chunks data_ranks=$((NODES * GPUS_PER_NODE / (TP * CP * PP)))
    shift
    if [[ $CHECK == yes ]]; then
        build_arguments "$@"
        launcher
        "$start" "${LAUNCHER[@]}" "${ARGUMENTS[@]}"
    fi
    mkdir -p "$SWEEP_DIR"
    rm -rf "$CHECKPOINT_DIR" "$SWEEP_DIR"/*.jsonl "$SWEEP_DIR"/*.trace "$SWEEP_DIR"/runs.txt
    # The norm that clipping divides by is a sum over ranks, whose last bits depend on the layout.
    build_arguments "$@"
    COMMON=("${ARGUMENTS[@]}" --clip-grad 0)
    say "weights: one stock step with learning rate 0; all runs start from them"
    sweep_run "$start" weights --save "$CHECKPOINT_DIR" --save-interval 1 --train-iters 1 --lr 0 \
        --weight-decay 0 --no-save-optim --no-save-rng ||
        die "the first run failed, its log is $SWEEP_DIR/weights.log; stopped."
    COMMON+=(--finetune --no-load-optim --no-load-rng)
    for chunks in "${CHUNK_LIST[@]}"; do
        if ((NUM_LAYERS % (PP * chunks) != 0)); then
            say "left out: v=$chunks, since $NUM_LAYERS layers are no multiple of $PP*$chunks"
        elif ((chunks == 1)); then
            sweep_row "$start" stock-1f1b
        else
            sweep_row "$start" "stock-interleaved-v$chunks" \
                --num-virtual-stages-per-pipeline-rank "$chunks"
        fi
    done
    for name in "${SCHEDULE_LIST[@]}"; do
        local flags=(--pp-schedule "$name" --pp-trace "$SWEEP_DIR/$name.trace")
        case $name in
        interleaved* | gis* | po) flags+=(--num-virtual-stages-per-pipeline-rank 2) ;;
        esac
        sweep_row "$start" "$name" "${flags[@]}"
    done
    "$PYTHON" -m scripts.sweep_report "$SWEEP_DIR" --pp "$PP" --steps "$STEPS" \
        --microbatches "$((GLOBAL_BATCH / (MICRO_BATCH * data_ranks)))" --device "$DEVICE"
}

# sweep_row START NAME [FLAGS]: one run of the table.
sweep_row() {
    echo "$2" >>"$SWEEP_DIR/runs.txt"
    say "$2: $STEPS steps"
    sweep_run "$@" || say "$2 failed, its log is $SWEEP_DIR/$2.log"
    if [[ -n ${STOP:-} ]]; then die "told to stop (SIG$STOP) in $2; the sweep is not complete."; fi
}

# sweep_run START NAME [FLAGS]
sweep_run() {
    local start=$1 name=$2
    shift 2
    LOSS_LOG=$SWEEP_DIR/$name.jsonl
    launcher
    "$start" "${LAUNCHER[@]}" "${COMMON[@]}" "$@" >"$SWEEP_DIR/$name.log" 2>&1
}
