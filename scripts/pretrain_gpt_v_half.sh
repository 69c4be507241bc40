#!/usr/bin/env bash
# A dense GPT under V-Half: half of 1F1B's activations, about its speed or better. 32 layers of
# hidden size 4096, 8 pipeline ranks, 32 microbatches of a sequence of 4096.
#
#   MEGATRON_LM=... DATA_PATH=... TOKENIZER_MODEL=... scripts/pretrain_gpt_v_half.sh [FLAGS]
#
# scripts/training.sh lists the settings.
set -euo pipefail
# shellcheck source=scripts/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
PP=${PP:-8} SCHEDULE=${SCHEDULE:-v-half} GLOBAL_BATCH=${GLOBAL_BATCH:-32}
NUM_LAYERS=${NUM_LAYERS:-32} HIDDEN_SIZE=${HIDDEN_SIZE:-4096} NUM_HEADS=${NUM_HEADS:-32}
SEQ_LENGTH=${SEQ_LENGTH:-4096} TRAIN_ITERS=${TRAIN_ITERS:-10000}
train "$@"
