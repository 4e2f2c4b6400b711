"""Which device a worker gets, by whom it was told, and what workers must have alike."""

import warnings
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from workers import on_workers, outcomes

import lockstep
from lockstep.cli.run import command
from lockstep.determinism import hardware
from lockstep.determinism.operators import named_once
from lockstep.determinism.process import settle_process
from lockstep.errors import BadArgument, BadEnvironment, Disagreement, Misuse
from lockstep.events import Started
from lockstep.launch.job import Job
from lockstep.observe.console import start_line
from lockstep.run.replication import place_on, place_state
from lockstep.settings.device import choose, in_words, sharing
from lockstep.settings.environment import Overrides, process_environment, read_overrides, with_variable
from lockstep.settings.options import Options, resolve
from lockstep.world import World

CUDA_0, CUDA_1 = torch.device("cuda", 0), torch.device("cuda", 1)
META = torch.device("meta")

# -- the choice ------------------------------------------------------------------------------------------------------


@given(local_size=st.integers(1, 64), num_gpus=st.integers(1, 16))
def test_every_gpu_gets_within_one_of_the_same_number_of_workers(local_size: int, num_gpus: int) -> None:
    shared = sharing("cuda", local_size, num_gpus)
    counts = [shared.get(torch.device("cuda", number), 0) for number in range(num_gpus)]
    assert max(counts) - min(counts) <= 1


@given(local_size=st.integers(1, 64), num_gpus=st.integers(1, 16))
def test_neighbours_are_on_one_gpu_or_on_the_next(local_size: int, num_gpus: int) -> None:
    numbers = [choose("cuda", rank, local_size, num_gpus).index for rank in range(local_size)]
    assert numbers[0] == 0
    assert all(after - before in (0, 1) for before, after in pairwise(numbers))


@given(founders=st.integers(1, 16), num_gpus=st.integers(1, 8), slot=st.integers(0, 64))
def test_slots_beyond_the_founders_wrap_around(founders: int, num_gpus: int, slot: int) -> None:
    around = slot + max(founders, num_gpus)
    assert choose("cuda", around, founders, num_gpus) == choose("cuda", slot, founders, num_gpus)


def test_workers_that_come_later_take_gpus_that_the_founders_left_free() -> None:
    assert [choose(None, slot, 2, 4).index for slot in range(4)] == [0, 1, 2, 3]


def test_without_a_word_it_is_the_gpu_if_there_is_one() -> None:
    assert (choose(None, 0, 1, 0).type, choose(None, 0, 1, 1)) == ("cpu", CUDA_0)


def test_a_gpu_by_number_is_that_of_every_worker() -> None:
    assert {choose("cuda:1", rank, 4, 2) for rank in range(4)} == {CUDA_1}


def test_the_cpu_can_be_asked_for_where_there_are_gpus() -> None:
    assert choose("cpu", 3, 4, 2).type == "cpu"


@pytest.mark.parametrize("nonsense", ["gpu", "cuda:", "cuda:-1", "cuda:01", "CUDA", "", "cpu:0", "mps", "cuda:1 "])
def test_a_name_that_is_no_device_is_refused_with_what_is_allowed(nonsense: str) -> None:
    with pytest.raises(BadArgument, match=r'device must be "cpu", "cuda" .* or "cuda:0"'):
        choose(nonsense, 0, 1, 1)


def test_a_gpu_beyond_the_last_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadEnvironment, match="finds 2 GPUs, cuda:0 to cuda:1"):
        choose("cuda:2", 0, 1, 2)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_is_refused_by_a_torch_without_it() -> None:
    with pytest.raises(BadEnvironment, match="built without CUDA"):
        choose("cuda", 0, 1, 0)


def test_the_start_line_tells_the_gpu_and_who_shares_it() -> None:
    words = in_words(sharing("cuda", 4, 1), "NVIDIA H200")
    event = Started("train.py", 4, 8, 7, 1, True, device=words)
    assert start_line(event).endswith(" · exact · cuda:0 (NVIDIA H200), 4 workers share it")


def test_several_gpus_are_told_from_the_first_to_the_last() -> None:
    assert in_words(sharing(None, 3, 2), "H200") == "cuda:0 to cuda:1 (H200), up to 2 workers share one"


def test_the_start_line_says_nothing_of_the_cpu() -> None:
    assert in_words(sharing("cpu", 4, 1), "H200") == ""


# -- who tells -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonsense", ["gpu", 1, True, 0.5])
def test_start_refuses_a_device_that_is_none(nonsense: object) -> None:
    with pytest.raises(BadArgument, match="device must be"):
        lockstep.start(device=nonsense)  # type: ignore[arg-type]


def test_start_takes_a_torch_device() -> None:
    with lockstep.start(device=torch.device("cpu")) as run:
        assert run.device == torch.device("cpu")


def test_a_device_of_the_command_line_goes_over_the_scripts_and_is_noted() -> None:
    settings = resolve(Options(device="cuda"), Overrides(device="cpu"), World())
    assert settings.notes == ("device cpu from the command line, not cuda from the script",)


def test_the_variable_of_the_command_line_decides() -> None:
    with with_variable("LOCKSTEP_DEVICE", "cpu"), lockstep.start(device="cuda") as run:
        assert run.device.type == "cpu"


def test_the_launcher_hands_the_device_on(tmp_path) -> None:
    variables = Job("train.py", tmp_path, device="cuda:1").variables_of_all({})
    assert read_overrides(variables).device == "cuda:1"


def test_a_variable_that_names_no_device_is_refused_by_its_name() -> None:
    with pytest.raises(BadEnvironment, match="LOCKSTEP_DEVICE must be"):
        read_overrides({"LOCKSTEP_DEVICE": "gpu"})


def test_the_command_line_refuses_a_device_that_is_none() -> None:
    result = CliRunner().invoke(command, ["--device", "gpu", "train.py"])
    assert result.exit_code == 2
    assert '"cuda" (each worker its own GPU)' in result.output


# -- what workers must have alike ------------------------------------------------------------------------------------


def replicate_with_precision(by_rank: list[str]) -> str:
    run = lockstep.start()
    torch.set_float32_matmul_precision(by_rank[run.rank])
    run.replicate(nn.Linear(2, 2))
    return torch.get_float32_matmul_precision()


def test_workers_with_another_precision_are_refused_with_the_switch() -> None:
    found = outcomes(2, replicate_with_precision, ["highest", "high"])
    assert [outcome.error for outcome in found] == ["Disagreement", "Disagreement"]
    assert "torch.get_float32_matmul_precision(): worker 0 has highest, worker 1 has high" in found[0].message


def test_precision_stays_as_the_user_set_it() -> None:
    assert on_workers(2, replicate_with_precision, ["high", "high"]) == ["high", "high"]


def test_switches_that_were_set_in_two_ways_can_still_be_read() -> None:
    assert on_workers(1, read_mixed_switches) == [True]


def read_mixed_switches() -> bool:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    return hardware.precision()["torch.backends.cuda.matmul.fp32_precision"] == "ieee"


def test_reading_the_switches_starts_no_cuda() -> None:
    hardware.recorded(torch.device("cpu"))
    assert not torch.cuda.is_initialized()


def save_then_resume_with_precision(path: str, before: str, after: str) -> list[str]:
    result: list[str] = []
    with lockstep.start() as run:
        run._events.subscribe(lambda event: result.append(getattr(event, "text", "")))
        torch.set_float32_matmul_precision(before)
        run.replicate(nn.Linear(2, 2))
        run.save(path)
        torch.set_float32_matmul_precision(after)
        run.resume(path)
    return [text for text in result if "bits may differ" in text]


def test_a_resume_with_another_precision_says_once_that_bits_may_differ(tmp_path) -> None:
    ((result,),) = on_workers(1, save_then_resume_with_precision, str(tmp_path / "saved"), "highest", "high")
    assert "torch.get_float32_matmul_precision() was highest, is high" in result


def test_a_resume_with_the_same_precision_says_nothing_of_bits(tmp_path) -> None:
    assert on_workers(1, save_then_resume_with_precision, str(tmp_path / "saved"), "high", "high") == [[]]


def test_a_checkpoint_without_a_word_on_hardware_is_no_difference() -> None:
    assert hardware.difference({}, hardware.recorded(torch.device("cpu"))) == ""


def test_a_newcomer_with_another_gpu_is_refused() -> None:
    with pytest.raises(Disagreement, match="disagree on GPU: worker 3 has L4, worker 0 has H200"):
        hardware.refuse_difference({"GPU": "H200"}, {"GPU": "L4"}, 3)


# -- kernels ---------------------------------------------------------------------------------------------------------


def test_a_variable_is_set_while_needed_and_gone_afterwards() -> None:
    with with_variable("LOCKSTEP_TEST_WORKSPACE", ":4096:8"):
        assert process_environment()["LOCKSTEP_TEST_WORKSPACE"] == ":4096:8"
    assert "LOCKSTEP_TEST_WORKSPACE" not in process_environment()


def test_a_variable_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_WORKSPACE", ":16:8")
    with with_variable("LOCKSTEP_TEST_WORKSPACE", ":4096:8"):
        assert process_environment()["LOCKSTEP_TEST_WORKSPACE"] == ":16:8"
    assert process_environment()["LOCKSTEP_TEST_WORKSPACE"] == ":16:8"


def test_on_the_cpu_cublas_is_not_spoken_of() -> None:
    with settle_process(1, exact=True):
        assert "CUBLAS_WORKSPACE_CONFIG" not in process_environment()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings that go the way they always go."""
    passed_on: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: passed_on.append(str(message)))
        yield passed_on


def warn_of(*operators: str) -> None:
    for operator in operators:
        warnings.warn(f"{operator} does not have a deterministic implementation, but you set", stacklevel=1)


def test_an_operator_without_a_deterministic_kernel_is_named_once(shown: list[str]) -> None:
    said: list[str] = []
    with named_once(said.append):
        warn_of("put_", "put_", "kthvalue CUDA", "put_")
    assert [text.partition(" has no deterministic kernel: results may differ")[0] for text in said] == [
        "put_",
        "kthvalue CUDA",
    ]
    assert shown == []


def test_other_warnings_go_as_before(shown: list[str]) -> None:
    said: list[str] = []
    with named_once(said.append):
        warnings.warn("something else", stacklevel=1)
    assert (said, shown) == ([], ["something else"])


def test_after_the_run_torch_warns_by_itself_again(shown: list[str]) -> None:
    with named_once(lambda _: None):
        pass
    warn_of("put_")
    assert len(shown) == 1


@pytest.mark.parametrize(
    ("warning", "named"),
    [
        ("Flash Attention defaults to a non-deterministic algorithm. To explicitly enable", "Flash Attention takes a"),
        (
            "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
            "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
            "CuBLAS and you have CUDA >= 10.2.",
            "a matrix product of cuBLAS",
        ),
    ],
)
def test_the_other_texts_of_torch_are_known_too(warning: str, named: str, shown: list[str]) -> None:
    said: list[str] = []
    with named_once(said.append):
        warnings.warn(warning, stacklevel=1)
    assert [text.startswith(named) for text in said] == [True]
    assert shown == []


def use_what_torch_warns_of() -> list[str]:
    """`put_` without `accumulate` has no deterministic kernel on any device."""
    result: list[str] = []
    warnings.simplefilter("always")
    with lockstep.start() as run:
        run._events.subscribe(lambda event: result.append(getattr(event, "text", "")))
        for _ in range(2):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    return [text for text in result if "deterministic" in text]


def test_a_run_names_an_operator_that_torch_itself_warns_of() -> None:
    ((result,),) = on_workers(1, use_what_torch_warns_of)
    assert result.startswith("put_ has no deterministic kernel: results may differ in the last bits from run to run")


# -- models and optimizers -------------------------------------------------------------------------------------------


def trained(optimizer: type[torch.optim.Optimizer], **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    made = optimizer(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    model(torch.ones(1, 2)).sum().backward()
    made.step()
    return model, made


def state_devices(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {key: value.device.type for state in optimizer.state.values() for key, value in state.items()}


def to_meta(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in list(group["params"]):
            there = nn.Parameter(parameter.to(META))
            optimizer.state[there] = optimizer.state.pop(parameter)
            group["params"] = [there if known is parameter else known for known in group["params"]]


def test_the_step_of_adam_stays_on_the_cpu() -> None:
    _, optimizer = trained(torch.optim.Adam)
    to_meta(optimizer)
    place_state(optimizer)
    assert state_devices(optimizer) == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_the_step_of_fused_adam_goes_with_its_parameter() -> None:
    _, optimizer = trained(torch.optim.Adam, fused=True)
    to_meta(optimizer)
    place_state(optimizer)
    assert state_devices(optimizer)["step"] == "meta"


@pytest.mark.parametrize("fused", [False, True])
def test_state_is_placed_as_torch_places_what_it_loads(fused: bool) -> None:
    _, optimizer = trained(torch.optim.AdamW, fused=fused)
    to_meta(optimizer)
    other = torch.optim.AdamW([p for group in optimizer.param_groups for p in group["params"]], fused=fused)
    other.load_state_dict(optimizer.state_dict())
    place_state(optimizer)
    assert state_devices(optimizer) == state_devices(other)


def test_with_the_cpu_as_device_nothing_is_touched() -> None:
    model, optimizer = trained(torch.optim.SGD, momentum=0.9)
    before = [id(tensor) for tensor in [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]]
    place_on(torch.device("cpu"), model, [optimizer])
    after = [id(tensor) for tensor in [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]]
    assert before == after


def test_buffers_go_with_the_model() -> None:
    norm = nn.BatchNorm1d(2, affine=False)
    place_on(META, norm, [])
    assert {buffer.device.type for buffer in norm.buffers()} == {"meta"}


def test_a_model_whose_parameters_would_be_replaced_is_refused() -> None:
    """Going to the meta device replaces parameters, as set_overwrite_module_params_on_conversion does for a GPU."""
    with pytest.raises(Misuse, match="replaced its parameters"):
        place_on(META, nn.Linear(2, 2), [])
