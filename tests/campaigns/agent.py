"""A stand-in for python and torchrun whose ranks are forked from one process that knows Megatron.

Starting ranks afresh takes each of them seconds, most of it imports. Everything else is as it would
be: the words are the script's own, the ranks are processes, and they train.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.checkouts import MAIN_TAG, existing
from tests.support.server import ScriptServer

AGENT = """#!{python}
import json, os, socket, sys
words = sys.argv[1:]
if os.path.basename(sys.argv[0]) != "torchrun" and "torch.distributed.run" not in words:
    os.execv({python!r}, [{python!r}, *words])
with socket.socket(socket.AF_UNIX) as client:
    client.connect({address!r})
    client.sendall(json.dumps([os.getcwd(), *words]).encode() + b"\\n")
    answer = json.loads(client.makefile().readline())
print(answer["log"])
sys.exit(answer["status"])
"""


def _run(server: ScriptServer, folder: Path, cwd: Path, words: list[str]) -> dict[str, object]:
    """What torchrun would do with ``words`` in ``cwd``, as the agent's answer."""
    world = int(words[words.index("--nproc-per-node") + 1])
    launched = words[words.index("megatron_ext.launch") + 1 :]
    log = None
    while launched[0].startswith("--"):
        option, value, *launched = launched
        if option == "--loss-log":
            log = value
        elif (option, value) != ("--device", "cpu"):
            return {"log": f"only CPU ranks here, got {option} {value}", "status": 2}
    script, *argv = launched
    # The ranks' own working directory is another one.
    argv = [
        str(cwd / word) if before == "--pp-trace" else word
        for before, word in zip(["", *argv], argv)
    ]
    if script != "pretrain_gpt" and not (cwd / script).is_file():
        return {"log": f"the script {script} does not exist", "status": 2}
    outcome = server.run(argv, world, folder)
    if log is not None and (folder / "losses.jsonl").exists():
        shutil.copy(folder / "losses.jsonl", log)
    text = "\n".join(outcome.log(rank) for rank in range(world))
    return {"log": text, "status": int(outcome.status != "ok")}


@contextmanager
def ranks_for(folder: Path) -> Iterator[Path]:
    """A program to set PYTHON to, or to call ``torchrun``."""
    address, listener = str(folder / "agent"), socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    program = folder / "python-agent"
    program.write_text(AGENT.format(python=sys.executable, address=address))
    program.chmod(0o755)

    def serve(server: ScriptServer) -> None:
        for count in range(1000):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                cwd, *words = json.loads(connection.makefile().readline())
                answer = _run(server, folder / f"run{count}", Path(cwd), words)
                connection.sendall(json.dumps(answer).encode() + b"\n")

    with ScriptServer(existing(MAIN_TAG) / "pretrain_gpt.py", modules=["tests.support"]) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        try:
            yield program
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(5)
