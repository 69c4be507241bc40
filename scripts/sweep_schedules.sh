#!/usr/bin/env bash
# The same model under stock's tuned interleaved 1F1B and under our schedules, on one node, compared.
#
# Usage: MEGATRON_LM=... DATA_PATH=... scripts/sweep_schedules.sh [FLAGS]
#        DEVICE=cpu scripts/sweep_schedules.sh        four CPU ranks and a small model; in minutes
#
# CHECKPOINT_DIR, TRAIN_ITERS, LOG_INTERVAL, SCHEDULE and TRACE_DIR are the sweep's own, DATA_PATH is
# `mock` where it is not set, and with DEVICE=cpu so are the model and MEGATRON_LM (installed).
set -euo pipefail
# shellcheck source=scripts/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
# shellcheck source=scripts/sweep.sh
source "$REPO/scripts/sweep.sh"
help_or_go "${BASH_SOURCE[0]}" "$@"
sweep_settings
check_settings 1
set_environment
sweep torchrun_here "$@"
