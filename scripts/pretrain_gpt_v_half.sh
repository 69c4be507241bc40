#!/usr/bin/env bash
# A dense GPT on one node under V-Half: half of 1F1B's activations, about its speed or better.
#
# Usage: MEGATRON_LM=... CHECKPOINT_DIR=... DATA_PATH=... scripts/pretrain_gpt_v_half.sh [FLAGS]
#        DEVICE=cpu GPUS_PER_NODE=2 PP=2 ... tries it without a GPU
#
# Its defaults: PP=8, a 32-layer model of hidden size 4096, 32 microbatches of one sequence of 4096.
#   SCHEDULE         [v-half] any name or file that --pp-schedule takes; `none` is stock Megatron
# A run that is started again continues from CHECKPOINT_DIR. SIGTERM to its ranks, or EXIT_MINUTES,
# saves and ends it between two iterations.
set -euo pipefail
# shellcheck source=scripts/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
help_or_go "${BASH_SOURCE[0]}" "$@"
recipe v_half
one_node "$@"
