#!/usr/bin/env bash
# One task of a job step, started by srun on every node (LAUNCH=torchrun) or for every GPU
# (LAUNCH=srun), inside the container if there is one. Its arguments are torchrun's script part.
#
# SIGUSR1 and SIGTERM become SIGTERM to the ranks, which Megatron's --exit-signal-handler waits for.
# torchrun itself should not get it: it would kill its ranks after a while, and fail. Where Slurm
# tracks processes without control groups it does get it; so whoever was told to stop, and failed,
# ends with status TOLD, and the job looks for itself what was saved.
set -euo pipefail

# shellcheck source=scripts/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/../training.sh"
SCRIPT_NAME=task.sh
NUMBER='^[0-9]{1,9}$'
for name in SLURM_PROCID SLURM_LOCALID SLURM_NODEID NODES GPUS_PER_NODE; do
    [[ ${!name:-} =~ $NUMBER ]] || die "$name must be a number, got '${!name:-}'; srun starts this."
done

# near_gpu INDEX: the command that binds to the GPU's NUMA node, in the array NEAR.
near_gpu() {
    local bus node cpus sysfs=${SYSFS:-/sys}
    NEAR=()
    if [[ ${BIND_NUMA:-0} != 1 ]]; then return; fi
    bus=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader --id="$1" 2>/dev/null) || bus=
    bus=${bus,,}
    bus=${bus: -12} # nvidia-smi writes eight digits of the domain, sysfs four
    node=$(cat "$sysfs/bus/pci/devices/$bus/numa_node" 2>/dev/null) || node=
    cpus=$(cat "$sysfs/bus/pci/devices/$bus/local_cpulist" 2>/dev/null) || cpus=
    if [[ $node =~ $NUMBER ]] && command -v numactl >/dev/null; then
        NEAR=(numactl --cpunodebind="$node" --membind="$node")
    elif [[ $cpus =~ ^[0-9,-]+$ ]] && command -v taskset >/dev/null; then
        # Memory goes where it is first touched, so cores are enough.
        NEAR=(taskset --cpu-list "$cpus")
    else
        say "rank $SLURM_PROCID is not bound: this machine does not say which NUMA node GPU $1" \
            "(${bus:-unknown to nvidia-smi}) is on, or has neither numactl nor taskset."
    fi
}

if [[ ${LAUNCH:-} == torchrun ]]; then
    numa_options
    run=("$PYTHON" -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="$GPUS_PER_NODE"
        --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
        "${NUMA_OPTIONS[@]}" "$@")
else
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
    export WORLD_SIZE=$((NODES * GPUS_PER_NODE)) LOCAL_WORLD_SIZE=$GPUS_PER_NODE
    near_gpu "$SLURM_LOCALID"
    run=("${NEAR[@]}" "$PYTHON" "$@")
fi

# tell_ranks: parents are read from /proc, because images often lack ps and pgrep.
# shellcheck disable=SC2329  # called by the trap
tell_ranks() {
    if [[ -z $child ]]; then return; fi
    local pids=("$child")
    if [[ $LAUNCH == torchrun ]]; then
        mapfile -t pids < <(grep -lE "^PPid:[[:space:]]+$child\$" /proc/[0-9]*/status 2>/dev/null |
            cut -d / -f 3)
        # Before there are ranks, nothing is lost by ending torchrun.
        if ((${#pids[@]} == 0)); then pids=("$child"); fi
    fi
    kill -TERM "${pids[@]}" 2>/dev/null || true
}

told=
child=
trap 'SIGNALLED=yes told=yes; tell_ranks' USR1 TERM
# Where Slurm tracks processes without control groups, it signals every process of a task: torchrun
# must survive the SIGUSR1 that is meant for this shell.
(
    trap '' USR1
    trap - TERM
    exec "${run[@]}"
) &
child=$!
if [[ -n $told ]]; then tell_ranks; fi
status=0
wait_for "$child" || status=$?
if [[ -n $told ]] && ((status != 0)); then exit "$TOLD"; fi
exit "$status"
