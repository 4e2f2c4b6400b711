"""Scripts that are composed at random: where a value is kept, when and how it changes, and what depends on it.

The shapes of the corpus are scripts that somebody has thought of. A composed one is a combination that nobody may have
thought of: a value in a deque that changes at the head of an epoch by a draw, and decides when a pass is left.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import dedent, indent


@dataclass(frozen=True)
class Keeping:
    """Where a value is kept: how it is made, read and set. `made` stands above the training loop."""

    made: str
    read: str
    set: str
    in_function: str = ""
    """What a function that sets it must begin with."""


KEEPINGS = {
    "a variable": Keeping("value = 1.0", "value", "value = {new}", "global value"),
    "a whole number": Keeping("value = 8", "value / 8", "value = round(({new}) * 8)", "global value"),
    "a list": Keeping("box = [1.0]", "box[0]", "box[0] = {new}"),
    "the end of a list": Keeping("history = [1.0]", "history[-1]", "history.append({new})"),
    "a deque": Keeping("recent = deque([1.0, 1.0], maxlen=2)", "sum(recent) / 2", "recent.append({new})"),
    "a dict": Keeping("table = {'value': 1.0}", "table['value']", "table['value'] = {new}"),
    "settings": Keeping("args = SimpleNamespace(value=1.0)", "args.value", "args.value = {new}"),
    "a class": Keeping("class Config:\n    value = 1.0", "Config.value", "Config.value = {new}"),
    "an object": Keeping(
        "class Schedule:\n    def __init__(self):\n        self.value = 1.0\n"
        "    def advance(self, new):\n        self.value = new\nschedule = Schedule()",
        "schedule.value",
        "schedule.advance({new})",
    ),
    "a data class": Keeping(
        "@dataclass\nclass State:\n    value: float = 1.0\nstate = State()", "state.value", "state.value = {new}"
    ),
    "a closure": Keeping(
        "def kept(now):\n    def read():\n        return now\n    def write(new):\n        nonlocal now\n"
        "        now = new\n    return read, write\nread, write = kept(1.0)",
        "read()",
        "write({new})",
    ),
    "an attribute of a function": Keeping(
        "def weight():\n    return weight.value\nweight.value = 1.0", "weight()", "weight.value = {new}"
    ),
    "an attribute of the model": Keeping("model.value = 1.0", "model.value", "model.value = {new}"),
    "an attribute of the optimizer": Keeping("optimizer.value = 1.0", "optimizer.value", "optimizer.value = {new}"),
    "a group of the optimizer": Keeping(
        "optimizer.param_groups[0]['value'] = 1.0",
        "optimizer.param_groups[0]['value']",
        "optimizer.param_groups[0]['value'] = {new}",
    ),
    "a tensor": Keeping("value = torch.ones(3)", "float(value[0])", "value = torch.full((3,), {new})", "global value"),
    "a tensor in place": Keeping("value = torch.ones(3)", "float(value[1])", "value.fill_({new})"),
    "an array": Keeping("value = np.ones(3)", "float(value[0])", "value[0] = {new}"),
    "a buffer": Keeping(
        "model.register_buffer('value', torch.ones(2))", "float(model.value[0])", "model.value.fill_({new})"
    ),
}

RULES = {
    "shrinks": "{old} * 0.9",
    "grows": "{old} + 0.125",
    "turns over": "1.5 - {old}",
    "averages the loss": "0.5 * {old} + 0.5 * (run.loss or 1.0)",
    "has the least loss": "min({old}, run.loss or 1.0)",
    "is drawn by torch": "0.5 + float(torch.rand(()))",
    "is drawn by random": "0.5 + random.random()",
    "is drawn by numpy": "0.5 + float(np.random.rand())",
    "follows the step": "1.0 + 0.03 * run.step",
    "follows the epoch": "1.0 + 0.1 * run.epoch",
    "follows what it was and the step": "0.5 * {old} + 0.02 * run.step",
}

MOMENTS = ("head", "body", "lanes_over", "updated", "tail")

CONDITIONS = {
    "always": "True",
    "every third step": "run.step % 3 == 0",
    "in one epoch": "run.epoch == 1",
    "from an epoch on": "run.epoch >= 2",
    "when the loss is low": "(run.loss or 9.0) < 1.05",
}

USES: dict[str, tuple[str, str]] = {
    "the loss": ("lane_loss", "loss = loss * ({value})"),
    "the inputs": ("lane_data", "x = x * ({value})"),
    "label smoothing": (
        "lane_loss",
        "loss = loss + F.cross_entropy(model(x), y, label_smoothing=min(0.5, {value} / 9))",
    ),
    "the rate before the update": (
        "lanes_over",
        "for group in optimizer.param_groups:\n    group['lr'] = 0.01 * ({value})",
    ),
    "the rate in an epoch": ("head", "for group in optimizer.param_groups:\n    group['lr'] = 0.01 * ({value})"),
    "the gradient": ("lanes_over", "for p in model.parameters():\n    p.grad.mul_({value})"),
    "the bound of the gradient": ("lanes_over", "run.clip_grad_norm_(0.05 * ({value}))"),
    "the weights": ("updated", "with torch.no_grad():\n    model[0].weight.mul_(1 - 0.01 * ({value}))"),
    "dropout": ("body", "model[2].p = min(0.6, 0.2 * abs({value}))"),
    "whether there is an update": ("guard", "({value}) < 1.7"),
    "when a pass is left": ("updated", "if ({value}) > 1.9 and run.step % 5 == 3:\n    break"),
    "what is shown": ("tail", "run.print('shown', round({value}, 6))"),
}

TEMPLATE = """\
import random
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import lockstep
import numpy as np
import torch
import torch.nn.functional as F
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
{made}
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

{training}
"""

LOOP = """\
for epoch in run.epochs(EPOCHS):
    {head}
    for batch in loader:
        {body}
        for x, y in run.lanes(batch):
            {lane_data}
            loss = loss_of(model, x, y)
            {lane_loss}
            run.backward(loss)
        {lanes_over}
        if {guard}:
            optimizer.step()
        optimizer.zero_grad()
        {updated}
    {tail}
"""

BY_STEPS = """\
batches = iter(loader)
while run.step < EPOCHS * STEPS:
    {head}
    try:
        batch = next(batches)
    except StopIteration:
        batches = iter(loader)
        batch = next(batches)
    {body}
    for _ in range(1):
        for x, y in run.lanes(batch):
            {lane_data}
            loss = loss_of(model, x, y)
            {lane_loss}
            run.backward(loss)
        {lanes_over}
        if {guard}:
            optimizer.step()
        optimizer.zero_grad()
        {updated}
    {tail}
"""


@dataclass(frozen=True)
class Composition:
    """The choices of which a script is made."""

    keeping: str
    rule: str
    moment: str
    condition: str
    use: str
    by_steps: bool
    in_function: bool
    late: bool
    """Whether it changes after it was used, where both stand at the same place."""

    def __str__(self) -> str:
        loop = "a loop by steps" if self.by_steps else "epochs"
        order = "after" if self.late else "before"
        where = "in a function" if self.in_function else "at the top"
        return (
            f"{self.keeping}; {self.rule} {self.condition}, at {self.moment}, {order} its use; "
            f"decides {self.use}; {loop}, {where}"
        )

    def script(self) -> str:
        keeping, (place, use) = KEEPINGS[self.keeping], USES[self.use]
        changing = keeping.set.format(new=RULES[self.rule].format(old=keeping.read))
        if self.condition != "always":
            changing = f"if {CONDITIONS[self.condition]}:\n    {changing}"
        pieces: dict[str, list[str]] = {name: [] for name in (*MOMENTS, "lane_data", "lane_loss")}
        guard = "True"
        if place == "guard":
            guard = use.format(value=keeping.read)
            pieces[self.moment].append(changing)
        else:
            using = use.format(value=keeping.read)
            order = (
                [(place, using), (self.moment, changing)] if self.late else [(self.moment, changing), (place, using)]
            )
            for where, text in order:
                pieces[where].append(text)
        loop = _filled(BY_STEPS if self.by_steps else LOOP, pieces).replace("{guard}", guard)
        training = (
            f"def train():\n{indent(_with_globals(keeping) + loop, '    ')}\n\ntrain()" if self.in_function else loop
        )
        return TEMPLATE.format(made=keeping.made, training=training)


def _with_globals(keeping: Keeping) -> str:
    return f"{keeping.in_function}\n" if keeping.in_function else ""


def _filled(template: str, pieces: dict[str, list[str]]) -> str:
    lines = []
    for line in template.splitlines():
        name = line.strip().strip("{}")
        if line.strip() == f"{{{name}}}" and name in pieces:
            space = line[: len(line) - len(line.lstrip())]
            lines += [indent(dedent(piece), space) for piece in pieces[name]]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def composition(chance: random.Random) -> Composition:
    def one(names: Sequence[str]) -> str:
        return chance.choice(list(names))

    return Composition(
        one(list(KEEPINGS)), one(list(RULES)), one(MOMENTS), one(list(CONDITIONS)), one(list(USES)),
        chance.random() < 0.25, chance.random() < 0.4, chance.random() < 0.5,
    )  # fmt: skip
