"""Values of the script that begin anew when it runs from the top."""

import linecache
import math
import sys
from argparse import Namespace
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.script.restart.restarted_values import _unchanged, restarted_values
from lockstep.script.restart.texts import texts_of
from lockstep.script.restart.values import changed_since, values
from lockstep.script.source.first_reads import is_carried
from lockstep.script.source.functions import function_at
from lockstep.script.source.syntax import parsed

LIMIT = 7
SCRIPT = """
best, history, flag = float("inf"), [], True
def look():
    return values(sys._getframe())
first = look()
{then}
now = look()
"""


class Stopper:
    def __init__(self) -> None:
        self.best, self.module = 3.5, torch.nn.Linear(1, 1)


class Slotted(Stopper):
    __slots__ = ("empty", "number")

    def __init__(self) -> None:
        super().__init__()
        self.number = 7


def run_script(path: Path, then: str) -> dict[str, Any]:
    source = SCRIPT.format(then=then)
    path.write_text(source)
    namespace: dict[str, Any] = {"values": values, "sys": sys}
    exec(compile(source, str(path), "exec"), namespace)
    return namespace


def test_a_value_that_has_changed_is_in_the_snapshot_and_others_are_not(tmp_path: Path) -> None:
    names = run_script(tmp_path / "train.py", "best = 2.5\nhistory.append(4.0)\nlater = 'x'")
    saved = {row[2]: row[3] for row in changed_since(names["first"], names["now"])}
    assert saved["best"] == "2.5"
    assert saved["history"] == "[4.0]"
    assert saved["later"] == "'x'"
    assert "flag" not in saved  # a truth value is followed as a number


def test_a_function_is_what_it_keeps_and_an_empty_table_is_a_value(tmp_path: Path) -> None:
    made = (
        "def make():\n    calls, limit = 0, 9\n"
        "    def rate():\n        nonlocal calls\n        calls += 1\n        return min(calls, limit)\n"
        "    return rate\n"
        "rate, rest = make(), {}\nfirst = look()\nrate()\nrate.seen = 2\nrest[1] = 0.5"
    )
    names = run_script(tmp_path / "train.py", made)
    saved = {row[2]: row[3] for row in changed_since(names["first"], names["now"])}
    assert saved["rate"].endswith("(seen=2, calls=1)")
    assert saved["rest"] == "(1=0.5)"
    (anew,) = (found for (_, function), found in names["first"].items() if function == "<module>")
    assert (anew["rate"].endswith("(calls=0)"), anew["rest"]) == (True, "{}")


def test_lists_that_functions_share_or_have_as_defaults_are_kept_from_call_to_call(tmp_path: Path) -> None:
    made = (
        "def make():\n    seen, limit = [], 9\n"
        "    def tick():\n        seen.append(limit)\n"
        "    def weight():\n        return len(seen)\n"
        "    return tick, weight\n"
        "def count(a, b=2, calls=[], *, c={}):\n    calls.append(a)\n"
        "tick, weight = make()\nfirst = look()\ntick()\ncount(1)"
    )
    names = run_script(tmp_path / "train.py", made)
    saved = {row[2]: row[3] for row in changed_since(names["first"], names["now"])}
    assert saved["weight"].endswith("(seen=[9])")
    assert saved["count"].endswith("(calls=[1], c={})")


def test_whole_numbers_of_settings_are_values_and_those_of_variables_are_counters(tmp_path: Path) -> None:
    made = "from types import SimpleNamespace\nargs, n = SimpleNamespace(n=0), 0\nfirst = look()\nargs.n, n = 5, 5"
    names = run_script(tmp_path / "train.py", made)
    saved = {row[2]: row[3] for row in changed_since(names["first"], names["now"])}
    assert saved["args.n"] == "5"
    assert "n" not in saved


def test_what_a_value_is_does_not_depend_on_where_it_is_kept() -> None:
    best, tensor, queue, table, stopper = 2.5, torch.tensor(2.5), deque([1, 2]), {"a": [None, "b"]}, Stopper()
    slotted = Slotted()
    texts = next(found for (_, function), found in values(sys._getframe()).items() if function.startswith("test_what"))
    assert texts["best"] == texts["tensor"] == "2.5"
    assert texts["queue"] == "[1, 2]"
    assert texts["table"] == "(a=[None, 'b'])"
    assert texts["stopper"] == "(best=3.5, module=Linear(in_features=1, out_features=1))"
    assert texts["slotted"] == "(best=3.5, module=Linear(in_features=1, out_features=1), number=7)"
    assert (best, tensor, queue, table, stopper, slotted) is not None


def test_tensors_and_what_is_very_long_are_no_plain_values() -> None:
    weights, long = torch.zeros(2), [0.5] * 5000
    texts = next(found for (_, function), found in values(sys._getframe()).items() if function.startswith("test_tens"))
    assert not {"weights", "long"} & set(texts)
    assert (weights, long) is not None


def refused(tmp_path: Path, loop: str, before: str = "1.0", *, at_start: bool = False) -> list[str]:
    """What is refused after a resume of a script that begins with `best = 9.0` and was at `before`."""
    path = tmp_path / "train.py"
    path.write_text(f"best = 9.0\n{loop}")
    now = {(str(path), "<module>"): {"best": "9.0"}}
    found = restarted_values([("train.py", "<module>", "best", before)], now, at_start=at_start)
    return [str(one) for one in found if one.is_wrong]


EARLY = """
for epoch in run.epochs(9):
    loss = evaluate()
    if loss < best:
        best, waited = loss, 0
    else:
        waited += 1
    if waited > 3:
        break
"""


def test_a_value_that_decides_on_another_that_ends_the_loop_is_refused_by_name(tmp_path: Path) -> None:
    (sentence,) = refused(tmp_path, EARLY)
    assert sentence.startswith("`best` (train.py) is 9.0 and was 1.0 when the snapshot was taken. It decides when")


def test_a_value_that_is_as_it_was_is_not(tmp_path: Path) -> None:
    assert refused(tmp_path, EARLY, before="9.0") == []


def test_nor_one_that_is_only_shown(tmp_path: Path) -> None:
    assert refused(tmp_path, "for epoch in run.epochs(9):\n    best += evaluate()\n    print(best)\n") == []


def test_nor_one_that_every_turn_sets_anew_before_it_is_read(tmp_path: Path) -> None:
    loop = "while run.step < 9:\n    best = rate(run.step)\n    for group in groups: group['lr'] = best\n"
    assert refused(tmp_path, loop) == []


def test_one_that_is_read_before_it_is_set_is(tmp_path: Path) -> None:
    loop = "while run.step < 9:\n    for group in groups: group['lr'] = best\n    best = best * 0.9\n"
    assert refused(tmp_path, loop)


def test_one_that_goes_into_the_loss_is(tmp_path: Path) -> None:
    loop = "for batch in loader:\n    loss = best * f(batch)\n    loss.backward()\n    best *= 0.99\n"
    (sentence,) = refused(tmp_path, loop)
    assert "It goes into loss.backward()" in sentence


READ_ELSEWHERE = {
    "a function": ("def penalty(x):\n    return best * x\n", "loss(batch) + penalty(batch)", "goes into"),
    "a function by another": (
        "def penalty(x):\n    return best * x\ndef total(x):\n    return penalty(x)\n", "total(batch)", "goes into",
    ),
    "a module": (
        "class Net(nn.Module):\n    def forward(self, x):\n        return best * x\n", "model(batch)", "is read in Net",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ_ELSEWHERE)
def test_one_that_a_function_or_a_module_reads_is(name: str, tmp_path: Path) -> None:
    definition, loss, how = READ_ELSEWHERE[name]
    loop = f"{definition}for batch in loader:\n    ({loss}).backward()\n    best *= 0.99\n"
    (sentence,) = refused(tmp_path, loop)
    assert f"It {how}" in sentence


def test_nor_one_that_a_function_has_of_its_own_or_only_shows(tmp_path: Path) -> None:
    own = "def penalty(best):\n    return best\ndef show():\n    print(best)\n"
    loop = f"{own}for batch in loader:\n    penalty(batch).backward()\n    best *= 0.99\n    show()\n"
    assert refused(tmp_path, loop) == []


class Config:
    beta, name, is_on = 0.5, "x", True


def test_numbers_in_arguments_classes_and_files_of_the_script_are_values_of_their_own() -> None:
    args, space = Namespace(beta=0.25, path="x", steps=3), SimpleNamespace(beta=0.75)
    here, config, library = sys.modules[__name__], Config, math
    texts = next(found for (_, function), found in values(sys._getframe()).items() if function.startswith("test_numb"))
    assert texts["here.LIMIT"] == "7"
    assert {name: text for name, text in texts.items() if "." in name and not name.startswith("here.")} == {
        "args.beta": "0.25", "args.steps": "3", "space.beta": "0.75", "config.beta": "0.5", "config.is_on": "True",
        "args.path": "'x'", "config.name": "'x'",
    }  # fmt: skip
    assert (args, space, here, config, library) is not None


def test_such_a_number_is_refused_where_the_loop_shows_that_it_matters_and_else_named(tmp_path: Path) -> None:
    (path := tmp_path / "train.py").write_text("for b in loader:\n    (a.beta * f(b)).backward()\n    a.beta *= 0.9\n")
    now = {(str(path), "<module>"): {"a.beta": "1.0", "a.other": "1.0"}}
    saved = [("train.py", "<module>", name, "0.5") for name in ("a.beta", "a.other")]
    matters, other = restarted_values(saved, now, at_start=False)
    assert "`a.beta` (train.py) is 1.0 and was 0.5 when the snapshot was taken. It goes into" in str(matters)
    assert other.depends is None
    assert str(other) == "`a.other` (train.py) is 1.0 and was 0.5 when the snapshot was taken."


class Factored(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.shown = 0.5, 1.5

    def anneal(self) -> None:
        self.factor *= 0.9


def test_of_a_module_of_the_script_the_numbers_count_from_which_its_code_goes_on() -> None:
    criterion, layer = Factored(), torch.nn.Dropout(0.5)
    texts = next(
        found for (_, function), found in values(sys._getframe()).items() if function.startswith("test_of_a_m")
    )
    assert texts["criterion"] == "Factored(factor=0.5)"
    assert texts["layer"] == "Dropout(p=0.5, inplace=False)"
    assert (criterion, layer) is not None


def test_those_of_the_runs_own_models_are_left_to_others() -> None:
    model, criterion = Factored(), Factored()
    found = values(sys._getframe(), [model])
    texts = next(one for (_, function), one in found.items() if function.startswith("test_those"))
    assert texts["model"] == "Factored"
    assert texts["criterion"] == "Factored(factor=0.5)"
    assert criterion is not None


READ_BY_SAMPLES = {
    "a data set": "class Scaled(Dataset):\n    def __getitem__(self, index):\n        return best * index\n",
    "a collate function": "def pad(samples):\n    return best * samples\nmade = DataLoader(data, collate_fn=pad)\n",
    "a transform": "def change(x):\n    return best * x\nmade = Images(transform=Compose([change]))\n",
}


@pytest.mark.parametrize("reader", READ_BY_SAMPLES)
def test_a_value_that_samples_depend_on_is_refused(tmp_path: Path, reader: str) -> None:
    loop = "for batch in loader:\n    train(batch)\n    best *= 0.99\n"
    assert refused(tmp_path, loop) == []
    linecache.clearcache()
    parsed.cache_clear()
    (words,) = refused(tmp_path, READ_BY_SAMPLES[reader] + loop)
    assert "It is read in" in words


def test_tensors_are_refused_where_a_loop_sets_their_name_and_they_go_into_the_loss(tmp_path: Path) -> None:
    sets = "for epoch in run.epochs(3):\n    if epoch == 1:\n        best = weigh()\n    loss(best).backward()\n"
    found = {}
    for name, loop in {"set": sets, "in place": sets.replace("best = weigh()", "best.mul_(2)")}.items():
        (path := tmp_path / f"{name}.py").write_text(loop)
        now = {(str(path), "<module>"): {"tensors in best": "one"}}
        saved = [(path.name, "<module>", "tensors in best", "other")]
        (found[name],) = restarted_values(saved, now, at_start=False)
    assert "begin anew: nothing saves them. `best` goes into loss(best).backward()" in str(found["set"])
    assert "`best` goes into loss(best).backward()" in str(found["in place"])
    assert [one.is_wrong for one in found.values()] == [True, False]


ROLLBACK = """
best = None
for epoch in run.epochs(9):
    if is_better():
        best = copy(model.state_dict())
    if is_worse():
        {then}
"""


@pytest.mark.parametrize(("then", "is_refused"), [("model.load_state_dict(best)", True), ("save(best)", False)])
def test_of_tensors_that_are_none_again_it_is_said(tmp_path: Path, then: str, is_refused: bool) -> None:
    (path := tmp_path / "train.py").write_text(ROLLBACK.format(then=then))
    now = {(str(path), "<module>"): {"best": "None"}}
    [found] = restarted_values([("train.py", "<module>", "tensors in best", "x")], now, at_start=False)
    assert str(found).startswith("tensors in `best` (train.py) had changed in training, and begin anew")
    assert (found.depends is not None) == is_refused


def test_numpy_arrays_are_known_by_what_they_hold() -> None:
    weights, table, kinds = np.ones(3), {"a": [np.zeros(2)]}, np.array([object()])
    first = next(found for (_, name), found in values(sys._getframe()).items() if name.startswith("test_numpy"))
    weights[1], table["a"][0][0] = 2.0, 1.0
    later = next(found for (_, name), found in values(sys._getframe()).items() if name.startswith("test_numpy"))
    names = ["tensors in weights", "tensors in table"]
    assert [name for name in first if name.startswith("tensors in ")] == names
    assert all(first[name] != later[name] for name in names)
    assert kinds is not None


def test_arrays_are_called_so_and_a_worker_that_joins_may_not_have_others_in_its_loss(tmp_path: Path) -> None:
    loop = "for b in loader:\n    loss(best, b).backward()\n    best[1] = f(b)\n    shown[0] = 1\n    show(shown)\n"
    (path := tmp_path / "train.py").write_text(loop)
    names = ("tensors in best", "tensors in shown")
    now = {(str(path), "<module>"): dict.fromkeys(names, "arrays 1")}
    found = restarted_values([(path.name, "<module>", name, "arrays 2") for name in names], now, at_start=False)
    assert str(found[0]).startswith("arrays in `best` (train.py) had changed in training, and begin anew")
    assert [(one.is_wrong, one.may_join) for one in found] == [(False, False), (False, True)]


class Slow:
    def __init__(self) -> None:
        self.count, self.seen, self.slow = 0, 0, [[torch.zeros(2)]]

    def step(self, params: list[torch.Tensor]) -> None:
        self.count += 1
        self.seen += 1
        if self.count % 5 == 0:
            for p, s in zip(params, self.slow[0], strict=True):
                p.data.copy_(s)

    def __repr__(self) -> str:
        return f"{self.seen} steps"


def test_attributes_of_an_object_count_by_themselves_unless_the_run_has_kept_it() -> None:
    wrapper = Slow()
    first = values(sys._getframe())
    wrapper.step([])
    wrapper.slow[0][0] += 1
    saved = [(row[0], row[1], row[2], row[3]) for row in changed_since(first, values(sys._getframe()))]
    wrapper = Slow()
    found = {one.name: one for one in restarted_values(saved, values(sys._getframe()), at_start=False)}
    assert "decides whether p.data.copy_() is called" in str(found["count"])
    assert "`slow` goes into p.data.copy_(s)" in str(found["tensors in slow"])
    assert "seen" not in found
    assert "Slow()" not in {function for _, function in values(sys._getframe(), kept=[wrapper])}


def test_functions_and_objects_are_known_by_their_kinds() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    scheduler, loss, file = torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.nn.functional.mse_loss, sys.stdout
    texts = next(found for (_, function), found in values(sys._getframe()).items() if function.startswith("test_func"))
    assert (texts["optimizer"], texts["scheduler"]) == ("SGD", "StepLR")
    assert texts["loss"].startswith("mse_loss (line ")
    assert "file" not in texts
    assert (scheduler, loss, file) is not None


BEST = """
best = {first}
for epoch in run.epochs(3):
    for batch in loader:
        train(batch)
    accuracy = test()
    {decides}
    best = max(accuracy, best)
"""


@pytest.mark.parametrize(("first", "later"), [(0, 0.25), (float("inf"), 3)])
def test_a_number_of_another_type_than_at_first_is_looked_at(tmp_path: Path, first: float, later: float) -> None:
    (tmp_path / "train.py").write_text(BEST.format(first=first, decides="if accuracy < best: optimizer.step()"))
    place = str(tmp_path / "train.py"), "<module>"
    at_first, now = ({place: texts_of({"best": value, "count": value}, ())} for value in (first, later))
    saved = [(row[0], row[1], row[2], row[3]) for row in changed_since(at_first, now)]
    (found,) = restarted_values(saved, at_first, at_start=False)
    assert f"`best` (train.py) is {first} and was {later}" in str(found)
    assert found.is_wrong
    assert found.depends is not None
    assert changed_since({place: {"best": "1"}}, {place: {"best": "2"}}) == []


@pytest.mark.parametrize(
    ("decides", "then"), [("if accuracy > best: save()", "best = accuracy"), ("pass", "best = max(accuracy, best)")]
)
def test_a_number_with_which_others_are_compared_is_named_although_nothing_is_trained_by_it(
    tmp_path: Path, decides: str, then: str
) -> None:
    loop = BEST.format(first=0, decides=decides).replace("best = max(accuracy, best)", then)
    (tmp_path / "train.py").write_text(f"{loop}    total = best + 1\n")
    saved = [("train.py", "<module>", name, "0.25") for name in ("best", "total", "accuracy")]
    now = {(str(tmp_path / "train.py"), "<module>"): {"best": "0", "total": "0"}}
    (found,) = restarted_values(saved, now, at_start=False)
    assert (found.name, found.depends) == ("best", None)
    assert found.may_join


MEAN = """
for epoch in run.epochs(3):
    total = 0.0
    for batch in loader:
        train(batch)
        total += run.loss
        took, began = clock() - began, clock()
    print(total)
"""


def test_a_sum_that_is_only_shown_is_named_where_the_run_goes_on_in_its_middle(tmp_path: Path) -> None:
    """What is set to something else each time, as a time, is no sum."""
    (path := tmp_path / "train.py").write_text(MEAN)
    saved = [("train.py", "<module>", name, "2.5") for name in ("total", "began")]
    now = {(str(path), "<module>"): {"total": "0.0", "began": "0.5"}}
    (found,) = restarted_values(saved, now, at_start=False)
    assert (found.name, found.depends, found.is_wrong) == ("total", None, False)
    assert restarted_values(saved, now, at_start=True) == []


EACH_PASS = """
for epoch in run.epochs(3):
    {sets}
    for batch in loader:
        (best * loss_of(batch)).backward()
        best *= 0.9
"""


@pytest.mark.parametrize(
    ("head", "is_refused"),
    [("best *= 0.9", True), ("best = 0.9 * best", True), ("best = max(0.9, best)", False), ("best = 0.9", False)],
)
def test_what_has_come_to_the_value_of_an_epochs_end_by_its_first_step_is_one_behind(
    tmp_path: Path, head: str, is_refused: bool
) -> None:
    (path := tmp_path / "train.py").write_text(
        f"for e in run.epochs(3):\n    {head}\n    for b in loader:\n        (best * f(b)).backward()\n"
    )
    first, now = ({(str(path), "<module>"): {"best": text}} for text in ("1.0", "0.9"))
    saved = [("train.py", "<module>", "best", "0.9")]
    found = restarted_values(saved, now, at_start=True, first=first)
    assert [one.is_wrong for one in found] == [True] * is_refused
    assert all("`best` (train.py) begins anew, and has come to 0.9 once more" in str(one) for one in found)
    assert restarted_values(saved, now, at_start=True) == []


def test_at_the_start_of_a_pass_what_is_set_before_each_of_them_is_as_it_should_be(tmp_path: Path) -> None:
    in_each, before_all = EACH_PASS.format(sets="best = 9.0"), EACH_PASS.format(sets="pass")
    assert refused(tmp_path, in_each, at_start=True) == []
    assert len(refused(tmp_path, in_each, at_start=False)) == 1
    linecache.clearcache()
    parsed.cache_clear()
    assert len(refused(tmp_path, before_all, at_start=True)) == 1


def test_nor_one_from_which_something_was_made_before_training(tmp_path: Path) -> None:
    loop = "optimizer = make(best)\nscheduler = StepLR(optimizer, 1)\nfor batch in loader:\n    best = best * 2\n"
    assert refused(tmp_path, loop) == []


def test_a_list_that_is_handed_to_a_function_beside_the_optimizer_is_not_taken_for_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("losses = []\nfor epoch in run.epochs(3):\n    train(model, optimizer, loader, losses)\n")
    now = {(str(path), "<module>"): {"losses": "[]", "rate": "0.1"}}
    assert restarted_values([("train.py", "<module>", "losses", "[1.5]")], now, at_start=False) == []
    path.write_text("rate = 0.1\nfor epoch in run.epochs(3):\n    train(model, optimizer, rate)\n    rate *= 0.9\n")
    (path2 := tmp_path / "later.py").write_text(path.read_text())
    now = {(str(path2), "<module>"): {"rate": "0.1"}}
    assert len(restarted_values([("later.py", "<module>", "rate", "0.09")], now, at_start=False)) == 1


NESTED = """
for epoch in run.epochs(9):
    for _ in range(4):
        best = draw()
        train(best)
"""


def test_what_a_loop_inside_of_a_loop_sets_first_is_not_carried(tmp_path: Path) -> None:
    (path := tmp_path / "train.py").write_text(f"best, kept = 9.0, 9.0\n{NESTED}        kept = 0.5 * kept + best\n")
    source = function_at(str(path), "<module>")
    assert source is not None
    assert not is_carried(source, "best")
    assert is_carried(source, "kept")


def test_modules_without_elements_are_passed_over() -> None:
    lazy, meta, real = torch.nn.LazyLinear(2), torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2)
    texts = next(found for (_, function), found in values(sys._getframe()).items() if function.startswith("test_mod"))
    assert [name for name in texts if name.startswith("tensors in ")] == ["tensors in real"]
    assert (lazy, meta, real) is not None


MIXUP = """
import numpy as np
rng = np.random.default_rng(0)
for batch in loader:
    share = rng.beta(0.4, 0.4)
    for x, y in run.lanes(batch):
        {use}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("use", "line"),
    [("cross_entropy(model(share * x), y).backward()", 7), ("show(share)", None)],
    ids=["it goes into the loss", "it is only shown"],
)
def test_a_generator_that_was_drawn_from_and_begins_anew_is_named(use: str, line: int | None, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(MIXUP.format(use=use))
    rng = np.random.default_rng(0)
    first = next(found for found in values(sys._getframe()).values() if "rng" in found)["rng"]
    rng.random()
    later = next(found for found in values(sys._getframe()).values() if "rng" in found)["rng"]
    saved = [("train.py", "<module>", "rng", later)]
    [found] = restarted_values(saved, {(str(path), "<module>"): {"rng": first}}, at_start=False)
    assert found.is_generator
    assert "the random generator `rng` (train.py) had been drawn from in training, and begins anew" in str(found)
    assert (None if found.depends is None else found.depends.line) == line
    assert restarted_values(saved, {(str(path), "<module>"): {"rng": later}}, at_start=False) == []


class Counted:
    __slots__ = ("best",)

    def look(self) -> Any:
        return values(sys._getframe())


def test_attributes_in_slots_of_self_and_of_other_objects_are_looked_at_by_themselves() -> None:
    counted = Counted()
    counted.best = 2.5
    found = {function: texts for (_, function), texts in counted.look().items()}
    assert found["Counted"] == {"best": "2.5"}
    assert found["Counted()"] == {"best": "2.5"}


class Stored:
    """A method sets `kept`."""

    def __init__(self) -> None:
        self.kept: list[Any] = [1, 2]

    def store(self) -> None:
        self.kept = [3, torch.ones(2)]


def test_of_an_object_what_is_as_it_was_is_unchanged_where_something_else_is_not() -> None:
    texts = {"one.a": "1", "one.b": "2", "one.tensors in c": "x", "one.d": "stored: 4", "other.e": "5"}
    assert _unchanged("one", texts, texts) == set()
    assert _unchanged("one", texts, {"other.e": "6"}) == set()
    assert _unchanged("one", texts, {"one.a": "0"}) == {"b", "c"}
    assert _unchanged("one", texts, {"one.d": "stored: 3"}) == {"a", "b", "c"}
    assert _unchanged("one", texts | {"one.a": "0"}, {"one.tensors in c": "y"}) == {"a", "b"}
    both = {"one.a": "[1]", "one.tensors in a": "x", "one.b": "2"}
    assert _unchanged("one", both, {"one.tensors in a": "y"}) == {"b"}


def test_what_a_method_stores_is_marked_whether_plain_or_of_tensors() -> None:
    one = Stored()
    one.store()
    found = values(sys._getframe())
    (texts,) = (texts for (path, function), texts in found.items() if path == __file__ and function.endswith(".held"))
    assert {name: text.startswith("stored: ") for name, text in texts.items() if name.startswith("one.")} == {
        "one.tensors in kept": True
    }
