"""Whether what lanes train on depends on what an earlier lane has left in a variable or an attribute. Pure.

`for x in run.lanes(batch): h = cell(x, h); run.backward(h.sum())` does: `h` goes into the loss of the next lane.

Where the loop over lanes mentions the variable, its body decides: what stands around it is the same for all lanes. Else
the functions that it calls do: those of the file, or the class whose methods read it.
"""

import ast
from functools import lru_cache

from lockstep.script.source.dependence import dependence
from lockstep.script.source.functions import Function
from lockstep.script.source.lane_loops import loops_at
from lockstep.script.source.syntax import parsed, walked


@lru_cache(maxsize=256)
def lanes_train_from(path: str, line: int, file: str, name: str, is_attribute: bool) -> bool:
    """Whether those of the loop at this line do; `file` is where the variable stands, or the class of the object."""
    tree, loops = parsed(path), loops_at(path, line)
    mentioned = [(loop, text) for loop in loops for text in _mentions(loop, name, is_attribute)]
    if mentioned:
        return any(_depends(Function(ast.Module(loop.body, []), tree), text) for loop, text in mentioned)
    around = parsed(file)
    if around is None:
        return False
    if not is_attribute:
        return _depends(Function(around, around), name)
    classes = [node for node in walked(around) if isinstance(node, ast.ClassDef)]
    return any(_depends(Function(one, around), name) for one in classes if _mentions(one, name, is_attribute))


def _depends(source: Function, name: str) -> bool:
    return dependence(source, name, in_calls=False) is not None


def _mentions(part: ast.AST, name: str, is_attribute: bool) -> set[str]:
    """As what it is mentioned: `self.name`, `meter.name`."""
    if is_attribute:
        return {ast.unparse(node) for node in walked(part) if isinstance(node, ast.Attribute) and node.attr == name}
    return {node.id for node in walked(part) if isinstance(node, ast.Name) and node.id == name}
