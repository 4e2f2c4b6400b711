"""What a turn of a loop, or a pass over a loader, may read of what an earlier one has left."""

import ast

import pytest

from lockstep.script.source.first_reads import is_carried, is_set_before_passes
from lockstep.script.source.functions import Function

TRAINS = (
    "for epoch in run.epochs(9):\n{top}    for batch in loader:\n{batch}        for x, y in run.lanes(batch):\n{lane}"
)
LANE = "            loss(w, x, y).backward()\n"


def source(top: str = "", batch: str = "", lane: str = LANE) -> str:
    parts = {"top": top and f"    {top}\n", "batch": batch and f"        {batch}\n", "lane": lane}
    return TRAINS.format(**parts)


ANEW = {
    "by each lane": source(lane=f"            w = names[0]\n{LANE}"),
    "as the variable of a loop over lanes": source().replace("for x, y in", "for w, x, y in"),
    "as the variable of a loop that counts lanes": source().replace("for x, y in", "for i, (w, x) in"),
    "in both branches": source(batch="if batch.large: w = 1\n        else: w = 2"),
    "in a context": source(lane=f"            with autocast() as w:\n    {LANE}"),
    "by each batch, with another loop inside": source(
        batch="w = f(batch)\n        for p in model.parameters(): clip(p, w)"
    ),
    "by a method, before another reads it": (
        "class Trainer:\n    def take(self, b):\n        self.w = f(b)\n"
        "    def train(self):\n        loss(self.w).backward()\n"
        "    def fit(self):\n        for b in loader:\n            self.take(b)\n            self.train()\n"
    ),
    "as a whole, in place": source(batch="w[:] = f(batch)"),
    "as a whole, by dots": source(batch="w[...] = f(batch)"),
    "after another goes on": source(batch="v += 1\n        w = f(batch)"),
    "as a whole, by a method": source(batch="torch.mul(batch, 2, out=w.zero_())"),
    "as a comprehension's own, first": source(batch="show([w for w in batch])\n        w = f(batch)"),
    "in a branch that alone reads it": source(
        batch="if batch.large: w = 1; show(w)", lane=f"{LANE}".replace("w, ", "")
    ),
    "after a call of a function that calls itself": source(batch="show(batch); w = f(batch)")
    + "def show(b): show(b.rest)\n",
    "by one function in both branches": source(batch="if batch.large: begin(1)\n        else: begin(2)")
    + "def begin(n):\n    global w\n    w = n\n",
}
HOOK = "import torch\ndef hook(module, args, output):\n    w['a'] = output\nmodel.conv.register_forward_hook(hook)\n"
ANEW |= {
    "as a whole, emptied": source(batch="w.clear()"),
    "by a hook of the module that a lane calls": HOOK + source(lane=f"            y = model(x)\n{LANE}"),
    "by a hook of the module that a lane gives away": HOOK + source(lane=f"            y = f(model, x)\n{LANE}"),
    "by a hook, to the left": HOOK + source(lane="            loss(model(x), w, y).backward()\n"),
}
IN_EACH_PASS = {
    "in each epoch": source(top="w = 1 / (1 + epoch)"),
    "in each epoch, and changed": source(top="w = 1.0", batch="w *= 0.9"),
    "in each epoch, with another loop inside": source(top="w = 1.0", batch="for p in model.parameters(): w *= 0.9"),
    "in each batch, and changed by lanes": source(batch="w = 1.0", lane=f"{LANE}            w *= 0.9\n"),
    "in each part of the data": source(top="w = 1.0", batch="w *= 0.9").replace("run.epochs(9)", "parts"),
    "by a trainer, in each part of the data": (
        "class Trainer:\n    def fit(self):\n        for part in self.parts:\n            self.w = 1.0\n"
        "            for b in part:\n                self.train(b)\n                self.w *= 0.9"
    ),
    "in a call for each pass": (
        "def train():\n    w = 1.0\n    for batch in loader:\n        train_on(batch, w)\n        w *= 0.9"
    ),
    "by a method, in each epoch": (
        "class Trainer:\n    def begin(self):\n        self.w = 1.0\n    def train(self):\n"
        "        for b in loader:\n            loss(self.w, b).backward()\n            self.w *= 0.9\n"
        "    def fit(self):\n        for e in run.epochs(3):\n            self.begin()\n            self.train()\n"
    ),
    "in each of a trainer's passes": (
        "class Trainer:\n    def fit(self):\n        for e in run.epochs(3):\n            self.w = 1.0\n"
        "            for b in loader:\n                self.train(b)\n                self.w *= 0.9"
    ),
}
CARRIED = {
    "never": source(),
    "after it was read": source(batch="show(w)\n        w = f(batch)", top="show(w)"),
    "by what it was": source(batch="w *= 0.9"),
    "in place, from what it was": source(batch="w.mul_(0.9)"),
    "all of it, from what it was": source(batch="w[:] *= 0.9"),
    "an entry of it alone": source(top="w[0] = 1"),
    "in one branch": source(batch="if batch.large: w = 1"),
    "by a hook of another module": HOOK + source(lane=f"            y = other(x)\n{LANE}"),
    "by a hook, to the right": HOOK + source(lane="            loss(w, model(x), y).backward()\n"),
    "by a hook that reads it": HOOK.replace("= output", "= w + output") + source(lane=f"            model(x)\n{LANE}"),
    "after a method has read it": (
        "class Trainer:\n    def train(self):\n        loss(self.w).backward()\n    def fit(self):\n"
        "        for b in loader:\n            self.train()\n            self.w = f(b)\n"
    ),
    "in one branch, for a function": (
        source(top="if epoch == 0: w = 2", lane="            loss(scaled(x)).backward()\n")
        + "def scaled(x): return w * x\n"
    ),
    "from batch to batch of a loop by steps": (
        "while run.step < 9:\n    batch = next(it)\n    for x in run.lanes(batch): loss(w, x)\n    w *= 0.9"
    ),
    "by what it was, by lanes": source(top="show(w)", lane=f"{LANE}            w *= 0.9\n"),
    "from step to step of a loop by numbers": (
        "for n in range(9):\n    for x in run.lanes(make(n)): loss(w, x)\n    w *= 0.9"
    ),
    "from step to step of a loop that only shows its own": (
        "for n in names:\n    show(n)\n    batch = next(it)\n    for x in run.lanes(batch): loss(w, x)\n    w *= 0.9"
    ),
    "after a test has read it": source(batch="if w > 1: show(batch)\n        w = f(batch)", top="show(w)"),
    "after a branch has read it": source(batch="if batch.large: show(w)\n        w = f(batch)", top="show(w)"),
    "in one branch, for a class that inherits": (
        "class Trainer:\n    def fit(self):\n        for b in loader:\n            if b.large: self.w = 1\n"
        "            self.train(b)\nclass Own(Trainer):\n    def train(self, b): loss(self.w, b)\n"
    ),
    "after all of it was read": source(batch="show(w[:])\n        w = f(batch)", top="show(w)"),
    "a part of it alone": source(top="w[1:] = 1"),
    "an entry alone, by its number": source(top="w[i] = 1"),
    "all of another": source(batch="v[:] = f(batch)"),
    "from pass to pass of a function": (
        "def train():\n    w = 1.0\n    for batch in a:\n        train_on(batch)\n        w *= 0.9\n"
        "    for batch in b:\n        train_on(batch, w)\n        w *= 0.9"
    ),
    "in the passes of an object": (
        "class Trainer:\n    def train(self):\n        for b in loader:\n            f(self.w)\n"
        "            self.w *= 0.9"
    ),
}


def carried(text: str, *, over_passes: bool) -> bool:
    node = ast.parse(text)
    definition = node.body[0] if isinstance(node.body[0], ast.FunctionDef | ast.ClassDef) else node
    return is_carried(Function(definition, node), "w", over_passes=over_passes)


@pytest.mark.parametrize("way", ANEW)
def test_what_every_turn_sets_before_it_reads_it_is_no_state(way: str) -> None:
    assert [carried(ANEW[way], over_passes=over) for over in (False, True)] == [False, False]


@pytest.mark.parametrize("way", IN_EACH_PASS)
def test_what_is_set_before_each_pass_is_as_it_should_be_at_the_start_of_one(way: str) -> None:
    assert not carried(IN_EACH_PASS[way], over_passes=True)


@pytest.mark.parametrize("way", CARRIED)
def test_all_else_is_carried_from_pass_to_pass(way: str) -> None:
    assert [carried(CARRIED[way], over_passes=over) for over in (False, True)] == [True, True]


@pytest.mark.parametrize(("batch", "is_carried_on"), [("use(next(w))", True), ("w = f(batch)", False), ("", False)])
def test_in_the_middle_of_a_pass_what_was_set_before_it_may_have_been_changed_inside(
    batch: str, is_carried_on: bool
) -> None:
    node = ast.parse(source(top="w = iter(weights)", batch=batch, lane="            loss(x, y).backward()\n"))
    assert is_carried(Function(node, node), "w", in_place=True) == is_carried_on


@pytest.mark.parametrize(
    ("body", "is_set"),
    [
        ("w = draw()\n    for batch in loader: train(batch)", True),
        ("w = draw()\n    for batch in loader:\n        for x in run.lanes(batch): f(x, w)", True),
        ("for batch in loader:\n        w = draw()\n        for x in run.lanes(batch): f(x, w)", False),
        ("w = 0\n    for batch in loader:\n        w += 1\n        train(batch)", False),
        ("w = draw()\n    for group in groups: group['lr'] = w", False),
    ],
)
def test_what_is_set_before_each_pass_is_in_its_middle_what_it_was_at_its_start(body: str, is_set: bool) -> None:
    source = f"def train(batch):\n    for x in run.lanes(batch): f(x)\nwhile run.step < 9:\n    {body}\n"
    tree = ast.parse(source)
    assert is_set_before_passes(Function(tree, tree), "w") is is_set
