# shellcheck shell=bash
# Shared by the training recipes here: their settings and how their ranks are started. Sourced, not run.
#
# Environment (in brackets: the default):
#   MEGATRON_LM      [installed] a Megatron-LM checkout; `installed`: this project's short pretraining
#                    script on the installed megatron-core
#   CHECKPOINT_DIR   [none] saved there; a run that is started again continues from it
#   DATA_PATH        [mock] Megatron's --data-path, split at spaces
#   TOKENIZER_TYPE, TOKENIZER_MODEL [NullTokenizer for mock data, else HuggingFaceTokenizer]
#   PP, TP, EP, NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, SEQ_LENGTH, GLOBAL_BATCH, TRAIN_ITERS [the recipe's]
#   SCHEDULE         [the recipe's] what --pp-schedule takes; `none`: stock Megatron
#   GPUS_PER_NODE    [8] ranks of a node
#   DEVICE           [cuda] or cpu: gloo and CPU tensors, to try a recipe anywhere
#   EXIT_MINUTES     [none] save and end after so many minutes; a Slurm job then goes back into the queue
#   LOSS_LOG         [none] file for the exact loss of every step
#   PYTHON           [python3] with torch; megatron_ext need not be installed
# Arguments of a recipe are more flags of Megatron's and ours. DRY_RUN=1 prints the command instead.

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() {
    echo "${0##*/}: $*" >&2
    exit 2
}

# set_environment: what a process reads before Python could change it. What is set stays.
set_environment() {
    # Each hardware queue of a GPU runs in order. With one queue, messages, copies of offload and the
    # all-to-alls of MoE chunks wait for the kernels before them. Megatron demands one queue with
    # tensor parallelism before Blackwell, whose overlaps rely on the order of launches.
    local queues=32
    if ((TP > 1)); then queues=1; fi
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-$queues}
    # Activation sets change in number and size, which fragments a cache of fixed segments.
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
    # Messages between ranks need a few multiprocessors, which persistent norm kernels would hold.
    export NVTE_FWD_LAYERNORM_SM_MARGIN=${NVTE_FWD_LAYERNORM_SM_MARGIN:-16}
    export NVTE_BWD_LAYERNORM_SM_MARGIN=${NVTE_BWD_LAYERNORM_SM_MARGIN:-16}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
    export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}
    if [[ ${MEGATRON_LM:-installed} == installed ]]; then unset MEGATRON_LM; else export MEGATRON_LM; fi
}

# train [FLAGS]: ranks of this machine, or of this node's part of a Slurm job, with the recipe's
# settings and these flags.
train() {
    local name nodes=${SLURM_JOB_NUM_NODES:-1} python=${PYTHON:-python3}
    TP=${TP:-1} EP=${EP:-1} GPUS_PER_NODE=${GPUS_PER_NODE:-8} DEVICE=${DEVICE:-cuda}
    for name in PP TP EP NUM_LAYERS HIDDEN_SIZE NUM_HEADS SEQ_LENGTH GLOBAL_BATCH TRAIN_ITERS \
        GPUS_PER_NODE; do
        [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name must be a whole number >= 1, got '${!name}'."
    done
    local flags=(
        --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$NUM_HEADS"
        --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
        --expert-model-parallel-size "$EP" --micro-batch-size 1 --global-batch-size "$GLOBAL_BATCH"
        --train-iters "$TRAIN_ITERS" --lr 3e-4 --min-lr 0 --lr-decay-style cosine
        --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0 --bf16
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --log-interval 10 --log-throughput --eval-interval 1000 --eval-iters 0
    )
    # Its norms need a GPU's libraries.
    if ((TP > 1)) && [[ $DEVICE == cuda ]]; then flags+=(--sequence-parallel); fi
    if [[ ${DATA_PATH:-mock} == mock ]]; then
        flags+=(--mock-data --tokenizer-type NullTokenizer --vocab-size 32000)
    else
        local paths
        read -r -a paths <<<"$DATA_PATH"
        flags+=(--data-path "${paths[@]}" --split "99,1,0"
            --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}"
            --tokenizer-model "${TOKENIZER_MODEL:?the tokenizer model or folder of DATA_PATH}")
    fi
    if [[ -n ${CHECKPOINT_DIR:-} ]]; then
        flags+=(--load "$CHECKPOINT_DIR" --save "$CHECKPOINT_DIR" --save-interval 500
            --ckpt-format torch_dist --exit-signal-handler)
    fi
    if [[ -n ${EXIT_MINUTES:-} ]]; then flags+=(--exit-duration-in-mins "$EXIT_MINUTES"); fi
    if [[ $SCHEDULE != none ]]; then flags+=(--pp-schedule "$SCHEDULE"); fi
    set_environment
    local ranks=(--nnodes "$nodes" --nproc-per-node "$GPUS_PER_NODE")
    if ((nodes > 1)); then
        ranks+=(--node-rank "$SLURM_NODEID" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    else
        ranks+=(--standalone)
    fi
    local launcher=(-m megatron_ext.launch)
    if [[ $DEVICE == cpu ]]; then launcher+=(--device cpu); fi
    if [[ -n ${LOSS_LOG:-} ]]; then launcher+=(--loss-log "$LOSS_LOG"); fi
    local command=("$python" -m torch.distributed.run "${ranks[@]}" "${launcher[@]}" pretrain_gpt
        "${flags[@]}" "$@")
    if [[ -n ${DRY_RUN:-} ]]; then
        printf '%q ' "${command[@]}"
        echo
        return
    fi
    "${command[@]}"
}

# job RECIPE [FLAGS]: in a Slurm job, RECIPE on every node; the job goes back into the queue where
# EXIT_MINUTES ended it before TRAIN_ITERS.
job() {
    local recipe=$1 options=() before now
    shift
    [[ -n ${SLURM_JOB_ID:-} ]] || die "this is a job: submit it with sbatch."
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
    if [[ -n ${CONTAINER_IMAGE:-} ]]; then
        options+=(--container-image "$CONTAINER_IMAGE" --container-workdir "$REPO"
            --container-mounts "$REPO:$REPO${CHECKPOINT_DIR:+,$CHECKPOINT_DIR:$CHECKPOINT_DIR}${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
    fi
    before=$(saved_iteration)
    srun --ntasks-per-node 1 --kill-on-bad-exit=1 --label "${options[@]}" \
        "$REPO/scripts/$recipe.sh" "$@"
    now=$(saved_iteration)
    if [[ -n ${EXIT_MINUTES:-} ]] && ((before < now && now < TRAIN_ITERS)); then
        echo "stopped at iteration $now of $TRAIN_ITERS; back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}

# saved_iteration: number of the newest checkpoint; 0 without one.
saved_iteration() {
    local tracker=${CHECKPOINT_DIR:-}/latest_checkpointed_iteration.txt text=0
    if [[ -f $tracker ]]; then text=$(<"$tracker"); fi
    if [[ $text =~ ^[0-9]+$ ]]; then echo "$((10#$text))"; else echo 0; fi
}
