"""Training scripts read without being run, beside what bash itself makes of them."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from megatron_ext.prove.sources import from_text

HEAD = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gpus-per-node=4 --ntasks-per-node=4\n"
RUN = "torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 16"

# What both have to make the same words of.
READ = {
    "plain": f"{RUN} --bf16",
    "default of a variable": f"TP=${{TP:-${{GPUS:-4}}}}\n{RUN} --tp $TP",
    "default of an argument": f"TP=${{1:-4}}\n{RUN} --tp $TP",
    "default that is assigned": f": ${{TP:=4}}\n{RUN} --tp $TP",
    "arithmetic": f"A=3; B=$((A + 1)); C=$(( (A-1)*$B / 3 % 5 ))\n{RUN} --tp $B --pp $C",
    "if -z": f'if [ -z "$TP" ]; then\n  TP=4\nfi\n{RUN} --tp $TP',
    "if, elif, else": 'S=7B\nif [ $S = 1B ]; then TP=1\nelif [[ "$S" == 7* && 3 -lt 4 ]]\nthen\n'
    f"  TP=4\nelse\n  TP=8\nfi\n{RUN} --tp $TP",
    "branch off": 'AC=none\nX="--a"\nif [ $AC = full ] || [ $AC = half ]; then X="$X --tp 1"; fi\n'
    f"{RUN} $X",
    "case": f"S=7B\ncase ${{S}} in\n  1B|2B) TP=1 ;;\n  7*) TP=4\n PP=2 ;;\n  *) TP=8 ;;\nesac\n"
    f"{RUN} --tp $TP --pp $PP",
    "test && append": f"A=(--tp 4)\n[[ -n ${{ZB:-1}} ]] && A+=(--zb)\n[ 1 -eq 2 ] && A+=(--no)\n"
    f'{RUN} "${{A[@]}}"',
    "test || group": f"TP=4\n[ $TP -gt 2 ] || {{\n  TP=8\n  echo small\n}}\n{RUN} --tp $TP",
    "function": f'TP=1\nrun() {{\n  local MORE="--pp $2"\n  {RUN} --tp $TP $MORE\n}}\nTP=4\n'
    "run a 2",
    "early exit": f"if [ small = small ]; then\n  {RUN} --tp 1\n  exit 0\nfi\n{RUN} --tp 4",
    "nested branches": f"A=1\nif [ $A = 2 ]; then\n  if [ 1 = 1 ]; then TP=1; fi\nelse\n"
    f"  TP=4\nfi\n{RUN} --tp $TP",
    "quotes": f"L='Et|t|L'\n{RUN} --layout \"$L\" --name 'a b' --cost \\$5 --hash a#b # --no",
    "assignment before": f"OMP_NUM_THREADS=1 A='x y' {RUN} --tp 4",
    "eval of an assignment": f"TP=1\neval 'TP=4'\n{RUN} --tp $TP",
    "assignment before a function": f"TP=1\nrun() {{\n{RUN} --tp $TP\n}}\nTP=4 run",
    "comparison": f"TP=4\nif (( TP > 1 )); then echo many; fi\n{RUN} --tp $TP",
    "output": f"{RUN} --tp 4 2>&1 | tee log",
    "words in text": f'A=("--tp 4" --x)\n{RUN} ${{A[@]}} ${{TP:+--pp 2}} --end',
    "parts of a text": "S=TP4B T=a-b-c U=7 A=(1 4 --x)\nS=${S#TP}\n"
    f"{RUN} --tp ${{S%B}} --a ${{T//-/_}} ${{T/-/_}} ${{T%%-*}} ${{T##*-}} ${{T%-*}} ${{T^^}} "
    "${T^} ${A[1]} ${#A[@]} ${#T} ${T:2} ${T:2:1} ${A[@]:1:2}",
    "arithmetic commands": f"N=4\n((TP = N * 2)); let PP=N-2; (( PP += 1 ))\n"
    f"if (( N > 8 )); then X=1; elif (( N == 4 )); then X=2; fi\n{RUN} --tp $TP --pp $PP --x $X",
    "regular expression": f"S=llama-7b\nif [[ $S =~ ^llama-[0-9]+b$ ]]; then TP=4; fi\n"
    f"{RUN} --tp $TP",
    "several at once": f"export TP=4 PP=2; declare -a A=(--bf16)\n{RUN} --tp $TP --pp $PP "
    "${A[*]}",
    "here-document": f"TP=4\ncat <<EOF >note\nit's $TP\nEOF\nbash <<EOF\n{RUN} --tp $TP\nEOF",
    "brackets in a comment": f"# don't (\nTP=4 # isn't\n{RUN} --tp $TP",
    "not": f"if ! [ 1 = 2 ] && [ ! -z x ]; then TP=4; fi\n{RUN} --tp $TP",
    "option that is unset": f"TP=4\nunset TP\nTP=${{TP:-2}}\n{RUN} --tp $TP",
    "lines": f'O=" \\\n  --tp 4 \\\n  --pp 2 \\\n"\n{RUN} \\\n  $O \\\n  --bf16',
    "eval": f'C="{RUN} --tp 4"\neval "$C"',
    "no arguments": f'{RUN} --tp 4 "$@" --pp 2 $*',
    "no arguments of a function": f'main() {{\n  local MORE="$@"\n  {RUN} --tp 4 $MORE "$@"\n}}\n'
    'main "$@"',
    "bash -c": f'C="{RUN} --tp 4"\nbash -c "cd . && $C"',
}
# What decides the run and is not known: (script, words of the error).
UNKNOWN = {
    "variable": (f"{RUN} --tp $TP", r"line 4: TP is not set.*TP=\.\.\. megatron-ext"),
    "argument": (f"TP=$1\n{RUN} --tp $TP", r"line 4: \$1: the arguments.*line 5.*SCRIPT ARGUMENTS"),
    "all arguments in a word": (f'{RUN} --tp "x$@"', r"line 4: \$@"),
    "argument of a function": (
        f'main() {{\n  {RUN} --tp $1\n}}\nmain "$@"',
        r"line 5: \$1: the arguments",
    ),
    "argument of a function of several": (
        f'main() {{\n  {RUN} --tp $2\n}}\nmain 4 "$@"',
        r"line 7: \$@: the arguments",
    ),
    "command": (f"TP=$(nproc)\n{RUN} --tp $TP", r"line 4: \$\(nproc\) is not evaluated"),
    "loop": (f"for TP in 1 2; do\n{RUN} --tp $TP\ndone", "line 4: TP is set in a loop"),
    "arguments in a loop": (
        f"TP=1\nwhile [[ $# -gt 0 ]]; do\ncase $1 in\n--tp) TP=$2; shift 2 ;;\nesac\ndone\n"
        f"{RUN} --tp $TP",
        "line 7: TP is set in a branch",
    ),
    "branch": (
        f"TP=1\nif nvidia-smi | grep -q H100; then TP=4; fi\n{RUN} --tp $TP",
        "line 5: TP is set in a branch that cannot be decided",
    ),
    "appended in a branch": (
        f"A=(--tp 4)\nif [ -f x ]; then A+=(--pp 2); fi\n{RUN} ${{A[@]}}",
        "line 5: A is set in a branch",
    ),
    "two commands": (f"{RUN} --tp 1\n{RUN} --tp 4", "lines 4 and 5 train"),
    "flags of a dropped switch": (f"{RUN} --finetune $MORE", "MORE is not set"),
    "substring": (f"{RUN} --tp ${{T#TP}}", r"line 4: \$\{T#TP\} is not evaluated"),
    "arithmetic command": (f"TP=2\n(( TP *= MANY ))\n{RUN} --tp $TP", "line 5: .*MANY.* is not ev"),
    "arithmetic test": (f"TP=2\n(( MANY > 2 )) && TP=4\n{RUN} --tp $TP", "TP is set in a branch"),
    "whole number": (f"declare -i TP=2+2\n{RUN} --tp $TP", "line 4: TP is set in arithmetic"),
    "counter": (f"TP=2\n(( TP++ ))\n{RUN} --tp $TP", "line 5: TP is set in arithmetic"),
    "printf": (f"TP=2\nprintf -v TP 4\n{RUN} --tp $TP", "line 5: TP is set in `printf`"),
    "read": (f"TP=2\nread TP < x\n{RUN} --tp $TP", "line 5: TP is set in `read`"),
}
# What nobody needs to know.
SPARE = {
    "paths": f"D=$1\n{RUN} --data-path $D --save $OUT/x --tokenizer-model ${{T}} --load $(pwd)/$2",
    "launcher": f"torchrun --nproc-per-node 4 --master-addr $HOST {RUN[26:]} --bf16",
    "logs in a branch": "A=(--bf16)\nif [ -f key ]; then A+=(--wandb-project $P); fi\n"
    f"{RUN} ${{A[@]}}",
}


def words_of_bash(text, tmp_path, arguments=()):
    """The words after the script's name, as bash hands them to the launcher."""
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >> "$WORDS"\n')
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "run.sh").write_text(HEAD + text)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WORDS": str(tmp_path / "words")}
    command = ["bash", str(tmp_path / "run.sh"), *arguments]
    subprocess.run(command, check=False, env=environment, cwd=tmp_path, capture_output=True)
    words = (tmp_path / "words").read_text().splitlines()
    return words[words.index("pretrain_gpt.py") + 1 :]


@pytest.mark.parametrize("name", READ)
def test_a_script_is_read_as_bash_reads_it(name, tmp_path, monkeypatch):
    for one in ("TP", "GPUS", "ZB"):
        monkeypatch.delenv(one, raising=False)
    assert from_text(HEAD + READ[name]).flags == words_of_bash(READ[name], tmp_path)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_named(name, monkeypatch):
    monkeypatch.delenv("TP", raising=False)
    script, message = UNKNOWN[name]
    with pytest.raises(ValueError, match=message):
        from_text(HEAD + script)


@pytest.mark.parametrize("name", SPARE)
def test_what_does_not_decide_the_run_need_not_be_known(name):
    flags = from_text(HEAD + SPARE[name]).flags
    assert flags[:2] == ["--num-layers", "16"] and len(flags) > 2


def test_arguments_and_the_environment_count(tmp_path, monkeypatch):
    script = f'PP=$1\nshift\n{RUN} --tp $TP --pp $PP "$@"'
    monkeypatch.setenv("TP", "4")
    arguments = ["2", "--name", "a b"]
    command = from_text(HEAD + script, arguments)
    assert command.flags == ["--num-layers", "16", "--tp", "4", "--pp", "2", "--name", "a b"]
    assert from_text(HEAD + f'{RUN} "$@"', []).notes == ()
    assert '"$@" is none' in from_text(HEAD + f'{RUN} "$@"').notes[0]
    with pytest.raises(ValueError, match="only a shell script"):
        from_text("{}", arguments)


def test_slurm_directives_give_their_variables(monkeypatch):
    monkeypatch.delenv("N", raising=False)
    script = "srun python pretrain_gpt.py --tp $SLURM_GPUS_PER_NODE --pp $SLURM_NNODES"
    command = from_text(HEAD + script)
    assert command.flags == ["--tp", "4", "--pp", "4"] and command.world == 16
    assert from_text(HEAD + "srun torchrun --nproc-per-node 8 --nnodes $N x.py").world == 16


HOSTILE = r"""
rm -rf $C; /bin/rm -rf "$C"; `rm -rf $C`; X=$(rm -rf $C); X=$(< $C/canary); unlink $C/canary
echo gone > $C/canary; : >| $C/canary; printf x >> $C/canary; exec 3<> $C/canary
tee $C/canary <<< x; find $C -delete; cp /dev/null $C/canary; mv $C/canary $C/x
ln -sf /dev/null $C/canary
cd $C && rm -f *
eval "rm -rf $C"; bash -c "rm -rf $C"; sh <<EOF
rm -rf $C
EOF
source $C/script; . $C/script; command rm -rf $C; builtin eval "echo > $C/canary"; env rm -rf $C
trap "rm -rf $C" EXIT DEBUG ERR; kill -9 $$; kill -9 -1; enable -f $C/script rm; ulimit -f 0
cat < /dev/tcp/127.0.0.1/9; diff <(rm -rf $C) >(rm -rf $C); PROMPT_COMMAND="rm -rf $C"
rm() { command rm "$@"; }; rm -rf $C; :(){ :|:& };:
python -c "import shutil; shutil.rmtree('$C')"; python $C/canary.py --num-layers 1
A[$(rm -rf $C)]=1; (( A[$(rm -rf $C)] )); [[ -v A[$(rm -rf $C)] ]]; printf -v "A[$(rm -rf $C)]" x
"""


def test_hostile_lines_do_nothing(tmp_path, monkeypatch):
    """Every line by itself, and twice in front of a command."""
    folder = tmp_path / "canaries"
    folder.mkdir()
    (folder / "canary").write_text("sings")
    (folder / "script").write_text(f"rm -rf {folder}\n")
    monkeypatch.setenv("C", str(folder))
    monkeypatch.chdir(tmp_path)
    run = "python pretrain_gpt.py --num-layers 16"
    for text in (HOSTILE, *HOSTILE.splitlines()):
        for script in (text, f"{text}\n{run} --tp 4", f"{run} --tp 4\n{text}"):
            with contextlib.suppress(ValueError):
                from_text(HEAD + script)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["canaries", "canary", "script"]
    assert (folder / "canary").read_text() == "sings"
