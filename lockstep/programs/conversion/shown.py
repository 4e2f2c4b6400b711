"""What a script shows of its training, which must not be what the lanes of one worker hold: pure, from its source.

In the body of the loop `run.print` prints once for a batch. After the loop `loss` is that of this worker's last lane,
so what is read from it there becomes `run.loss`, which is that of the batch.
"""

import ast
import re
from collections.abc import Iterator

from lockstep.programs.conversion.source import TrainingScript, called_name, has

_SAVES = ("torch.save", "pickle.dump", "np.save", "np.savez", "shutil.copyfile", "shutil.copy")
_SAVING_METHODS = ("savefig", "to_csv", "save_image")
_VALUE = r"(?<![\w.]){name}(?:\.detach\(\)|\.cpu\(\)|\.data)*\.item\(\)|(?<![\w.])float\({name}\)"


def show(script: TrainingScript, lines: list[bytes]) -> None:
    """Afterwards the lines have prints and losses as all lanes have them. Nothing is moved."""
    for call in sorted(_prints(script), key=_place, reverse=True):
        put(lines, call.func, "run.print")
    backward = _backward(script)
    reads = [] if backward is None else [read for read in _reads_after(script, backward[1]) if _is_value(script, read)]
    if backward is not None and reads:
        put(lines, backward[0], f"run.backward({backward[1]})")
        for read in reads:
            text = lines[read.lineno - 1].decode()
            lines[read.lineno - 1] = re.sub(_VALUE.format(name=backward[1]), "run.loss", text).encode()


def left_in_lanes(script: TrainingScript) -> list[str]:
    """What the conversion leaves of one lane, or of one worker, as remarks."""
    remarks = []
    inside = [call.lineno for call in _prints(script) if has(script.loop, call)]
    if inside:
        remarks.append(
            f"run.print (line {inside[0]} of the plain script) shows what the first lane of a batch has, once for "
            "each batch: after the loop run.loss is that of the whole batch"
        )
    backward = _backward(script)
    loss = "" if backward is None else backward[1]
    names = [node for node in ast.walk(script.loop) if isinstance(node, ast.Name)]
    for name in sorted({node.id for node in names if isinstance(node.ctx, ast.Store)}):
        reads = _reads_after(script, name)
        if reads := [read for read in reads if name != loss or not _is_value(script, read)]:
            remarks.append(
                f"`{name}` after the loop (line {reads[0].lineno} of the plain script) is that of this worker's last "
                "lane: run.total adds up what all lanes have, and run.gather has it of each"
            )
    others = [call for call in ast.walk(script.tree) if _is_print(call) and call not in _prints(script)]
    if others:
        line = min(call.lineno for call in others if isinstance(call, ast.Call))
        remarks.append(
            f"print (line {line}) prints on every worker: run.print prints once, and run.log records numbers"
        )
    saves = [call for call in ast.walk(script.tree) if isinstance(call, ast.Call) and _is_save(call)]
    if saves:
        first = min(saves, key=_place)
        remarks.append(
            f"{ast.unparse(first.func)} (line {first.lineno}) writes on every worker, to the same file: put "
            "`if run.is_first:` before it"
        )
    return remarks


def _is_save(call: ast.Call) -> bool:
    """Whether it writes a file that is named in the script, as all workers do."""
    if called_name(call) == "open":
        modes = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == "mode")]
        return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)
    return ast.unparse(call.func) in _SAVES or called_name(call) in _SAVING_METHODS


def _prints(script: TrainingScript) -> list[ast.Call]:
    """Those of the function, or module, that has the training loop."""
    return [node for node in _own(script.scope) if isinstance(node, ast.Call) and _is_print(node)]


def _is_print(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def _backward(script: TrainingScript) -> tuple[ast.Call, str] | None:
    """`loss.backward()`, and the name of the loss, where it is as simple as that."""
    calls = [node for node in ast.walk(script.loop) if isinstance(node, ast.Call) and called_name(node) == "backward"]
    owner = calls[0].func.value if len(calls) == 1 and isinstance(calls[0].func, ast.Attribute) else None
    is_plain = isinstance(owner, ast.Name) and not calls[0].args and not calls[0].keywords
    return (calls[0], owner.id) if is_plain and isinstance(owner, ast.Name) else None


def _reads_after(script: TrainingScript, name: str) -> list[ast.Name]:
    """Where the scope reads the name after the loop, up to where it sets it anew."""
    found: list[ast.Name] = []
    for node in sorted((one for one in _own(script.scope) if isinstance(one, ast.Name)), key=_place):
        if node.id == name and node.lineno > (script.loop.end_lineno or 0):
            if not isinstance(node.ctx, ast.Load):
                break
            found.append(node)
    return found


def _is_value(script: TrainingScript, read: ast.Name) -> bool:
    """Whether the name is read as in `loss.item()`, `loss.detach().item()` or `float(loss)`."""
    pattern = re.compile(_VALUE.format(name=read.id))
    calls = [node for node in _own(script.scope) if isinstance(node, ast.Call) and has(node, read)]
    return any(pattern.fullmatch(ast.unparse(call)) for call in calls)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """All below it, but not what is in functions of its own."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield node
            yield from _own(node)


def _place(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def put(lines: list[bytes], node: ast.expr, text: str) -> None:
    """Of an expression on one line."""
    line = lines[node.lineno - 1]
    lines[node.lineno - 1] = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
