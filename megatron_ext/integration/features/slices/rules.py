"""What slices require of a run, and of a model and its loss function."""

from __future__ import annotations

from ....plan.slices import FLAG
from ...rules import FREE_ORDER as FREE_ORDER
from ...rules import Rule
from .wanted import WEIGHTS

OF_FILE = Rule(
    "{flag} needs a schedule file with as many slices",
    "--pp-schedule {schedule} has {count} slices a microbatch",
    f"drop it, or give {FLAG} {{count}}",
)
W_OF_FILE = Rule(
    f"{WEIGHTS} {{joined}} needs a schedule file with such W passes",
    "--pp-schedule {schedule} has {has}",
    "drop it",
)
SIZES = Rule("{flag} needs --seq-length and --hidden-size", "one is not given", "add both")
LENGTHS = Rule(
    "{flag} needs --pp-microbatch-costs lengths",
    "lengths differ between microbatches",
    f"add it, or give {FLAG}",
)
CAUSAL = Rule(f"{FLAG} needs causal attention", "{found}", f"drop {FLAG}")
LABELS = Rule(
    f"{FLAG} needs labels, whose losses slices add",
    "the model was called without",
    f"drop {FLAG}, or let the model compute the losses of tokens",
)
PADDING = Rule(f"{FLAG} does not support a padding_mask", "it is not cut", "drop it")
ONE_ROW = Rule(
    f"{FLAG} needs the packed samples of a microbatch in one row",
    "seq_aux_loss takes its {tokens} tokens by {length}",
    "give --micro-batch-size 1 or use aux_loss",
)
THD = Rule(
    f"{FLAG} needs documents that are packed as thd",
    "the model got them as {kind}",
    f"drop {FLAG}",
)
NO_GAPS = Rule(
    f"{FLAG} needs documents that follow one another",
    "{name} differs from cu_seqlens_q",
    f"pack them without padding between them, or drop {FLAG}",
)
INPUT_IDS = Rule(
    f"{FLAG} needs input_ids on all stages where sequences differ in length",
    "slice {unit} has tokens {begin} to {end} of {tokens}, and a layer has {found}",
    "give them to every stage",
)
ROLLED = Rule(
    f"{FLAG} needs multi-token prediction that rolls the model's input",
    "a tensor of shape {shape} is no slice of it",
    f"drop {FLAG} or --mtp-num-layers",
)
LINEAR = Rule(
    f"{FLAG} needs a loss function that is linear in the losses of tokens",
    "{found}",
    f"drop {FLAG}",
)
SUMS = Rule(
    f"{FLAG} needs reports that are sums of losses, or pairs of a sum and its tokens",
    "{name} is {zero} where all losses are 0 and {one} where they are 1",
    f"report it so, or drop {FLAG}",
)
DRAWS = Rule(
    f"{FLAG} does not support a forward step that draws random numbers before it calls the model",
    "it is called for every slice of a microbatch, and each would get others",
    f"draw them in the data set, or drop {FLAG}",
)
CORE = Rule(
    f"{FLAG} needs the core attention of GPTModel's layers",
    "in a {model} {found} of {expected} layers went through it ({kinds})",
    f"drop {FLAG}",
)
NAMED = Rule(
    f"{FLAG} needs a loss function that reports tensors by name in a dictionary",
    "it reported {kind}",
    f"drop {FLAG}, or report such a dictionary",
)
RULES = (
    *(OF_FILE, W_OF_FILE, SIZES, LENGTHS, LABELS, PADDING, ONE_ROW, THD, NO_GAPS),
    *(INPUT_IDS, ROLLED, LINEAR, SUMS, CAUSAL, DRAWS, CORE, NAMED),
)
