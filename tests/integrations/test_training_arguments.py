"""Which arguments of a Trainer are refused. Transformers need not be installed: arguments are fields of a dataclass."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from lockstep.errors import BadArgument
from lockstep.integrations.training_arguments import check_arguments


@dataclass
class Arguments:
    """Some that are known, one that cannot work, and some of a version that is newer than lockstep."""

    learning_rate: float = 1e-3
    optim: str = "adamw_torch"
    deepspeed: str | None = None
    ddp_find_unused_parameters: bool | None = None
    is_new: bool | None = None
    new_words: str = "usual"
    new_table: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    "given", [{}, {"learning_rate": 1.0}, {"is_new": False}, {"new_table": {"of": None}}, {"new_words": ""}], ids=str
)
def test_what_is_known_or_is_not_asked_for_is_taken(given: dict[str, Any]) -> None:
    check_arguments(Arguments(**given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"deepspeed": "zero.json"}, "deepspeed='zero.json'.*lockstep does what it would do"),
        ({"ddp_find_unused_parameters": False}, "ddp_find_unused_parameters=False.*leave it out"),
        ({"is_new": True}, "is_new=True.*does not know it"),
        ({"new_words": "other"}, "new_words='other'.*does not know it"),
        ({"new_table": {"of": 1}}, "new_table=.*does not know it"),
        ({"optim": "galore_adamw_layerwise"}, "updates in the backward pass"),
    ],
    ids=str,
)
def test_what_cannot_work_or_is_not_known_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        check_arguments(Arguments(**given))
