"""What data sets are made of, their settings and what they hold: compared after a resume.

# Note [Settings that are set once]
# `if epoch == 3: train_set.transform = strong` is done once, and a process that starts later does not do it. What a
# data set holds besides numbers cannot be put back, and what it computes from them neither. So a snapshot has, as text,
# the settings of each loader's data set that have changed since training began, with those of before: plain values,
# the kinds of functions and objects, the lengths of lists. They are read when a pass begins, since a script may set
# others while it evaluates. Where one has an earlier text again when training goes on, the script is refused, unless it
# had come back to an earlier one before, which is a rhythm of the script's own. What a data set stores while it reads a
# sample is its own business, and is not looked at.

# Note [Contents that begin anew]
# `random.shuffle(data.files)` and `data.labels[:half] = predicted` go on from what the epoch before has left. A process
# that starts later begins with other contents, and trains on other samples under the same indices. So a snapshot has
# digests of what data sets hold, where it has changed since training began. In the middle of a pass, and on a newcomer,
# they must be the same. Where a pass begins they may have been made anew for the epoch: that is noted, unless their
# number has changed, as that of a data set that grows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from lockstep.data import GlobalBatch, ShardedLoader
from lockstep.data.identity import each_in, made_of
from lockstep.data.structure import attributes
from lockstep.script.owners import are_settings, own_methods
from lockstep.script.place import DATA, SEED_DATA
from lockstep.script.restart.attributes import SET_AGAIN
from lockstep.script.restart.difference import Difference
from lockstep.script.restart.texts import text_of
from lockstep.state.progress import DataProgress

Texts = dict[str, str]

_MANY = (list, tuple, dict, set, frozenset)
_MOST_EARLIER = 16
_MOST_DEPTH = 4


class DataSetOrigins:
    """What the loaders' data sets were made of. See Note [Another data set on each worker]."""

    def __init__(self, progress: DataProgress) -> None:
        self._progress = progress
        self._saved: dict[str, tuple[int, str]] = {}
        """The loader's number and what its data set was made of, by name, until training goes on."""

    def begin(self, batch: GlobalBatch) -> list[Difference]:
        """A training loop over `batch` begins. Returns what is not as in the snapshot."""
        saved, self._saved = self._saved, {}
        now = self.facts() if saved else {}
        middle = None if batch.begins_pass else batch.loader
        other = [(name, number) for name, (number, words) in saved.items() if now.get(name, words) != words]
        return [_other_data(name, now[name], saved[name][1], is_wrong=number == middle) for name, number in other]

    def facts(self) -> dict[str, str]:
        """In words, which must be equal on all workers."""
        return {name: words for name, (_, words) in _named(self.state()).items()}

    def data_sets(self) -> dict[int, Any]:
        """By the numbers of their loaders."""
        return {number: loader.dataset for number, loader in self._present().items()}

    def state(self) -> dict[str, dict[str, str]]:
        """Its part of a snapshot."""
        return {str(number): dict(loader.made_of) for number, loader in self._present().items()}

    def load(self, saved: Mapping[str, Mapping[str, str]]) -> None:
        self._saved = _named(saved)

    def _present(self) -> dict[int, ShardedLoader]:
        present = self._progress.present()
        return {number: loader for number, loader in self._progress.loaders.items() if loader in present}


def _other_data(name: str, now: str, before: str, is_wrong: bool) -> Difference:
    """If the run goes on in the middle of a pass, it is wrong."""
    words = f"{name} is {now}, and was {before} when the snapshot was taken"
    if is_wrong:
        return Difference(f"{words}: a pass cannot go on with other samples. {SEED_DATA}", is_wrong)
    words += ". If the data set was not changed on purpose, its order or split is drawn without a seed."
    return Difference(words, is_wrong)


def _named(made_of: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[int, str]]:
    return {
        DATA.format(number=number, part=part): (int(number), words)
        for number, parts in made_of.items()
        for part, words in parts.items()
    }


class DataSetContents:
    """See Note [Contents that begin anew]. `read` gives what data sets hold now, in words that begin with its size."""

    def __init__(self, read: Callable[[], Texts]) -> None:
        self._read = read
        self._first: Texts = {}
        self._saved: Texts = {}
        """Those of the snapshot, until training goes on."""

    def note_first(self) -> None:
        """The script begins to train."""
        self._first = self._read()

    def begin(self, *, at_start: bool, has_joined: bool) -> list[Difference]:
        """A training loop begins. Returns what is not as it was, after a resume."""
        saved, self._saved = self._saved, {}
        now = self._read() if saved else {}
        other = [name for name, words in saved.items() if now.get(name, words) != words]
        in_place = [name for name in other if _size(now[name]) == _size(saved[name])]
        must_be = has_joined or not at_start
        return [_other_contents(name, must_be) for name in (other if must_be else in_place)]

    def state(self) -> Texts:
        """Its part of a snapshot: what has changed."""
        now = self._read() if self._first else {}
        return {name: words for name, words in now.items() if self._first.get(name, words) != words} | self._saved

    def load(self, saved: Mapping[str, str]) -> None:
        self._saved = dict(saved)


def _other_contents(name: str, is_wrong: bool) -> Difference:
    words = f"{name} had been changed in training, and is not as it was when the snapshot was taken"
    if is_wrong:
        words += ": this pass would have other samples. Make it in every epoch from the epoch's number."
    else:
        words += ". If an epoch goes on from what the one before has left there, make it from the epoch's number."
    return Difference(words, is_wrong)


def contents_of_data_sets(data_sets: Mapping[int, Any]) -> Texts:
    """What data sets hold, by the numbers of their loaders, but for what they change while they read samples."""
    return {
        f"{name} (the data set of loader {number})": words
        for number, data_set in data_sets.items()
        for name, words in made_of(data_set, _changed_inside).items()
    }


def _changed_inside(holder: Any) -> set[str]:
    return {one for method in own_methods(holder) if method.is_inner for one in (*method.stores, *method.fills)}


def _size(words: str) -> str:
    """Of `[3, 4] digest` and `12: a, b, ... digest`."""
    return words.partition("]" if words.startswith("[") else ":")[0]


def unset(name: str, value: str, before: str) -> Difference:
    """A setting that has an earlier value again, although the script had changed it."""
    words = f"{name} is {value} and was {before} when the snapshot was taken. {SET_AGAIN}"
    return Difference(words, is_wrong=True)


class DataSetSettings:
    """See Note [Settings that are set once]. `texts` reads the settings as they are now."""

    def __init__(self, texts: Callable[[], Texts]) -> None:
        self._texts = texts
        self._history: dict[str, list[str]] = {}
        """The texts before training and at the start of each pass, without repetition; the present one is last."""
        self._alternates: set[str] = set()
        self._saved: Mapping[str, Sequence[str]] = {}
        """Those of the snapshot, until training goes on."""

    def note_first(self) -> None:
        """The script begins to train: what changes from now on is in a snapshot."""
        self._note(self._texts())

    def begin(self, *, at_start: bool) -> list[Difference]:
        """A training loop begins, at the start of a pass or within one. Returns what has an earlier value again."""
        if not at_start and not self._saved:
            return []
        now, saved, self._saved = self._texts(), self._saved, {}
        found = [unset(name, now[name], texts[-1]) for name, texts in saved.items() if now.get(name) in texts[:-1]]
        self._history |= {name: list(texts) for name, texts in saved.items()}
        self._note(now)
        return found

    def state(self) -> dict[str, list[str]]:
        """Its part of a snapshot: the texts of what has changed and does not alternate."""
        changed = {name: texts for name, texts in self._history.items() if len(texts) > 1}
        return {name: list(texts) for name, texts in changed.items() if name not in self._alternates}

    def load(self, saved: Mapping[str, Sequence[str]]) -> None:
        self._saved = saved

    def _note(self, now: Texts) -> None:
        self._history = {name: texts for name, texts in self._history.items() if name in now}
        for name, text in now.items():
            texts = self._history.setdefault(name, [text])
            if text in texts[:-1]:
                self._alternates.add(name)
            if texts[-1] != text:
                self._history[name] = [texts[0], *texts[1:][-_MOST_EARLIER:], text]


def texts_of_data_sets(data_sets: Mapping[int, Any]) -> Texts:
    """The settings of data sets, by the numbers of their loaders, and of those that they are made of."""
    found: Texts = {}
    for number, data_set in data_sets.items():
        texts: Texts = {}
        _add_texts(texts, type(data_set).__name__, data_set, _MOST_DEPTH)
        found |= {f"{name} (the data set of loader {number})": text for name, text in texts.items()}
    return found


def _add_texts(found: Texts, name: str, holder: Any, depth: int) -> None:
    hidden = {one for method in own_methods(holder) if method.is_inner for one in method.stores}
    for key, value in list(attributes(holder).items()):
        if key in hidden:
            continue
        text = text_of(value)
        if text is not None:
            found[f"{name}.{key}"] = text
        for path, one in each_in(f"{name}.{key}", value):
            if depth > 0 and (isinstance(one, Dataset) or are_settings(one)):
                _add_texts(found, path, one, depth - 1)
