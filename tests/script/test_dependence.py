"""What a script's source says about a counter."""

import ast

import pytest

from lockstep.script.source.dependence import dependence
from lockstep.script.source.functions import Function, function_at

LOOP = "for i, batch in enumerate(loader):\n    for x in run.lanes(batch): loss(x).backward()\n"

DEPENDS = {
    "an update after every second batch": (
        "i",
        LOOP + "    if (i + 1) % 2 == 0:\n        optimizer.step()\n",
        "decides whether optimizer.step() is called",
    ),
    "through another name": (
        "i",
        LOOP + "    is_last = i == n - 1\n    if is_last:\n        optimizer.step()\n",
        "decides whether optimizer.step() is called",
    ),
    "the end of the loop": (
        "i",
        LOOP + "    optimizer.step()\n    if i == 50: break\n",
        "decides when the loop ends",
    ),
    "batches that are skipped": (
        "i",
        "for i, b in enumerate(loader):\n    if i % 3: continue\n    for x in run.lanes(b): pass\n",
        "decides whether run.lanes() is called",
    ),
    "how long a loop goes on": ("step", "for step in range(100):\n    train(next(it))\n", "how long the loop goes on"),
    "also under a progress bar": ("step", "for step in tqdm(range(9)):\n    train()\n", "how long the loop goes on"),
    "while": ("step", "while step < 100:\n    step += 1\n", "decides when the loop ends"),
    "a rate": (
        "step",
        "lr = 0.1 * min(1, step / 10)\nfor group in optimizer.param_groups:\n    group['lr'] = lr\n",
        "goes into group['lr']",
    ),
    "whether a rate is set": (
        "last",
        "if run.loss > last:\n    for group in optimizer.param_groups:\n        group['lr'] = 0.1\n",
        "decides whether group['lr'] is set",
    ),
    "a rate that is multiplied": ("f", "for g in optimizer.param_groups:\n    g['lr'] *= f\n", "goes into g['lr']"),
    "a scheduler": ("i", "scheduler.step(epoch + i / n)\n", "goes into scheduler.step(epoch + i / n)"),
    "a scheduler that is told how many updates were made": (
        "i",
        LOOP + "    lr_scheduler.step_update(num_updates=i)\n",
        "goes into lr_scheduler.step_update(num_updates=i)",
    ),
    "a function that puts weights back": (
        "i",
        "def back(net): net.load_state_dict(best)\n" + LOOP + "    if i == 9:\n        back(net)\n",
        "decides whether back() is called",
    ),
    "a method that sets weights, by another": (
        "seen",
        "class Average:\n  def follow(self, net):\n    if self.seen < 9: return self.copy(net)\n"
        "  def copy(self, net): self.put(net)\n"
        "  def put(self, net):\n    for p, q in zip(self.own, net.parameters()): p.data = q.data\n",
        "decides whether self.copy() is called",
    ),
    "a function that is given the optimizer": (
        "step",
        "adjust_learning_rate(optimizer, step)\n",
        "goes into adjust_learning_rate(optimizer, step)",
    ),
    "a gradient, in place": (
        "i",
        LOOP + "    for p in net.parameters():\n        p.grad.mul_(1 / (1 + i))\n",
        "p.grad.mul_",
    ),
    "a gradient, by an operator": ("i", LOOP + "    for p in net.parameters():\n        p.grad *= 0.9**i\n", "p.grad"),
    "a gradient that is set": (
        "i",
        LOOP + "    for p in net.parameters():\n        p.grad = 0.9**i * p.grad\n",
        "p.grad",
    ),
    "a parameter, in place": (
        "i",
        LOOP + "    for p in net.parameters():\n        p -= 0.9**i * p.grad\n",
        "goes into p",
    ),
    "weights that are put back": (
        "i",
        LOOP + "    if i == 9:\n        net.load_state_dict(best)\n",
        "net.load_state_dict()",
    ),
    "which optimizer it is": ("i", LOOP + "    optimizers[i % 2].step()\n", "goes into optimizers[i % 2].step()"),
    "an attribute": (
        "seen",
        "class Trainer:\n  def go(self):\n    if self.seen % 4 == 0: self.optimizer.step()\n",
        "decides whether self.optimizer.step() is called",
    ),
    "a method that gives a weight": (
        "seen",
        "class Trainer:\n  def weight(self): return 0.1 * self.seen\n"
        "  def go(self, x):\n    (self.weight() * loss(x)).backward()\n",
        "goes into (self.weight() * loss(x)).backward()",
    ),
    "a property": (
        "seen",
        "class Trainer:\n  @property\n  def weight(self): return 0.1 * self.seen\n"
        "  def go(self, x):\n    w = self.weight\n    (w * loss(x)).backward()\n",
        "goes into (w * loss(x)).backward()",
    ),
    "a method that decides by a test which result it gives": (
        "seen",
        "class Trainer:\n  def weight(self):\n    if self.seen > 3: return 1\n    return 2\n"
        "  def go(self, x):\n    (self.weight() * loss(x)).backward()\n",
        "goes into (self.weight() * loss(x)).backward()",
    ),
    "a method that the class inherits": (
        "seen",
        "class Trainer(Base):\n  def go(self, x):\n    (self.weight() * loss(x)).backward()\n"
        "class Base:\n  def weight(self): return 0.1 * self.seen\n",
        "goes into (self.weight() * loss(x)).backward()",
    ),
    "a method of a class whose bases are elsewhere, or itself": (
        "seen",
        "class Trainer(Base, other.Base):\n  def go(self):\n    if self.seen % 4: self.optimizer.step()\n"
        "class Base(Base): pass\n",
        "decides whether self.optimizer.step() is called",
    ),
    "a data set that reads a global": (
        "i",
        LOOP + "    optimizer.step()\nclass Data(Dataset):\n  def __getitem__(self, n): return n * i\n",
        "is read in Data",
    ),
    "a function that makes batches of a global": (
        "i",
        "def pad(samples): return samples[:i]\nloader = DataLoader(data, collate_fn=pad)\n" + LOOP,
        "is read in pad",
    ),
    "a function that reads a global": (
        "steps",
        "def weight(): return 0.1 * steps\nfor b in loader:\n    (weight() * loss(b)).backward()\n    steps += 1\n",
        "goes into (weight() * loss(b)).backward()",
    ),
    "a function that is given it": (
        "i",
        "def train(batch, k): (k * loss(batch)).backward()\nfor i, b in enumerate(loader): train(b, k=i)\n",
        "goes into (k * loss(batch)).backward()",
    ),
    "a function that is given it, in its place": (
        "i",
        "def train(batch, k): (k * loss(batch)).backward()\nfor i, b in enumerate(loader): train(b, i)\n",
        "goes into (k * loss(batch)).backward()",
    ),
    "a method that is given it": (
        "seen",
        "class Trainer:\n  def train(self, batch, k): (k * loss(batch)).backward()\n"
        "  def go(self, batch): self.train(batch, self.seen)\n",
        "goes into (k * loss(batch)).backward()",
    ),
    "a function that is given it and calls itself": (
        "i",
        "def go(k):\n    if k: go(k - 1)\n    (k * loss(k)).backward()\nfor i, b in enumerate(loader): go(i)\n",
        "goes into (k * loss(k)).backward()",
    ),
    "a function that returns before the update": (
        "i",
        "def update(k):\n    if k % 2: return\n    optimizer.step()\nfor i, b in enumerate(loader): update(i)\n",
        "decides whether optimizer.step() is called",
    ),
}

HARMLESS = {
    "another function's own of that name": (
        "class Data:\n    def __getitem__(self, i):\n        x = self.data[i]\n        return x\n"
        "def weigh(i):\n    w = 2 * i\n    return w\n"
        + LOOP.replace("loss(x)", "(w * loss(x))")
        + "    optimizer.step()\n"
    ),
    "a function that shows now and then": (
        "def show():\n    if i % 3: return\n    print(i)\n" + LOOP + "    optimizer.step()\n    show()\n"
    ),
    "a function that is given it and shows it": (
        "def show(k):\n    if k % 3: return\n    print(k)\n" + LOOP + "    optimizer.step()\n    show(i)\n"
    ),
    "an object that shows it": LOOP + "    optimizer.step()\nclass Show:\n    def go(self): print(i)\n",
    "a data set that is made with it": (
        LOOP + "    optimizer.step()\nclass Data(Dataset):\n    def __init__(self): self.first = i\n"
    ),
    "a function that makes batches without it": (
        "def pad(samples): return samples\nloader = DataLoader(data, collate_fn=pad)\n"
        + LOOP
        + "    optimizer.step()\n    losses[i] = 1\n"
    ),
    "a function that is given it beside another": (
        "def train(k, batch, *more): loss(batch, more).backward()\n" + LOOP + "    train(i, x, **options)\n"
    ),
    "functions that are given it and call each other": (
        "def show(k):\n    log(k)\ndef log(k):\n    show(k)\n" + LOOP + "    optimizer.step()\n    show(i)\n"
    ),
    "a function that says when to show": (
        "def shows():\n    if i % 3: return True\n    return False\n"
        + LOOP
        + "    optimizer.step()\n    if shows(): print(i)\n"
    ),
    "an entry of a list": LOOP + "    optimizer.step()\n    losses[i] = run.loss\n",
    "printing now and then": LOOP + "    optimizer.step()\n    if i % 10 == 0:\n        print(i, loss.item())\n",
    "printing behind a continue": LOOP + "    optimizer.step()\n    if i % 10: continue\n    print(i)\n",
    "a progress bar": LOOP + "    optimizer.step()\n    pbar.update(i)\n",
    "a meter": LOOP
    + "    optimizer.step()\n    losses.update(i, run.loss)\n    batch_time.update(i)\n    top1.update(i)\n",
    "a scheduler that is asked for its rate": LOOP + "    optimizer.step()\n    show(scheduler.get_last_lr()[i])\n",
    "a function that evaluates now and then": (
        "def evaluate():\n    for b in held_out:\n        for x in run.lanes(b): losses.update(loss(x))\n"
        + LOOP
        + "    optimizer.step()\n    if i % 10 == 0: evaluate()\n"
    ),
    "a logger that makes steps": LOOP + "    optimizer.step()\n    logger.step(i)\n    timer.step(i)\n",
    "a tensor of its own": LOOP + "    optimizer.step()\n    shown.fill_(i)\n",
    "a curve": LOOP + "    optimizer.step()\n    writer.add_scalar('loss', loss, i)\n",
    "options beside it": LOOP + "    optimizer.step()\n    show(options, i)\n",
}


@pytest.mark.parametrize("case", DEPENDS)
def test_what_depends_on_a_counter_is_found(case: str) -> None:
    name, text, how = DEPENDS[case]
    tree = ast.parse(text)
    found = dependence(Function(tree.body[0] if isinstance(tree.body[0], ast.ClassDef) else tree, tree), name)
    assert found is not None
    assert how in found.how


@pytest.mark.parametrize("case", HARMLESS)
def test_a_counter_that_is_only_shown_decides_nothing(case: str) -> None:
    assert dependence(Function(ast.parse(HARMLESS[case])), "i") is None


def test_a_loop_variable_and_one_that_is_set_to_zero_in_a_loop_begin_anew() -> None:
    text = "steps = 0\nfor epoch in epochs:\n    seen = 0\n    for i, b in enumerate(loader):\n        steps += 1\n"
    function = Function(ast.parse(text))
    assert [function.is_reset(name) for name in ("i", "seen", "steps")] == [True, True, False]


AGAIN = {
    "in a loop": ("for b in loader:\n    (w * loss(b)).backward()\n", True),
    "before the loop": ("(w * loss(b)).backward()\nfor b in loader: show(b)\n", False),
    "in no loop": ("(w * loss(b)).backward()\n", False),
    "in a function": ("def train(b):\n    (w * loss(b)).backward()\n", True),
    "in a function that a loop calls": (
        "def train(b):\n    (w * loss(b)).backward()\nfor b in loader: train(b)\n",
        True,
    ),
    "in a function that is called before the loop": (
        "def train(b):\n    (w * loss(b)).backward()\ntrain(b)\nfor b in loader: show(b)\n",
        False,
    ),
    "before the loop of a function": (
        "def train(b):\n    (w * loss(b)).backward()\n    for b in loader: show(b)\n",
        False,
    ),
    "in a method": ("class T:\n    def train(self, b): (self.w * loss(b)).backward()\n", True),
    "in the method that makes the object": (
        "class T:\n    def __init__(self, b): (self.w * loss(b)).backward()\n",
        False,
    ),
    "before the loop of a method": (
        "class T:\n    def fit(self, b):\n        (self.w * loss(b)).backward()\n        for b in loader: show(b)\n",
        False,
    ),
}


@pytest.mark.parametrize(("text", "is_found"), AGAIN.values(), ids=AGAIN)
def test_what_is_done_once_is_not_done_again(text: str, is_found: bool) -> None:
    tree = ast.parse(text)
    node = tree.body[-1] if isinstance(tree.body[-1], ast.FunctionDef | ast.ClassDef) else tree
    assert (dependence(Function(node, tree), "w", again=True) is not None) == is_found
    assert dependence(Function(node, tree), "w") is not None


def test_an_object_that_is_a_module_is_none_that_reads_its_own() -> None:
    tree = ast.parse("class Net(nn.Module):\n    def forward(self, x): return self.seen * x\n")
    assert dependence(Function(tree.body[0], tree), "seen") is None


@pytest.mark.parametrize(
    ("text", "is_set"),
    [
        ("def begin():\n    global w\n    w = 1\nfor b in loader: begin()\n", True),
        ("def go():\n    back()\ndef back():\n    go()\nfor b in loader: go()\n", False),
        ("def train():\n    w = 1\n    for b in loader: train()\n", False),
        ("w = 1\nfor b in loader: table['w'] = w\n", False),
    ],
)
def test_a_loop_sets_what_functions_that_it_calls_set(text: str, is_set: bool) -> None:
    tree = ast.parse(text)
    node = tree.body[0] if text.startswith("def train") else tree
    assert Function(node, tree).is_set_in_loop("w") == is_set


def test_the_function_of_a_frame_is_found_and_a_file_without_source_says_nothing() -> None:
    assert function_at(__file__, "test_a_loop_variable_and_one_that_is_set_to_zero_in_a_loop_begin_anew") is not None
    assert function_at(__file__, "<module>") is not None
    assert function_at(__file__, "no such function") is None
    found = function_at("<stdin>", "<module>")
    assert found is None or dependence(found, "i") is None
