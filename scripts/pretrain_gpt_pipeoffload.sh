#!/usr/bin/env bash
# A dense GPT with PipeOffload: activations wait for their backward pass on the host. The model of
# pretrain_gpt_v_half.sh.
#
#   MEGATRON_LM=... DATA_PATH=... TOKENIZER_MODEL=... scripts/pretrain_gpt_pipeoffload.sh [FLAGS]
#
# OFFLOAD [auto] is what --pp-offload takes: half, full, a number of chunks, or auto, as much as
# costs no time by the plan. Give a job all of the node's host memory: pinned memory is not swapped.
# scripts/training.sh lists the other settings.
set -euo pipefail
# shellcheck source=scripts/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
PP=${PP:-8} SCHEDULE=${SCHEDULE:-v-half} GLOBAL_BATCH=${GLOBAL_BATCH:-32}
NUM_LAYERS=${NUM_LAYERS:-32} HIDDEN_SIZE=${HIDDEN_SIZE:-4096} NUM_HEADS=${NUM_HEADS:-32}
SEQ_LENGTH=${SEQ_LENGTH:-4096} TRAIN_ITERS=${TRAIN_ITERS:-10000}
train --pp-offload "${OFFLOAD:-auto}" "$@"
