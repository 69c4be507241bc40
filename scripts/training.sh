# shellcheck shell=bash
# Environment that every training script here reads (in brackets: the default; what you set wins):
#
# Required:
#   MEGATRON_LM      a Megatron-LM checkout; or `installed`: the installed megatron-core with this
#                    project's short pretraining script
#   CHECKPOINT_DIR   where checkpoints are saved, and loaded from if there are any
#   DATA_PATH        Megatron's --data-path (weights allowed, split at spaces), or `mock`
#   TOKENIZER_MODEL  the tokenizer's model or folder; not for NullTokenizer
# Optional:
#   TOKENIZER_TYPE   [HuggingFaceTokenizer; NullTokenizer for mock data]
#   VOCAB_SIZE       [32000] for NullTokenizer only
#   SPLIT            [99,1,0] training, validation, test
#   PP, TP, CP, EP   [PP and EP: the recipe's; others 1] parallel sizes
#   NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, SEQ_LENGTH [the recipe's]
#   MICRO_BATCH, GLOBAL_BATCH [the recipe's] in sequences
#   TRAIN_ITERS      [the recipe's] iterations of the whole training, over all restarts
#   LR               [3e-4]
#   SAVE_INTERVAL    [500] iterations
#   LOG_INTERVAL     [10] iterations
#   EXIT_MINUTES     [none] save and end after so many minutes, between two iterations
#   TRACE_DIR        [none] --pp-trace: every rank's measured timeline
#   GPUS_PER_NODE    [8] ranks of a node
#   DEVICE           [cuda] or cpu: gloo and CPU tensors, to try a script anywhere
#   PYTHON           [python3] with torch; megatron_ext need not be installed
#   EXTRA_ARGS       [none] more flags, split at spaces, nothing expanded. Arguments of the script
#                    are more flags too, word by word
#   With --check as an argument the settings are checked and the command line is printed, no more.
#   CUDA_DEVICE_MAX_CONNECTIONS, PYTORCH_CUDA_ALLOC_CONF, NCCL_*, NVTE_*, OMP_NUM_THREADS
#                    [see set_environment in scripts/training.sh, with reasons]

REPO=${MEGATRON_EXT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
HELP_FILES=("${BASH_SOURCE[0]}") # whose first lines --help shows after the script's own
SAVING=yes
CHECK=no   # --check: print what would be started
MISSING=() # settings, one sentence each
# shellcheck disable=SC2034  # for scripts/slurm
TOLD=84 # exit status of a task that was told to stop and did not end well

say() {
    echo "${SCRIPT_NAME:-${0##*/}}: $*" >&2
}

die() {
    say "$*"
    exit 2
}

# help_or_go FILE [ARGUMENTS]: print the first lines of FILE and of HELP_FILES, if asked to, and exit;
# with --check among ARGUMENTS, nothing will be started.
help_or_go() {
    case ${2:-} in
    -h | --help)
        local file
        for file in "$1" "${HELP_FILES[@]}"; do
            sed -nE '/^#(!|SBATCH| shellcheck)/d; /^#/!q; s/^# ?//p' "$file"
            echo
        done
        exit 0
        ;;
    esac
    local word
    for word in "${@:2}"; do
        if [[ $word == --check ]]; then CHECK=yes; fi
    done
}

# would_run COMMAND...: with --check, print it and exit.
would_run() {
    if [[ $CHECK == no ]]; then return; fi
    say "all settings are there; this would be started:"
    printf '%q ' "$@"
    echo
    exit 0
}

# require NAME MEANING: NAME must be set and not empty, or `required` will say so.
require() {
    [[ -n ${!1:-} ]] || MISSING+=("$1 is not set: $2; ")
}

# required: end with all that is missing, at once.
required() {
    ((${#MISSING[@]} == 0)) || die "$(printf '%s' "${MISSING[@]}")see --help."
}

# whole NAME...: each must be a whole number >= 1. Bash runs code that it finds in a number which it
# calculates with, so nothing is calculated before this.
whole() {
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]] || die "$name must be a whole number >= 1, got '${!name}'."
    done
}

# one_of NAME VALUE...
one_of() {
    local name=$1 value
    shift
    for value in "$@"; do
        if [[ ${!name} == "$value" ]]; then return; fi
    done
    die "$name must be one of: $*; got '${!name}'."
}

# words VARIABLE: its value split at spaces into the array WORDS. No globs, no expansion, no eval.
words() {
    [[ ${!1:-} != *[\"\'\\]* ]] ||
        die "$1 is split at spaces and has a quote or backslash; give such flags as arguments of" \
            "the script, where the shell has split them already."
    read -r -d '' -a WORDS <<<"${!1:-}" || true
}

# recipe NAME: the defaults of one kind of run. What is set already stays.
recipe() {
    RECIPE=$1
    TP=${TP:-1} CP=${CP:-1} SEQ_LENGTH=${SEQ_LENGTH:-4096}
    NUM_LAYERS=${NUM_LAYERS:-32} HIDDEN_SIZE=${HIDDEN_SIZE:-4096} NUM_HEADS=${NUM_HEADS:-32}
    MICRO_BATCH=${MICRO_BATCH:-1} TRAIN_ITERS=${TRAIN_ITERS:-10000}
    NUM_EXPERTS=${NUM_EXPERTS:-} OFFLOAD=${OFFLOAD:-off} BIND_NUMA=${BIND_NUMA:-0}
    case $RECIPE in
    v_half)
        PP=${PP:-8} SCHEDULE=${SCHEDULE:-v-half} GLOBAL_BATCH=${GLOBAL_BATCH:-32}
        ;;
    pipeoffload)
        # Copies between host and device halve their rate across NUMA nodes, so ranks are bound.
        PP=${PP:-8} SCHEDULE=${SCHEDULE:-v-half} GLOBAL_BATCH=${GLOBAL_BATCH:-32}
        if [[ $OFFLOAD == off ]]; then OFFLOAD=auto; fi
        if [[ ${DEVICE:-cuda} == cuda ]]; then BIND_NUMA=1; fi
        ;;
    mpipemoe)
        PP=${PP:-1} EP=${EP:-8} SCHEDULE=${SCHEDULE:-none} GLOBAL_BATCH=${GLOBAL_BATCH:-256}
        NUM_EXPERTS=${NUM_EXPERTS:-8} TOP_K=${TOP_K:-2}
        MOE_CHUNKS=${MOE_CHUNKS:-2} MOE_REUSE=${MOE_REUSE:-none}
        ;;
    *) die "no recipe $RECIPE" ;;
    esac
    EP=${EP:-1}
}

# check_settings NODES: everything that can be known to be wrong before a rank starts.
check_settings() {
    DEVICE=${DEVICE:-cuda} PYTHON=${PYTHON:-python3} GPUS_PER_NODE=${GPUS_PER_NODE:-8}
    require MEGATRON_LM "a Megatron-LM checkout, or installed"
    require CHECKPOINT_DIR "where checkpoints go and where a restart finds them"
    require DATA_PATH "Megatron's --data-path, or mock"
    local mock=${DATA_PATH:-mock}
    if [[ $mock == mock ]]; then TOKENIZER_TYPE=${TOKENIZER_TYPE:-NullTokenizer}; fi
    TOKENIZER_TYPE=${TOKENIZER_TYPE:-HuggingFaceTokenizer}
    if [[ $TOKENIZER_TYPE != NullTokenizer ]]; then
        require TOKENIZER_MODEL "the model or folder of $TOKENIZER_TYPE"
    fi
    required
    one_of DEVICE cuda cpu
    NODES=$1 LOG_INTERVAL=${LOG_INTERVAL:-10} SAVE_INTERVAL=${SAVE_INTERVAL:-500} LR=${LR:-3e-4}
    whole NODES GPUS_PER_NODE PP TP CP EP NUM_LAYERS HIDDEN_SIZE NUM_HEADS SEQ_LENGTH MICRO_BATCH \
        GLOBAL_BATCH TRAIN_ITERS SAVE_INTERVAL LOG_INTERVAL
    if [[ -n ${EXIT_MINUTES:-} ]]; then whole EXIT_MINUTES; fi
    # Absolute, because steps may have another working directory.
    [[ $CHECKPOINT_DIR == /* ]] || CHECKPOINT_DIR=$PWD/$CHECKPOINT_DIR
    [[ $MEGATRON_LM == /* || $MEGATRON_LM == installed ]] || MEGATRON_LM=$PWD/$MEGATRON_LM
    if [[ $MEGATRON_LM != installed && ! -f $MEGATRON_LM/pretrain_gpt.py ]]; then
        die "MEGATRON_LM is $MEGATRON_LM, which has no pretrain_gpt.py; scripts/get_megatron.sh" \
            "core_v0.19.0 fetches a checkout and prints its path."
    fi
    [[ -d $REPO/megatron_ext ]] ||
        die "$REPO has no megatron_ext; submit from this repository's root, or set MEGATRON_EXT to it."
    local world=$((NODES * GPUS_PER_NODE)) model=$((TP * CP * PP))
    ((world % model == 0)) ||
        die "$NODES node(s) with $GPUS_PER_NODE ranks are $world ranks, which TP*CP*PP = $TP*$CP*$PP" \
            "= $model does not divide; change one of them."
    local each=$((MICRO_BATCH * (world / model)))
    ((GLOBAL_BATCH % each == 0)) ||
        die "GLOBAL_BATCH=$GLOBAL_BATCH is no multiple of MICRO_BATCH * data-parallel ranks =" \
            "$MICRO_BATCH * $((world / model)); make it one."
    if [[ -n ${NUM_EXPERTS:-} ]]; then
        whole NUM_EXPERTS TOP_K
        ((NUM_EXPERTS % EP == 0)) || die "NUM_EXPERTS=$NUM_EXPERTS is no multiple of EP=$EP; make it one."
        ((world % (EP * TP * PP) == 0)) ||
            die "$world ranks are no multiple of EP*TP*PP = $EP*$TP*$PP; change one of them."
    fi
}

# set_environment: what a process reads before Python could change it.
set_environment() {
    # Each hardware queue of a GPU runs in order. With one queue, transfers between ranks, copies of
    # offload and all-to-alls of MoE chunks wait for the kernels before them, and nothing is hidden:
    # so 32, the most there is. Megatron demands 1 with tensor or context parallelism before
    # Blackwell, whose overlaps rely on launch order; on Blackwell set 32 for those too. With MoE
    # layers in chunks it is not demanded, and 1 would undo what they are for.
    local in_order=$((TP * CP > 1))
    case ${MOE_CHUNKS:-off} in
    off | 1) ;;
    *) in_order=0 ;;
    esac
    if ((in_order)); then
        export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    else
        export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
    fi
    # Schedules, and offload more so, free and take blocks of changing sizes, which fragments a cache
    # of fixed segments. (torch from 2.9 on also takes this as PYTORCH_ALLOC_CONF.)
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
    # Transfers between ranks need a few multiprocessors, which persistent norm kernels would hold.
    export NVTE_FWD_LAYERNORM_SM_MARGIN=${NVTE_FWD_LAYERNORM_SM_MARGIN:-16}
    export NVTE_BWD_LAYERNORM_SM_MARGIN=${NVTE_BWD_LAYERNORM_SM_MARGIN:-16}
    # Activations are megabytes: larger pieces for point-to-point messages over the network.
    export NCCL_P2P_NET_CHUNKSIZE=${NCCL_P2P_NET_CHUNKSIZE:-2097152}
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
    export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}
    if [[ $MEGATRON_LM == installed ]]; then unset MEGATRON_LM; else export MEGATRON_LM; fi
}

# refuse_owned FLAG...: refuse flags that the scripts set themselves, by whichever variable.
refuse_owned() {
    local argument
    for argument in "$@"; do
        case ${argument%%=*} in
        --train-iters | --train-samples) die "$argument: set TRAIN_ITERS instead, by which a restart knows its end." ;;
        --save | --load) die "$argument: set CHECKPOINT_DIR instead, so that a restart continues." ;;
        --pp-schedule) die "$argument: set SCHEDULE instead." ;;
        --pp-offload) die "$argument: set OFFLOAD instead." ;;
        esac
    done
}

# build_arguments [FLAGS]: all of Megatron's and our flags, in the array ARGUMENTS.
build_arguments() {
    words EXTRA_ARGS
    refuse_owned "${WORDS[@]}" "$@"
    local extra=("${WORDS[@]}") word
    for word in "$@"; do
        if [[ $word != --check ]]; then extra+=("$word"); fi
    done
    model_arguments
    data_arguments
    ARGUMENTS=(
        "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}"
        --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
        --context-parallel-size "$CP" --micro-batch-size "$MICRO_BATCH"
        --global-batch-size "$GLOBAL_BATCH" --train-iters "$TRAIN_ITERS"
        --lr "$LR" --min-lr 0 --lr-decay-style cosine --lr-warmup-fraction 0.01
        --weight-decay 0.1 --clip-grad 1.0
        --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --load "$CHECKPOINT_DIR" --ckpt-format torch_dist --exit-signal-handler
        --log-interval "$LOG_INTERVAL" --log-throughput --eval-interval 1000 --eval-iters 0
    )
    # Sequence parallelism comes with tensor parallelism; its norms need a GPU's libraries.
    if ((TP > 1)) && [[ $DEVICE == cuda ]]; then ARGUMENTS+=(--sequence-parallel); fi
    if [[ $SAVING == yes ]]; then
        ARGUMENTS+=(--save "$CHECKPOINT_DIR" --save-interval "$SAVE_INTERVAL")
    fi
    if [[ -n ${EXIT_MINUTES:-} ]]; then ARGUMENTS+=(--exit-duration-in-mins "$EXIT_MINUTES"); fi
    schedule_arguments
    ARGUMENTS+=("${SCHEDULE_ARGS[@]}" "${extra[@]}")
}

model_arguments() {
    MODEL_ARGS=(
        --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$NUM_HEADS"
        --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    )
    if [[ -n ${NUM_EXPERTS:-} ]]; then
        MODEL_ARGS+=(
            --num-experts "$NUM_EXPERTS" --moe-router-topk "$TOP_K" --expert-model-parallel-size "$EP"
            --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2
        )
        # One kernel for all experts of a rank; it is in Transformer Engine.
        if [[ $DEVICE == cuda ]]; then MODEL_ARGS+=(--moe-grouped-gemm); fi
    fi
}

data_arguments() {
    if [[ $DATA_PATH == mock ]]; then
        DATA_ARGS=(--mock-data)
    else
        words DATA_PATH
        DATA_ARGS=(--data-path "${WORDS[@]}")
    fi
    DATA_ARGS+=(--split "${SPLIT:-99,1,0}" --tokenizer-type "$TOKENIZER_TYPE")
    if [[ $TOKENIZER_TYPE == NullTokenizer ]]; then
        VOCAB_SIZE=${VOCAB_SIZE:-32000}
        whole VOCAB_SIZE
        DATA_ARGS+=(--vocab-size "$VOCAB_SIZE")
    else
        DATA_ARGS+=(--tokenizer-model "$TOKENIZER_MODEL")
    fi
}

schedule_arguments() {
    SCHEDULE_ARGS=()
    if [[ $SCHEDULE != none ]]; then SCHEDULE_ARGS+=(--pp-schedule "$SCHEDULE"); fi
    if [[ $OFFLOAD != off ]]; then SCHEDULE_ARGS+=(--pp-offload "$OFFLOAD"); fi
    if [[ -n ${MOE_CHUNKS:-} ]]; then
        SCHEDULE_ARGS+=(--moe-pipeline-chunks "$MOE_CHUNKS" --moe-memory-reuse "$MOE_REUSE")
    fi
    if [[ -n ${TRACE_DIR:-} ]]; then SCHEDULE_ARGS+=(--pp-trace "$TRACE_DIR"); fi
}

# launcher: what follows torchrun's own options or `python`, before Megatron's flags, in the array
# LAUNCHER. LOSS_LOG names a file for exact losses.
launcher() {
    LAUNCHER=(-m megatron_ext.launch)
    if [[ $DEVICE == cpu ]]; then LAUNCHER+=(--device cpu); fi
    if [[ -n ${LOSS_LOG:-} ]]; then LAUNCHER+=(--loss-log "$LOSS_LOG"); fi
    LAUNCHER+=(pretrain_gpt)
}

# numa_options: torchrun's option that binds every rank near its GPU, in the array NUMA_OPTIONS.
numa_options() {
    NUMA_OPTIONS=()
    if [[ ${BIND_NUMA:-0} != 1 ]]; then return; fi
    if "$PYTHON" -m torch.distributed.run --help 2>/dev/null | grep -q -- --numa-binding; then
        NUMA_OPTIONS=(--numa-binding node)
    else
        say "this torch has no torchrun --numa-binding, so ranks are not bound near their GPUs and" \
            "copies to the host may be slow; on a cluster, LAUNCH=srun binds without it."
    fi
}

# wait_for PID: its exit status. A trap that ends `wait` early sets SIGNALLED.
wait_for() {
    local now again
    while true; do
        SIGNALLED=
        now=0
        wait "$1" || now=$?
        if [[ -z $SIGNALLED ]]; then return "$now"; fi
        if kill -0 "$1" 2>/dev/null; then continue; fi
        # It ended meanwhile, and $now may be the signal's. Bash may have forgotten it: 127.
        again=0
        wait "$1" || again=$?
        if ((again == 127)); then again=$now; fi
        return "$again"
    done
}

# one_node [FLAGS]: a training run of this machine's ranks.
one_node() {
    check_settings 1
    build_arguments "$@"
    set_environment
    launcher
    torchrun_here "${LAUNCHER[@]}" "${ARGUMENTS[@]}"
}

# torchrun_here ARGUMENTS...: this machine's ranks under torchrun.
torchrun_here() {
    numa_options
    local command=("$PYTHON" -m torch.distributed.run --standalone
        --nproc-per-node "$GPUS_PER_NODE" "${NUMA_OPTIONS[@]}" "$@")
    would_run "${command[@]}"
    "${command[@]}"
}
