"""Wrong use: each a sentence that says what is wrong and what to write, with nothing half applied."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from workers import on_workers, outcomes

import lockstep
from lockstep.determinism import hardware
from lockstep.errors import BadArgument, BadCheckpoint, CannotCut, Disagreement, Misuse
from lockstep.run import terms
from lockstep.settings.environment import LaunchPlace
from lockstep.world import World

X, Y = torch.randn(12, 4), torch.randint(0, 3, (12,))


@pytest.fixture
def run() -> Iterator[lockstep.Run]:
    with lockstep.start(lanes=3) as started:
        yield started


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lanes": 0}, "lanes must be at least 1, not 0"),
        ({"lanes": -2}, "lanes must be at least 1, not -2"),
        ({"lanes": 2.5}, "lanes must be a whole number"),
        ({"lanes": True}, "lanes must be a whole number"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"threads": 10**12}, "threads must be at most 4096, not 1000000000000"),
        ({"lanes": 10**20}, "lanes must be at most 1048576, not 100000000000000000000"),
        ({"lanes": 10**5000}, "lanes must be at most 1048576, not a number of 16610 bits"),
        ({"seed": 10**400}, "seed must be at most 18446744073709551615, not a number of 1329 bits"),
        ({"bucket_bytes": 10**5000}, "bucket_bytes must be at most"),
        ({"timeout_s": 1e30}, "timeout_s must be a positive number of seconds, a year's at most, not 1e"),
        ({"wire": "tcp"}, "wire must be one of 'shared', 'hierarchical', 'gloo'"),
        ({"exact": "yes"}, "exact must be True or False"),
        ({"timeout_s": -1}, "timeout_s must be a positive number"),
        ({"assignment": [[0, 1], [2]]}, "names 2 workers, but there are 1"),
        ({"assignment": [[0, 2]]}, "exactly once"),
        ({"assignment": 5}, "a list of lanes for each worker"),
        ({"assignment": [[0, 1]], "lanes": 3}, "carries 2 lanes, but lanes=3"),
    ],
)
def test_a_wrong_option_of_start_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        lockstep.start(**options)


def test_the_largest_seed_trains_and_is_saved(tmp_path: Path) -> None:
    with lockstep.start(lanes=2, seed=2**64 - 1) as run:
        model, optimizer = parts()
        run.replicate(model, optimizer)
        for batch in run.shard(DataLoader(TensorDataset(torch.rand(8, 4)), batch_size=4, shuffle=True)):
            for (x,) in run.lanes(batch):
                model(x).sum().backward()
            optimizer.step()
        run.save(tmp_path / "saved")
        assert run.resume(tmp_path / "saved") == 2


def test_a_second_start_says_to_use_the_first(run: lockstep.Run) -> None:
    with pytest.raises(Misuse, match=r"already called.*run\.close\(\)"):
        lockstep.start()


def test_a_new_start_after_close_is_fine() -> None:
    lockstep.start(lanes=2).close()
    lockstep.start(lanes=4).close()


def test_a_model_without_parameters_is_refused(run: lockstep.Run) -> None:
    with pytest.raises(BadArgument, match="ReLU has no parameters"):
        run.replicate(nn.ReLU())


def test_something_that_is_no_module_is_refused(run: lockstep.Run) -> None:
    with pytest.raises(BadArgument, match=r"takes a torch\.nn\.Module"):
        run.replicate(torch.zeros(3))  # type: ignore[type-var]


def test_a_second_model_has_a_replicate_of_its_own(run: lockstep.Run) -> None:
    with pytest.raises(BadArgument, match="takes one model: call it once for each"):
        run.replicate(nn.Linear(2, 2), nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_scheduler_given_by_position_says_to_give_it_by_name(run: lockstep.Run) -> None:
    model, optimizer = parts()
    with pytest.raises(BadArgument, match="scheduler=s"):
        run.replicate(model, torch.optim.lr_scheduler.StepLR(optimizer, 1))  # type: ignore[arg-type]


def test_a_tracked_thing_without_state_is_refused(run: lockstep.Run) -> None:
    with pytest.raises(BadArgument, match="has no state_dict"):
        run.replicate(nn.Linear(1, 1), thing=3)  # type: ignore[arg-type]


def test_a_batch_that_cannot_be_cut_says_why(run: lockstep.Run) -> None:
    run.replicate(*parts())
    with pytest.raises(CannotCut, match=r'batch\["mode"\]'):
        run.lanes({"x": X, "mode": "train"})


def test_an_empty_batch_is_refused(run: lockstep.Run) -> None:
    run.replicate(*parts())
    with pytest.raises(BadArgument, match="no samples"):
        run.lanes(X[:0])


def test_leaving_the_lanes_by_break_stops_the_optimizer(run: lockstep.Run) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    before = model.weight.detach().clone()
    for x, y in run.lanes((X, Y)):
        F.cross_entropy(model(x), y).backward()
        break
    with pytest.raises(Misuse, match=r"optimizer\.step\(\) after run\.lanes was left by break"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_leaving_the_lanes_by_break_stops_the_next_lanes(run: lockstep.Run) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    for _ in run.lanes((X, Y)):
        break
    with pytest.raises(Misuse, match=r"run\.lanes after run\.lanes was left by break"):
        run.lanes((X, Y))


@pytest.mark.parametrize("where", ["in a lane", "in the lanes", "left"])
def test_a_script_that_catches_what_is_refused_ends_with_it_after_the_epoch(run: lockstep.Run, where: str) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    caught = []
    with pytest.raises(
        Misuse, match=r"inside of run\.lanes" if where == "in the lanes" else r"run\.lanes was left by break"
    ):
        for _ in run.epochs(2):
            for number in range(3):
                try:
                    for x, y in run.lanes((X, Y)):
                        F.cross_entropy(model(x), y).backward()
                        if where == "in a lane" and number == 1:
                            raise ValueError("a bad sample")
                        if where == "in the lanes":
                            optimizer.step()
                        if where == "left":
                            break
                    optimizer.step()
                    optimizer.zero_grad()
                except Exception as error:  # noqa: BLE001 - as users write it
                    caught.append(error)
    assert len(caught) == (2 if where == "in a lane" else 3)


def test_an_optimizer_step_inside_the_lanes_is_refused_before_it_does_anything(run: lockstep.Run) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    before = model.weight.detach().clone()
    with pytest.raises(Misuse, match=r"optimizer\.step\(\) inside of run\.lanes"):
        for x, y in run.lanes((X, Y)):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("what", ["lanes", "total", "save", "replicate"])
def test_calls_that_belong_outside_are_refused_inside_the_lanes(run: lockstep.Run, what: str) -> None:
    run.replicate(*parts())
    calls = {
        "lanes": lambda: run.lanes((X, Y)),
        "total": lambda: run.total(1),
        "save": lambda: run.save("never"),
        "replicate": lambda: run.replicate(nn.Linear(1, 1)),
    }
    with pytest.raises(Misuse, match=rf"run\.{what} inside of run\.lanes"):
        for _ in run.lanes((X, Y)):
            calls[what]()


def test_a_backward_outside_of_the_lanes_says_what_to_write(run: lockstep.Run) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    with pytest.raises(Misuse, match=r"for x, y in run\.lanes\(batch\).*run\.no_sync\(\)"):
        F.cross_entropy(model(X), Y).backward()


def test_a_backward_outside_of_the_lanes_is_noticed_after_training_steps_too(run: lockstep.Run) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    for x, y in run.lanes((X, Y)):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(Misuse, match="outside of the lanes"):
        F.cross_entropy(model(X), Y).backward()


def test_a_backward_in_an_evaluation_is_refused(run: lockstep.Run) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    model.eval()
    with pytest.raises(Misuse, match="train=True"):
        for x, y in run.lanes((X, Y)):
            F.cross_entropy(model(x), y).backward()


def test_training_in_eval_mode_is_possible_when_asked_for(run: lockstep.Run) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    model.eval()
    for x, y in run.lanes((X, Y), train=True):
        F.cross_entropy(model(x), y).backward()
    assert run.step == 1
    assert model.weight.grad is not None


def test_run_backward_outside_of_the_lanes_is_refused(run: lockstep.Run) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    with pytest.raises(Misuse, match=r"run\.backward outside of run\.lanes"):
        run.backward(F.cross_entropy(model(X), Y))


def test_a_loss_that_is_no_single_number_is_refused(run: lockstep.Run) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    with pytest.raises(BadArgument, match=r"one element, not a tensor \[4, 3\]"):
        for x, _ in run.lanes((X, Y)):
            run.backward(model(x))


def test_parameters_added_after_replicate_are_named(run: lockstep.Run) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    model.append(nn.Linear(3, 3))
    with pytest.raises(
        Misuse, match=r"added after run\.replicate: 1\.weight, 1\.bias.*replicate\(model, optimizer\) again"
    ):
        run.lanes((X, Y))


def test_replicating_again_after_a_change_is_fine(run: lockstep.Run) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    run.replicate(model)
    model.append(nn.Linear(3, 3))
    run.replicate(model, torch.optim.SGD(model.parameters(), 0.1))
    for x, y in run.lanes((X, Y)):
        F.cross_entropy(model(x), y).backward()
    assert model[1].weight.grad is not None


def test_an_optimizer_of_a_model_that_was_not_replicated_is_noticed(run: lockstep.Run) -> None:
    _, optimizer = parts()
    run.replicate(nn.Linear(4, 3), optimizer)
    with pytest.raises(Misuse, match=r"belong to no replicated model.*run\.replicate\(that_model\)"):
        run.lanes((X, Y))


def test_run_needs_a_model_before_it_can_train_or_save(run: lockstep.Run) -> None:
    with pytest.raises(Misuse, match=r"call run\.replicate"):
        run.save("never")


def test_shard_refuses_what_is_no_loader(run: lockstep.Run) -> None:
    with pytest.raises(BadArgument, match=r"takes a torch DataLoader.*run\.lanes\(batch\)"):
        run.shard([1, 2, 3])  # type: ignore[arg-type]


def test_shard_refuses_a_distributed_sampler(run: lockstep.Run) -> None:
    data = TensorDataset(X)
    with pytest.raises(BadArgument, match="DistributedSampler"):
        run.shard(DataLoader(data, sampler=DistributedSampler(data, 2, 0)))


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_a_wrong_number_of_epochs_is_refused(run: lockstep.Run, count: Any) -> None:
    with pytest.raises(BadArgument, match="number of epochs"):
        run.epochs(count)


def test_a_total_of_something_that_cannot_be_added_is_refused(run: lockstep.Run) -> None:
    with pytest.raises(BadArgument, match="adds real numbers, tensors or a list"):
        run.total("three")


def test_a_missing_checkpoint_is_named(run: lockstep.Run, tmp_path: Path) -> None:
    run.replicate(*parts())
    run.save(tmp_path / "epoch-3")
    with pytest.raises(BadCheckpoint, match=r"no checkpoint at .*epoch-4; checkpoints in .*: epoch-3"):
        run.resume(tmp_path / "epoch-4")


@pytest.mark.parametrize("num_saved", [2, 3])
def test_a_checkpoint_of_more_models_than_the_script_has_come_to_is_refused_by_their_number(
    run: lockstep.Run, tmp_path: Path, num_saved: int
) -> None:
    for _ in range(num_saved):
        run.replicate(*parts())
    run.save(tmp_path / "c")
    run.close()
    with lockstep.start(lanes=3) as second:
        second.replicate(*parts())
        with pytest.raises(BadCheckpoint, match=f"has {num_saved} models, and the script has given 1 to run.replicate"):
            second.resume(tmp_path / "c")


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_loaded(run: lockstep.Run, tmp_path: Path) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    run.save(tmp_path / "c")
    run.close()
    with lockstep.start(lanes=3) as second:
        other = nn.Linear(4, 2)
        before = other.weight.detach().clone()
        second.replicate(other, torch.optim.SGD(other.parameters(), 0.1))
        with pytest.raises(
            BadCheckpoint, match=r"another model: weight is float32 \[3, 4\] there and float32 \[2, 4\] here"
        ):
            second.resume(tmp_path / "c")
        assert torch.equal(other.weight, before)
        assert second.step == 0


def test_a_checkpoint_with_other_lanes_than_told_is_refused(tmp_path: Path) -> None:
    with lockstep.start(lanes=3) as run:
        run.replicate(*parts())
        run.save(tmp_path / "c")
    with lockstep.start(lanes=4) as run:
        run.replicate(*parts())
        with pytest.raises(BadCheckpoint, match="a run with lanes 3, but this run was started with lanes 4"):
            run.resume(tmp_path / "c")


def test_save_does_not_overwrite_a_folder_that_is_no_checkpoint(run: lockstep.Run, tmp_path: Path) -> None:
    run.replicate(*parts())
    (tmp_path / "precious").mkdir()
    with pytest.raises(BadArgument, match="is not a checkpoint"):
        run.save(tmp_path / "precious")


# -- several workers: all end, at once, with a name --------------------------------------------------------


def _different_models() -> None:
    run = lockstep.start()
    run.replicate(nn.Linear(4, 3 if run.rank == 0 else 2))


def test_different_models_are_refused_with_the_difference() -> None:
    found = outcomes(2, _different_models)
    assert [outcome.error for outcome in found] == ["Disagreement"] * 2
    assert "parameter weight: worker 0 has float32 [3, 4], worker 1 has float32 [2, 4]" in found[0].message


def _different_settings() -> None:
    lockstep.start(seed=int(os.environ["RANK"]))


def test_different_settings_are_refused_at_the_start() -> None:
    found = outcomes(2, _different_settings)
    assert "disagree on seed: worker 0 has 0, worker 1 has 1" in found[0].message


def _different_processors(exact: bool) -> str:
    hardware.cpu_name = lambda: f"CPU of worker {os.environ['RANK']}"
    return _trained(lockstep.start(exact=exact))


def _different_kernels(how: str) -> None:
    if os.environ["RANK"] == "1" and how == "switch":
        torch._C._set_mkldnn_enabled(False)
    elif os.environ["RANK"] == "1":
        os.environ["MKL_CBWR"] = "COMPATIBLE"
    lockstep.start()


def _trained(run: lockstep.Run) -> str:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    for x, y in run.lanes((X, Y)):
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return run.digest()


def test_different_processors_are_refused_unless_the_same_bits_are_not_asked_for() -> None:
    found = outcomes(3, _different_processors, True)
    assert [outcome.error for outcome in found] == ["Disagreement"] * 3
    assert "kind of processor: worker 0 has CPU of worker 0" in found[0].message
    assert "take hosts of one kind, or start with exact=False" in found[0].message
    assert len(set(on_workers(2, _different_processors, False))) == 1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("switch", "torch.backends.mkldnn.enabled: worker 0 has True, worker 1 has False"),
        ("variable", "variables that choose kernels: worker 0 has none, worker 1 has MKL_CBWR=COMPATIBLE"),
    ],
)
def test_different_kernels_are_refused_at_the_start(how: str, words: str) -> None:
    assert words in outcomes(2, _different_kernels, how)[0].message


def test_a_newcomer_with_another_processor_is_refused_and_a_resumed_run_says_so() -> None:
    here = hardware.processor(torch.device("cpu"))
    place = LaunchPlace("by hand", World(1, 2), "127.0.0.1", 0)
    with pytest.raises(Disagreement, match="take hosts of one kind"):
        terms.refuse_difference({hardware.PROCESSOR: "another"}, here, place)
    assert "kind of processor was another, is" in hardware.difference({hardware.PROCESSOR: "another"}, here)
    assert hardware.difference({}, here) == ""  # a checkpoint that was written before
    recorded = hardware.recorded(torch.device("cpu"))
    assert recorded.items() >= {**here, **hardware.variables()}.items()
    assert not hardware.compared(torch.device("cpu")).keys() & here.keys()  # under exact=False a newcomer may differ


def _different_batches() -> None:
    run = lockstep.start()
    model, optimizer = parts()
    run.replicate(model, optimizer)
    for _ in range(3):
        batch = (X, Y) if run.step < 2 or run.rank == 0 else (X[:7], Y[:7])
        for x, y in run.lanes(batch):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_different_batches_are_a_named_error_and_not_a_wrong_sum() -> None:
    found = outcomes(2, _different_batches)
    assert [outcome.error for outcome in found] == ["Disagreement"] * 2
    assert "samples in the global batch: worker 0 has 12, worker 1 has 7" in found[0].message


def _different_operations() -> None:
    run = lockstep.start()
    model, optimizer = parts()
    run.replicate(model, optimizer)
    if run.rank == 0:
        run.total(1)
    else:
        for x, y in run.lanes((X, Y)):
            F.cross_entropy(model(x), y).backward()


def test_different_operations_are_a_named_error_and_not_a_hang() -> None:
    found = outcomes(2, _different_operations)
    assert [outcome.error for outcome in found] == ["Disagreement"] * 2
    assert "operation: worker 0 has run.total, worker 1 has training step" in found[0].message


def _one_ends_early() -> None:
    run = lockstep.start()
    model, optimizer = parts()
    run.replicate(model, optimizer)
    for _ in range(2 if run.rank == 0 else 1):
        for x, y in run.lanes((X, Y)):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_a_worker_that_ends_early_is_named_to_those_that_go_on() -> None:
    found = outcomes(2, _one_ends_early)
    assert found[0].error == "Disagreement"
    assert "worker 0 has training step, worker 1 has end of the run" in found[0].message
    assert found[0].message.endswith("Decide by run.step, run.loss or run.total, which are the same on every worker.")
    assert found[1].error is None


def _raises_on_one() -> None:
    run = lockstep.start(recover=False)
    model, optimizer = parts()
    run.replicate(model, optimizer)
    for x, y in run.lanes((X, Y)):
        if run.rank == 1:
            raise ValueError("bad sample")
        F.cross_entropy(model(x), y).backward()


def test_when_one_worker_raises_the_others_learn_who_was_lost() -> None:
    found = outcomes(3, _raises_on_one)
    assert [outcome.error for outcome in found] == ["WorkerLost", "ValueError", "WorkerLost"]
    assert any("worker 1 was lost" in found[rank].message for rank in (0, 2))  # who leaves is lost to the other


def _requires_grad_differs() -> None:
    run = lockstep.start()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    run.replicate(model)
    model[0].requires_grad_(run.rank == 0)
    for x, y in run.lanes((X, Y)):
        F.cross_entropy(model(x), y).backward()


def test_parameters_frozen_on_one_worker_only_are_named() -> None:
    found = outcomes(2, _requires_grad_differs)
    assert [outcome.error for outcome in found] == ["Disagreement"] * 2
    assert "gradient of 0.bias: worker 0 has float32 [4] in bucket 0, worker 1 has nothing" in found[0].message


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: torch.zeros(1).expand(3), "is expanded, so that several of its elements are one in memory"),
        (lambda: torch.zeros(3).to_sparse(), "is sparse_coo, and only dense ones are replicated"),
        (lambda: torch.zeros(3, device="meta"), "is on the meta device"),
    ],
)
def test_a_tensor_that_cannot_be_replicated_is_named(run: lockstep.Run, kind: str, make: Any, told: str) -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    if kind == "buffer":
        model[0].register_buffer("extra", make())
    else:
        model[0].extra = nn.Parameter(make())
    with pytest.raises(BadArgument, match=rf"^{kind} 0\.extra {told}"):
        run.replicate(model)


@pytest.mark.parametrize("shape", [(1, 3), (1, 1), (1, 0)])
def test_a_tensor_that_is_expanded_by_a_dimension_of_one_element_is_replicated(
    run: lockstep.Run, shape: tuple[int, int]
) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("place", torch.arange(shape[1]).expand(shape))
    run.replicate(model)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)], ids=["parameter", "buffer"])
def test_a_lazy_model_is_named_before_its_first_forward_pass(run: lockstep.Run, lazy: nn.Module) -> None:
    with pytest.raises(BadArgument, match=r"^(parameter weight|buffer running_mean) is not initialised yet"):
        run.replicate(lazy)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda run: run.checkpoints("a\0b"), r"run\.checkpoints\(folder=...\) takes a path, .* NUL byte: 'a\\x00b'"),
        (lambda run: run.checkpoints("c", resume="a\0b"), r"run\.checkpoints\(resume=...\) takes a path, .* NUL byte"),
        (lambda run: run.save("a\0b"), r"run\.save takes a path, .* NUL byte"),
        (lambda run: run.resume("a\0b"), r"run\.resume takes a path, .* NUL byte"),
        (lambda run: run.timeline(folder="a\0b"), r"run\.timeline\(folder=...\) takes a path, .* NUL byte"),
        (lambda run: run.checkpoints(3), r"run\.checkpoints\(folder=...\) takes a path, not int"),
        (lambda run: run.save(b"here"), r"run\.save takes a path, not bytes"),
    ],
)
def test_what_is_no_path_is_refused_by_the_argument(run: lockstep.Run, call: Any, told: str) -> None:
    run.replicate(*parts())
    with pytest.raises(BadArgument, match=told):
        call(run)


@pytest.mark.parametrize("of_graph", [False, True])
def test_a_batch_that_requires_a_gradient_is_named(run: lockstep.Run, of_graph: bool) -> None:
    model, optimizer = parts()
    run.replicate(model, optimizer)
    x = X.clone().requires_grad_()
    with pytest.raises(Misuse, match=r'batch\["x"\] requires a gradient.*\(batch\["x"\]\.detach\(\)\).*in the loop'):
        run.lanes({"y": Y, "x": x * 2 if of_graph else x})
    model.eval()
    for lane in run.lanes({"y": Y, "x": x}):  # an evaluation adds nothing up
        (gradient,) = torch.autograd.grad(model(lane["x"]).sum(), lane["x"])
        assert gradient.any()
