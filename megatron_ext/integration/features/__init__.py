"""The features, in the order in which their hooks are bound (see ``Feature.start``)."""

from __future__ import annotations

from ..feature import Feature
from .checkpoint import Checkpoint
from .consistency import Consistency
from .lengths import Lengths
from .moe import MoE
from .offload import Offload
from .overlap import Overlap
from .profile import ProfileSteps
from .recompute import Recompute
from .schedule import Schedule
from .slices import Slices
from .split_backward import SplitBackward
from .telemetry import Telemetry
from .v_placement import VPlacement
from .vocabulary import VocabularyParallel

# Why this order: a profile is read, and sequences are cut, before the schedule is chosen; what a
# step has is read behind the queues of its slices; profiles are written after all else of an
# iteration has ended; offload wraps the linear
# layers that split their backward pass; a trace is written while offloaded sets are still counted;
# the vocabulary is shared out of a model whose ends lie where V placement has them; pairs take the
# place of the passes that are left then; MoE layers see a step begin around the schedule that runs
# it; the ranks compare the outcome of all checks.
FEATURES: tuple[type[Feature], ...] = (
    ProfileSteps,
    Lengths,
    Slices,
    Schedule,
    SplitBackward,
    Offload,
    Recompute,
    Telemetry,
    Checkpoint,
    VPlacement,
    VocabularyParallel,
    Overlap,
    MoE,
    Consistency,
)
