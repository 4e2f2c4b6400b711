"""A resumed run has the checkpoint's optimizers: another class is refused, and settings without effect are named."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import lockstep
from lockstep.errors import BadCheckpoint
from lockstep.events import Note
from lockstep.state.checkpoints import file
from lockstep.state.snapshot import Snapshot

X = torch.linspace(-1, 1, 24).reshape(12, 2)
NOTE = "are the checkpoint's, not the script's"


def trained(kind: Any, path: Path, *, resume: bool = False, factor: float = 1.0, **settings: Any) -> list[str]:
    """One step, saved at `path`; the notes on settings. The rate is multiplied by `factor` before it is saved."""
    with lockstep.start(lanes=2, seed=1) as run:
        notes: list[str] = []
        run._events.subscribe(lambda event: notes.append(event.text), Note)  # type: ignore[attr-defined]
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer: Optimizer = kind(model.parameters(), **settings)
        run.replicate(model, optimizer)
        if resume:
            run.resume(path)
        for x in run.lanes(X):
            model(x).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= factor
        run.save(path)
        return [text for text in notes if NOTE in text]


@pytest.mark.parametrize(("before", "now"), [(SGD, AdamW), (AdamW, SGD), (AdamW, Adam), (Adam, RMSprop)])
def test_an_optimizer_of_another_class_is_refused_by_both_names(tmp_path: Path, before: Any, now: Any) -> None:
    trained(before, tmp_path / "saved", lr=0.1)
    with pytest.raises(BadCheckpoint, match=f"has {before.__name__} as optimizer, and the script makes {now.__name__}"):
        trained(now, tmp_path / "saved", resume=True, lr=0.1)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"lr": 0.1}, {"lr": 0.5}, "lr is 0.1, and the script says 0.5"),
        ({"lr": 0.1}, {"lr": torch.tensor(0.5)}, "lr is 0.1, and the script says 0.5"),
        ({"betas": (0.9, 0.99)}, {"betas": (0.9, 0.95)}, r"betas is \[0.9, 0.99\], and the script says \[0.9, 0.95\]"),
        ({"weight_decay": 0.0, "eps": 1e-8}, {"weight_decay": 0.1, "eps": 1e-6}, "eps is .*, weight_decay is 0.0, and"),
        ({"fused": None}, {"fused": True}, "fused is None, and the script says True"),
    ],
)
def test_a_setting_that_the_script_makes_otherwise_now_is_named(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], told: str
) -> None:
    trained(AdamW, tmp_path / "saved", **before)
    for _ in range(2):  # a resume of the resumed run says it again
        (note,) = trained(AdamW, tmp_path / "saved", resume=True, **now)
        assert re.search(told, note), note


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=str)
def test_a_rate_that_a_schedule_has_changed_is_not_named(tmp_path: Path, rate: Any) -> None:
    trained(AdamW, tmp_path / "saved", lr=rate, factor=0.5)
    assert trained(AdamW, tmp_path / "saved", lr=rate, resume=True) == []


def test_a_rate_that_was_set_after_a_resume_is_the_scripts(tmp_path: Path) -> None:
    trained(AdamW, tmp_path / "saved", lr=0.25)
    assert len(trained(AdamW, tmp_path / "saved", lr=0.5, resume=True, factor=2)) == 1
    assert trained(AdamW, tmp_path / "saved", lr=0.5, resume=True) == []


def test_a_checkpoint_that_does_not_say_how_its_optimizers_were_made_is_read(tmp_path: Path) -> None:
    trained(AdamW, tmp_path / "saved", lr=0.1)
    snapshot = file.read(tmp_path / "saved")
    older = {name: value for name, value in snapshot.state.items() if name != "optimizers_made"}
    assert len(older) < len(snapshot.state)
    file.write(tmp_path / "saved", Snapshot(snapshot.tensors, older))
    assert trained(AdamW, tmp_path / "saved", lr=0.5, resume=True) == []
    assert json.loads((tmp_path / "saved" / "manifest.json").read_text())["state"]["optimizers_made"]


def test_a_script_may_go_to_another_working_folder_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with lockstep.start(lanes=2) as run:
        model = nn.Linear(2, 1)
        run.replicate(model, SGD(model.parameters(), 0.1))
        run.checkpoints("kept", every_steps=1)
        os.chdir("elsewhere")
        for _ in run.epochs(2):
            for x in run.lanes(X):
                model(x).sum().backward()
    assert list((tmp_path / "kept").glob("step-*"))
    assert not (tmp_path / "elsewhere" / "kept").exists()
