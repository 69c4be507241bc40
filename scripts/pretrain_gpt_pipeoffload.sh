#!/usr/bin/env bash
# A dense GPT on one node with PipeOffload: activations wait for their backward pass on the host.
#
# Usage: MEGATRON_LM=... CHECKPOINT_DIR=... DATA_PATH=... scripts/pretrain_gpt_pipeoffload.sh [FLAGS]
#
# Its defaults: as pretrain_gpt_v_half.sh, and every rank bound to the NUMA node of its GPU.
#   SCHEDULE         [v-half] what --pp-schedule takes
#   OFFLOAD          [auto] half, full, or auto: as much as costs no time by the plan
# Host memory: the plan is checked against it before and in the first step. Give the job all of the
# node's, pinned memory is not swapped.
set -euo pipefail
# shellcheck source=scripts/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
help_or_go "${BASH_SOURCE[0]}" "$@"
recipe pipeoffload
one_node "$@"
