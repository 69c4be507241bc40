#!/usr/bin/env bash
# A mixture-of-experts GPT on one node, its MoE layers in chunks (MPipeMoE).
#
# Usage: MEGATRON_LM=... CHECKPOINT_DIR=... DATA_PATH=... scripts/pretrain_moe_mpipemoe.sh [FLAGS]
#
# Its defaults: PP=1, EP=8, 8 experts of which each token takes 2, 32 layers of hidden size 4096.
#   NUM_EXPERTS      [8], TOP_K [2]
#   MOE_CHUNKS       [2] --moe-pipeline-chunks: off, 1, 2, 4, 8
#   MOE_REUSE        [none] --moe-memory-reuse: none, s0, s1, s2, s3, s4
#   SCHEDULE         [none] with PP > 1: what --pp-schedule takes; none is stock's 1F1B
set -euo pipefail
# shellcheck source=scripts/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
help_or_go "${BASH_SOURCE[0]}" "$@"
recipe mpipemoe
one_node "$@"
