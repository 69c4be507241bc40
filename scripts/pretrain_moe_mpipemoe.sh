#!/usr/bin/env bash
# A mixture-of-experts GPT, its MoE layers in chunks (MPipeMoE): 32 layers of hidden size 4096, 8
# experts on 8 ranks of which each token takes 2.
#
#   MEGATRON_LM=... DATA_PATH=... TOKENIZER_MODEL=... scripts/pretrain_moe_mpipemoe.sh [FLAGS]
#
# MOE_CHUNKS [2] is what --moe-pipeline-chunks takes, MOE_REUSE [none] what --moe-memory-reuse takes,
# NUM_EXPERTS [8], TOP_K [2]. scripts/training.sh lists the other settings.
set -euo pipefail
# shellcheck source=scripts/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
PP=${PP:-1} EP=${EP:-8} SCHEDULE=${SCHEDULE:-none} GLOBAL_BATCH=${GLOBAL_BATCH:-256}
NUM_LAYERS=${NUM_LAYERS:-32} HIDDEN_SIZE=${HIDDEN_SIZE:-4096} NUM_HEADS=${NUM_HEADS:-32}
SEQ_LENGTH=${SEQ_LENGTH:-4096} TRAIN_ITERS=${TRAIN_ITERS:-10000}
flags=(
    --num-experts "${NUM_EXPERTS:-8}" --moe-router-topk "${TOP_K:-2}" --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall --moe-pipeline-chunks "${MOE_CHUNKS:-2}"
    --moe-memory-reuse "${MOE_REUSE:-none}"
)
# One kernel for all experts of a rank; it is in Transformer Engine.
if [[ ${DEVICE:-cuda} == cuda ]]; then flags+=(--moe-grouped-gemm); fi
train "${flags[@]}" "$@"
