"""What ``--pp-microbatch-costs lengths`` requires of a schedule and of data iterators."""

from __future__ import annotations

from ....plan.lengths import FLAG, LENGTHS
from ...rules import FREE_ORDER as FREE_ORDER
from ...rules import Rule

WHOLE = f"{FLAG} {LENGTHS}"

SINGLE = Rule(
    f"{WHOLE} needs a schedule whose passes run one by one",
    "those of --pp-schedule {schedule} run in pairs",
    "use e.g. v-zb, or drop it",
)
DATA = Rule(
    f"{WHOLE} needs a data iterator to read the lengths of microbatches from",
    "no rank of the pipeline's first stage has one",
    "drop it",
)
NEXT = Rule(
    f"{WHOLE} needs data iterators that next() reads", "a {kind} does not have it", "drop it"
)
DRAWN = Rule(
    f"{WHOLE} needs one microbatch of the data iterator for each forward step",
    "{drawn} were drawn for {microbatches} microbatches",
    "drop it",
)
ENOUGH = Rule(
    f"{WHOLE} needs as many microbatches as num_microbatches",
    "the data iterator ended after {count} microbatches of a step",
    "give as many",
)
KNOWN = Rule(
    f"{WHOLE} needs tokens, or where packed sequences begin, of the data iterator",
    "it gives {what}",
    "give a function in its place, enable(microbatch_costs=function), that takes what the iterator "
    "gives for one microbatch and returns the lengths of its sequences, or leave it out",
)
RETURNED = Rule(
    f"{FLAG} needs a function that returns a microbatch's number of tokens, or the lengths of its "
    "sequences, each 1 or more",
    "the function returned {found} for a microbatch",
    "return one of them",
)
ALONE = Rule(
    "{flag} needs a loss function that does not talk to data replicas, whose microbatches have "
    "other slices, or another order",
    "it calls {name} over ranks {ranks}",
    "let the trainer do that with what the step returns, or drop it",
)
RULES = (FREE_ORDER, SINGLE, DATA, NEXT, DRAWN, ENOUGH, KNOWN, RETURNED, ALONE)
