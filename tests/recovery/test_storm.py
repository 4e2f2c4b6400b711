"""Hundreds of faults over three hosts cost no step, and never leave two trainings."""

import random
from pathlib import Path

import pytest
import storm
from hosts import hosts
from workers import on_workers

NUM_FAULTS = 200


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0])
def test_two_hundred_faults_over_three_hosts_lose_no_step_and_never_leave_two_trainings(
    seed: int, tmp_path: Path
) -> None:
    account, digests, last = weathered(seed, NUM_FAULTS, tmp_path)
    assert account.two_trainings() == []
    assert account.lost_steps() == 0
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "stop").write_text(str(last))
    assert digests == {on_workers(1, storm.train, tmp_path / "alone", 0, limit_s=storm.LIFE_S)[0][0]}


def weathered(seed: int, num_faults: int, folder: Path) -> tuple[storm.Account, set[str], int]:
    """What a storm of so many faults has left: the account, the digests of all, and the last step."""
    with hosts(storm.WORKERS_OF) as network:
        weather = storm.Storm(network, folder, random.Random(seed))
        try:
            weather.start([0])  # it founds the run, and the others join
            weather.until(lambda: weather.step > 0, "founded")
            weather.restore()
            done = 0
            while done < num_faults:
                done += weather.fault()
            digests, last = weather.finish()
        finally:
            weather.close()
            (folder / "told").write_text("\n".join([*weather.told, "", *weather.left]))
    return storm.Account.read(folder), digests, last
