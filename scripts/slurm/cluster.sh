# shellcheck shell=bash
# Environment that every job here reads, beside that of scripts/training.sh:
#
# Required:
#   CONTAINER_IMAGE  for pyxis and enroot: nvcr.io#nvidia/pytorch:TAG or the path of a .sqsh file;
#                    or `none`: the nodes' own Python
# Optional:
#   LAUNCH           [torchrun] one task a node, which starts torchrun; or srun: one task a GPU
#   MEGATRON_EXT     [the folder that sbatch was called in] this repository
#   CONTAINER_MOUNTS [none] SRC:DST,... besides this repository, MEGATRON_LM and CHECKPOINT_DIR:
#                    data and tokenizer
#   BIND_NUMA        [1 for offload jobs, else 0] bind every rank to the NUMA node of its GPU
#   MAX_RESTARTS     [20] most times that a job puts itself back into the queue
#   MASTER_PORT      [from the job's number]
#
# When the job's time ends, Slurm sends SIGUSR1 (#SBATCH --signal), and by
# `scancel --signal=USR1 --batch JOBID` so can you. The run then saves between two iterations and
# ends, and the job goes back into the queue and continues from its checkpoint. It does so too after
# EXIT_MINUTES, and on preemption, where Slurm sends SIGTERM to the ranks and grants them some time.
# After `scancel JOBID` or an error it does not go back, nor where its time was too short to save
# anything new.
#
# Before you submit: `bash scripts/slurm/JOB.sbatch --check` on the login node lists all that is
# missing at once, or prints the command line of the job (for one node, or SLURM_JOB_NUM_NODES).

# shellcheck disable=SC2034  # read by scripts/training.sh
SCRIPT_NAME=${SLURM_JOB_NAME:-${0##*/}}
HELP_FILES+=("${BASH_SOURCE[0]}")
STEP_PID=
STOP= # the signal that told this job to stop

# stop SIGNAL: let the ranks save and end. srun itself would take SIGTERM as an order to kill its
# tasks; SIGUSR1 it passes on to them.
stop() {
    STOP=$1 SIGNALLED=yes
    if [[ -n $STEP_PID ]]; then kill -USR1 "$STEP_PID" 2>/dev/null || true; fi
}

# cluster_start: guards, the nodes of this job, what all its steps share (in STEP).
cluster_start() {
    if [[ $CHECK == yes ]]; then SLURM_JOB_ID=${SLURM_JOB_ID:-0}; fi
    [[ -n ${SLURM_JOB_ID:-} ]] ||
        die "this is a job: submit it with sbatch, or check its settings here with --check; --help" \
            "says more."
    require CONTAINER_IMAGE "an image for pyxis, or none"
    LAUNCH=${LAUNCH:-torchrun}
    one_of LAUNCH torchrun srun
    [[ $SLURM_JOB_ID =~ ^[0-9]+$ ]] || die "SLURM_JOB_ID must be a number, got '$SLURM_JOB_ID'."
    if [[ ${CONTAINER_IMAGE:-} == *.sqsh && ! -f $CONTAINER_IMAGE ]]; then
        die "CONTAINER_IMAGE is $CONTAINER_IMAGE, which does not exist; import it with enroot first."
    fi
    MAX_RESTARTS=${MAX_RESTARTS:-20} MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
    whole MAX_RESTARTS MASTER_PORT
    check_settings "${SLURM_JOB_NUM_NODES:-1}"
    # Not through head: with pipefail it would fail when scontrol has more to say.
    MASTER_ADDR=the-first-node
    [[ $CHECK == yes ]] ||
        read -r MASTER_ADDR < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}") ||
        die "scontrol named no node for '${SLURM_JOB_NODELIST:-}'."
    # If torchrun is told to stop itself, it gives its ranks so many seconds, by default 30: too few
    # for a checkpoint. Slurm's own limits still hold.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
    export MASTER_ADDR MASTER_PORT LAUNCH GPUS_PER_NODE NODES BIND_NUMA PYTHON
    set_environment
    # What a rank gets of the node's cores.
    local cores=${SLURM_CPUS_ON_NODE:-$GPUS_PER_NODE}
    whole cores
    if [[ $LAUNCH == torchrun ]]; then
        STEP=(--ntasks="$NODES" --ntasks-per-node=1 --cpus-per-task="$cores")
    else
        local each=$((cores / GPUS_PER_NODE))
        STEP=(--ntasks="$((NODES * GPUS_PER_NODE))" --ntasks-per-node="$GPUS_PER_NODE"
            --cpus-per-task="$((each > 0 ? each : 1))")
        if ((each == 0)); then STEP+=(--overcommit); fi
    fi
    # Neighbours in the pipeline are neighbours on a node; cores are bound by us, near the GPU.
    STEP+=(--nodes="$NODES" --distribution=block --cpu-bind=none --kill-on-bad-exit=1 --label
        --export=ALL)
    container_options
    trap 'stop USR1' USR1
    trap 'stop TERM' TERM
}

# container_options: what pyxis needs, added to STEP.
container_options() {
    if [[ $CONTAINER_IMAGE == none ]]; then return; fi
    local mounts=$REPO:$REPO,$CHECKPOINT_DIR:$CHECKPOINT_DIR
    if [[ -n ${MEGATRON_LM:-} ]]; then mounts+=,$MEGATRON_LM:$MEGATRON_LM; fi
    if [[ -n ${CONTAINER_MOUNTS:-} ]]; then mounts+=,$CONTAINER_MOUNTS; fi
    # An image's own values would win over these without --container-env.
    local names=PYTHONPATH,CUDA_DEVICE_MAX_CONNECTIONS,PYTORCH_CUDA_ALLOC_CONF,OMP_NUM_THREADS
    names+=,NVTE_FWD_LAYERNORM_SM_MARGIN,NVTE_BWD_LAYERNORM_SM_MARGIN
    names+=,NCCL_P2P_NET_CHUNKSIZE,NCCL_DEBUG
    names+=,TORCH_ELASTIC_SHUTDOWN_TIMEOUT,MASTER_ADDR,MASTER_PORT,TOKENIZERS_PARALLELISM,PYTHONUNBUFFERED
    if [[ -n ${MEGATRON_LM:-} ]]; then names+=,MEGATRON_LM; fi
    # A Megatron checkout compiles its dataset helpers at first start, enroot's images are read-only.
    STEP+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts"
        --container-workdir="$REPO" --container-env="$names" --no-container-mount-home
        --container-writable)
}

# step ARGUMENTS...: run the ranks with these arguments of torchrun or python; returns their status.
step() {
    local status=0
    would_run srun "${STEP[@]}" bash "$REPO/scripts/slurm/task.sh" "$@"
    srun "${STEP[@]}" bash "$REPO/scripts/slurm/task.sh" "$@" &
    STEP_PID=$!
    # A signal may have come before there was someone to pass it to.
    if [[ -n $STOP ]]; then stop "$STOP"; fi
    wait_for "$STEP_PID" || status=$?
    STEP_PID=
    return "$status"
}

# saved_iteration: of the newest checkpoint; 0 if there is none.
saved_iteration() {
    local file=$CHECKPOINT_DIR/latest_checkpointed_iteration.txt text=
    if [[ -f $file ]]; then read -r text <"$file" || true; fi
    if [[ $text =~ ^[0-9]{1,12}$ ]]; then echo $((10#$text)); else echo 0; fi
}

# train_and_requeue [FLAGS]: one training run, and back into the queue if it is not at its end.
train_and_requeue() {
    local before status=0 now
    build_arguments "$@"
    launcher
    before=$(saved_iteration)
    say "restart ${SLURM_RESTART_COUNT:-0} on $NODES node(s), from iteration $before of $TRAIN_ITERS"
    step "${LAUNCHER[@]}" "${ARGUMENTS[@]}" || status=$?
    now=$(saved_iteration)
    if ((status == 0 && now >= TRAIN_ITERS)); then
        say "finished: iteration $now of $TRAIN_ITERS"
        exit 0
    fi
    if [[ $STOP == TERM ]]; then
        # Of `scancel JOBID`, which means the end; a preemption tells only the tasks.
        say "stopped by SIGTERM at iteration $now of $TRAIN_ITERS; not restarted"
        exit "$status"
    fi
    if ((status != 0 && status != TOLD)) && [[ $STOP != USR1 ]]; then
        say "the run failed with status $status at iteration $now of $TRAIN_ITERS; not restarted"
        exit "$status"
    fi
    # Who was preempted is not to blame for that.
    ((now > before)) || [[ -z $STOP && $status -eq $TOLD ]] ||
        die "this start has saved no iteration beyond $before, so a restart would repeat it; give" \
            "more time before the end (#SBATCH --signal), or a smaller SAVE_INTERVAL."
    ((${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)) ||
        die "stopped at iteration $now of $TRAIN_ITERS after $MAX_RESTARTS restarts; submit the job" \
            "again, or raise MAX_RESTARTS."
    say "stopped at iteration $now of $TRAIN_ITERS; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
}
